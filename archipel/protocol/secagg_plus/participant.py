"""The device's side of a secure round over neighbours: seven steps, each once and in order.

Bell et al. 2020, with neighbours that each device draws itself (drawing.py). Every neighbour holds a share of both
secrets of a device and shows one of the two, so that both stay out of reach together (sizes.py). Where the server may
be malicious a device has, before it shows anything, the signatures of `threshold` neighbours that they take it as
present. So whoever helps to unmask the vectors of others is itself no longer one whose masks can be
taken off.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.errors import CertificateError, ConsistencyError, SecureAggregationError, ShareError, ThresholdError
from archipel.protocol.identity import VerifiedDevice, verify_chain
from archipel.protocol.messages import Chain
from archipel.protocol.revocations import NOBODY, Revoked
from archipel.protocol.sealed import public_bytes
from archipel.protocol.secagg import keys
from archipel.protocol.secagg.masks import apply_masks, reduce
from archipel.protocol.secagg_plus import shares
from archipel.protocol.secagg_plus.agreement import Draw
from archipel.protocol.secagg_plus.drawing import draw_neighbours
from archipel.protocol.secagg_plus.envelope import bind, commit_pair, divide, divide_runs, seal, unseal
from archipel.protocol.secagg_plus.inclusion import inclusion, presence, require_inclusions
from archipel.protocol.secagg_plus.links import Link, find_links
from archipel.protocol.secagg_plus.member import (
    Distinct,
    RoundKeys,
    read_member,
    seed_digest,
    shorten,
    sign_member,
    split_keys,
)
from archipel.protocol.secagg_plus.messages import (
    NOBODY_SAYS,
    Answer,
    Confirmed,
    Dealt,
    Drawn,
    Inbox,
    Inclusions,
    Invitation,
    Neighbours,
    Partners,
    Question,
    Refused,
    pack,
)
from archipel.protocol.secagg_plus.sizes import check_sizes
from archipel.protocol.secagg_plus.state import State, read_state, write_state
from archipel.protocol.secagg_plus.steps import take_once, take_step
from archipel.protocol.secagg_plus.terms import Terms
from archipel.protocol.secagg_plus.tree import check_members, hash_member
from archipel.protocol.vector import Vector, check_vector


class Participant:
    """One device in one secure round.

    A step that fails ends the participation: the secrets are dropped, and every later call raises
    SecureAggregationError. A step out of order raises it, too, and changes nothing. The last step may be repeated with
    what it was given before and returns the same; so a device goes on after a restart (`save`, `resume`).

    Arguments:
        terms: those of the plan, which the caller has verified.
        identity: the device's identity key.
        chain: the certificates from the enrolment key to `identity`.
        enrolment_key: the raw 32-byte public key at the start of every member's chain.
        randomness: `randomness(n)` gives n bytes from a cryptographic generator (`secrets.token_bytes`).
        revoked: nobody of these is taken as a neighbour.

    Raises CertificateError when chain and identity do not belong together.
    """

    def __init__(
        self,
        terms: Terms,
        identity: Ed25519PrivateKey,
        chain: Chain,
        enrolment_key: bytes,
        randomness: Callable[[int], bytes],
        revoked: Revoked = NOBODY,
    ) -> None:
        self._own = verify_chain(chain, enrolment_key)
        if public_bytes(identity) != self._own.device_key:
            raise CertificateError(f"device {self._own.device_id}: its chain is for another identity key")
        self._terms, self._identity, self._chain = terms, identity, chain
        self._enrolment_key, self._randomness, self._revoked = enrolment_key, randomness, revoked
        self._agreement = terms.agreement(terms.session)
        self._state = State(round_id=terms.session.round_id, plan=terms.session.plan)

    @classmethod
    def resume(cls, state: bytes, *given: Any, **named: Any) -> Participant:
        """The device after a restart, from what `save` gave; the other arguments are those of the class.

        Raises MessageError for a damaged state, ConsistencyError for one of another round or device.
        """
        device, kept = cls(*given, **named), read_state(state)
        session = device._terms.session
        if (kept.round_id, kept.plan) != (session.round_id, session.plan):
            raise ConsistencyError(f"state: it is of round {kept.round_id}, expected {session.round_id}")
        if kept.member and device._own != read_member(
            kept.member, session, device._enrolment_key, device._own.population,
            keys_bytes=device._agreement.full_bytes,
        )[0]:  # fmt: skip
            raise ConsistencyError(f"state: it is not of device {device.device_id}")
        device._state = kept
        return device

    def save(self) -> bytes:
        """All that the device needs to go on after a restart. It has secrets.

        Whoever sends what a step returned MUST have stored this before, sealed and synced: otherwise a device could be
        led to say two different things.
        """
        return write_state(self._state)

    def __repr__(self) -> str:
        return f"<Participant {self._own.device_id} in round {self._terms.session.round_id}, next: {self._state.next}>"

    @property
    def device_id(self) -> str:
        return self._own.device_id

    def advertise(self) -> bytes:
        """Step 0: makes the round's secrets; returns this device as a member, with the public keys, signed."""
        state = self._state
        if state.done == "advertise":
            return state.member
        with take_step(self._state, "advertise"):
            state.cipher_secret, state.mask_secret = self._draw(keys.KEY_BYTES), self._draw(keys.KEY_BYTES)
            state.seed = self._draw(keys.KEY_BYTES)
            cipher, mask = (self._agreement.private(secret) for secret in (state.cipher_secret, state.mask_secret))
            public = self._agreement.publish(cipher, mask, seed_digest(state.seed, self._terms.session))
            state.keys = bytes(public)
            state.member = sign_member(self._terms.session, public, self._chain, self._identity)
            return state.member

    def draw(self, invitation: Invitation) -> Drawn:
        """Step 1: draws neighbours among the cohort, which is fixed by its root. Raises PolicyError or ThresholdError.

        PolicyError: the plan's sizes do not withstand what this device assumes, with a cohort of this size.
        """

        def act() -> Drawn:
            terms, size = self._terms, invitation.size
            if not terms.min_cohort <= size <= terms.max_cohort or invitation.place >= size:
                raise ThresholdError(
                    f"cohort: place {invitation.place} of {size} devices, the plan has {terms.min_cohort} to "
                    f"{terms.max_cohort}"
                )
            check_sizes(terms.sizes, size, terms.assumed)
            self._state.invitation = invitation
            self._state.neighbours = draw_neighbours(size, invitation.place, terms.sizes.neighbours, self._draw)
            return Drawn(places=self._state.neighbours)

        return take_once(self._state, "draw", pack(invitation), Drawn, act)

    def deal(self, neighbours: Neighbours) -> Dealt:
        """Step 2: verifies the neighbours; returns shares of the mask key and of the seed, sealed for each.

        Raises CertificateError, MessageError, SecureAggregationError or ConsistencyError.
        """

        def act() -> Dealt:
            public = self._check_neighbours(neighbours)
            partners = self._state.neighbours[: self._terms.sizes.partners]
            self._state.mask_keys = {place: public[place].mask_key for place in partners}
            # Every check is done: only now are secrets split and leave the device.
            count = len(self._state.neighbours)
            pairs = zip(
                shares.split(self._state.mask_secret, self._terms.sizes.threshold, count, self._draw),
                shares.split(self._state.seed, self._terms.sizes.threshold, count, self._draw),
                strict=True,
            )
            own, private, dealt = self._invitation.place, self._agreement.private(self._state.cipher_secret), []
            for position, (place, pair) in enumerate(zip(self._state.neighbours, pairs, strict=True), start=1):
                key, opening = self._agreement.lock(private, public[place])
                dealt += [
                    opening,
                    seal(key, self._bound, own, place, pair, self._draw),
                    commit_pair(self._bound, own, position, pair),
                ]
            if self._agreement.by_draw:
                dealt.append(self._offer(partners, public))
            return Dealt(places=self._state.neighbours, dealt=b"".join(dealt))

        return take_once(self._state, "deal", pack(neighbours), Dealt, act)

    def receive(self, inbox: Inbox) -> Refused:
        """Step 3: opens the envelopes that others sealed for this device; returns whose it cannot accept.

        Nobody is blamed for one: the server, the dealer or this device may have garbled it. Who dealt it loses a holder
        of its shares. Raises ShareError for an inbox that no honest server makes.
        """

        def act() -> Refused:
            refused, own, private = [], self._invitation.place, self._agreement.private(self._state.cipher_secret)
            count, partner = len(inbox.dealers), [place <= self._terms.sizes.partners for place in inbox.positions]
            cipher_keys = divide("inbox", inbox.cipher_keys, keys.KEY_BYTES, count)
            runs = (self._agreement.dealt_bytes(), count), (self._agreement.told_bytes, sum(partner))
            envelopes, told = divide_runs("inbox", inbox.dealt, *runs)
            mask, offers = self._agreement.private(self._state.mask_secret), iter(told)
            for dealer, position, theirs, dealt, paired in zip(
                inbox.dealers, inbox.positions, cipher_keys, envelopes, partner, strict=True
            ):
                offered = next(offers) if paired else b""
                # A second envelope would replace the first, and a share of the one be shown for the other.
                if dealer in self._state.held or dealer in refused:
                    raise ShareError(f"inbox: shares from place {dealer} twice")
                if dealer == own or dealer >= self._invitation.size:
                    raise ShareError(f"inbox: shares from place {dealer}, which is nobody else's in the cohort")
                opening, sealed = dealt[: self._agreement.opening_bytes], dealt[self._agreement.opening_bytes :]
                try:
                    key = self._agreement.unlock(private, theirs, opening)
                    pair = unseal(key, self._bound, dealer, own, position, sealed)
                    if paired and self._agreement.by_draw:
                        self._state.heard[dealer] = self._agreement.accept(mask, offered, self._draw_of(dealer, own))
                    self._state.held[dealer] = pair
                except (ShareError, SecureAggregationError):
                    refused.append(dealer)
            # What leaks from the device later opens no envelope.
            self._state.cipher_secret = b""
            return Refused(dealers=sorted(refused))

        return take_once(self._state, "receive", pack(inbox), Refused, act)

    def mask(self, vector: Vector, partners: Partners) -> Vector:
        """Step 4: masks `vector` (uint32 [length], entries below 2^modulus_bits) and returns the result.

        The masks are the self mask and one for each partner: those that this device drew and that are not gone, and
        those that drew it. Raises ConsistencyError, ThresholdError (too many are gone to hide this device) or
        ProtocolError.
        """
        with take_step(self._state, "mask"):
            check_vector("update", vector, self._terms.modulus_bits)
            masked = vector.copy()
            private, own = self._agreement.private(self._state.mask_secret), self._invitation.place
            # Should this device seem to have left, its mask key is reconstructed. If its vector comes after all, this
            # mask alone still hides it.
            masks = [(keys.self_mask_key(self._state.seed, self._terms.session.salt, self._public.mask_key), 1)]
            for link in self._remaining(partners):
                draw = self._draw_of(own, link.place) if link.drew else self._draw_of(link.place, own)
                key = self._agreement.mask_key(private, link.public, link.part, draw, link.drew)
                # The one at the higher place adds the pair's mask, the other subtracts it.
                masks.append((key, 1 if own > link.place else -1))
            apply_masks(masked, masks)
            reduce(masked, self._terms.modulus_bits)
            # Without these no other vector can be masked, by whatever way the step is reached again.
            self._state.forget_masks()
            self._state.given, self._state.said = b"", hashlib.sha256(masked.tobytes()).digest()
            return masked

    def is_masked(self, masked: Vector) -> bool:
        """Whether this is the vector that step 4 returned, which alone may be sent after a restart."""
        digest = hashlib.sha256(masked.tobytes()).digest()
        return self._state.done == "mask" and hmac.compare_digest(self._state.said, digest)

    def confirm(self, question: Question) -> Confirmed:
        """Step 5: fixes what this device will answer.

        With a malicious server it signs for each present dealer whose shares it holds that it is present. Raises
        ConsistencyError for a question that no honest server asks.
        """

        def act() -> Confirmed:
            self._check_question(question)
            self._state.question = question
            malicious, own = self._terms.assumed.server == "malicious", self._invitation.place
            present = question.present if malicious else []
            signatures = [self._identity.sign(inclusion(self._bound, dealer, own)) for dealer in present]
            return Confirmed(signatures=b"".join(signatures))

        return take_once(self._state, "confirm", pack(question), Confirmed, act)

    def answer(self, question: Question, inclusions: Inclusions = NOBODY_SAYS) -> Answer:
        """Step 6: shows one share of each dealer asked for: of the seed of those present, of the mask key of the rest.

        The question must be the one of step 5. With a malicious server `inclusions` must have signatures of at least
        `threshold` neighbours that this device is present. Raises ConsistencyError or ThresholdError.
        """

        def act() -> Answer:
            self._check_question(question)
            if question != self._state.question:
                raise ConsistencyError("question: it is not the one that this device has confirmed")
            if self._terms.assumed.server == "malicious":
                own, threshold = self._invitation.place, self._terms.sizes.threshold
                require_inclusions(inclusions, self._state.device_keys, self._bound, own, threshold)
            return Answer(
                seeds=b"".join(self._state.held[place][1] for place in question.present),
                mask_keys=b"".join(self._state.held[place][0] for place in question.left),
                presence=self._identity.sign(presence(self._bound)),
            )

        return take_once(self._state, "answer", pack(question) + pack(inclusions), Answer, act)

    def _check_neighbours(self, neighbours: Neighbours) -> dict[int, RoundKeys]:
        places, partners = [*self._state.neighbours, self._invitation.place], self._terms.sizes.partners
        if len(neighbours.members) != len(places):
            raise ConsistencyError(f"neighbours: expected {len(places)} members, got {len(neighbours.members)}")
        by_draw, own = self._agreement.by_draw, self._state.member
        # Of those that it shares no mask with, and of itself, a device gets short members; hashed are these.
        full = [by_draw and place in self._state.neighbours[:partners] for place in places]
        short = [shorten(m) if whole else m for m, whole in zip(neighbours.members, full, strict=True)]
        leaves = {place: hash_member(member) for place, member in zip(places, short, strict=True)}
        check_members(self._invitation.root, self._invitation.size, leaves, neighbours.proof)
        # With other keys than its own, which an earlier attempt may have signed, nobody could open anything.
        if short[-1] != (shorten(own) if by_draw else own):
            raise ConsistencyError("cohort: this device is not at its place with the keys that it advertised")
        distinct, public = Distinct(), {}
        for place, member, whole in zip(places, neighbours.members, full, strict=True):
            device, round_keys = self._read(member, whole)
            if device.kind != self._own.kind:
                raise ConsistencyError(f"cohort: {device.device_id} is a {device.kind}, this participant another kind")
            distinct.add(device, round_keys)
            public[place], self._state.device_keys[place] = round_keys, device.device_key
        del self._state.device_keys[self._invitation.place]
        return public

    def _read(self, member: bytes, full: bool) -> tuple[VerifiedDevice, RoundKeys]:
        size = self._agreement.full_bytes if full else self._agreement.short_bytes
        population = self._own.population
        return read_member(member, self._terms.session, self._enrolment_key, population, self._revoked, size)

    def _offer(self, partners: list[int], public: dict[int, RoundKeys]) -> bytes:
        """What goes to each partner for the mask that it will share with this device."""
        mask, sent = self._agreement.private(self._state.mask_secret), []
        for place in partners:
            draw = self._draw_of(self._invitation.place, place)
            part, offered = self._agreement.offer(mask, public[place], draw)
            self._state.parts[place] = part
            sent.append(offered)
        return b"".join(sent)

    def _draw_of(self, drawer: int, drawn: int) -> Draw:
        return Draw(self._bound, drawer, drawn)

    def _check_question(self, question: Question) -> None:
        asked = [*question.present, *question.left]
        if len(set(asked)) != len(asked):
            raise ConsistencyError("question: a dealer is asked for twice; both of its shares would unmask it")
        foreign = sorted(set(asked) - set(self._state.held))
        if foreign:
            raise ConsistencyError(f"question: this device holds no shares of places {foreign[:3]}")

    def _remaining(self, partners: Partners) -> list[Link]:
        """Every mask that this device shares with somebody."""
        # Of those that hide this device, `sizes` counts on so many at this point.
        needed = self._terms.sizes.threshold if self._terms.assumed.server == "malicious" else 1
        return find_links(partners, self._state, self._invitation.place, needed, self._agreement.by_draw)

    def _draw(self, count: int) -> bytes:
        drawn = self._randomness(count)
        # Too short a draw would still make keys, which somebody could guess.
        if len(drawn) != count:
            raise SecureAggregationError(f"randomness: asked for {count} bytes, got {len(drawn)}")
        return drawn

    @property
    def _invitation(self) -> Invitation:
        if self._state.invitation is None:
            raise SecureAggregationError("this device has not been invited to a cohort")
        return self._state.invitation

    @property
    def _bound(self) -> bytes:
        return bind(self._terms.session, self._invitation.root)

    @property
    def _public(self) -> RoundKeys:
        return split_keys(self._state.keys)
