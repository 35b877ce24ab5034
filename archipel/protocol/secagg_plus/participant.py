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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.errors import CertificateError, ConsistencyError, SecureAggregationError, ShareError, ThresholdError
from archipel.protocol.identity import VerifiedDevice, verify_chain
from archipel.protocol.messages import Chain
from archipel.protocol.revocations import NOBODY, Revoked
from archipel.protocol.sealed import public_bytes
from archipel.protocol.secagg import keys
from archipel.protocol.secagg.masks import apply_masks, reduce
from archipel.protocol.secagg_plus import shares
from archipel.protocol.secagg_plus.drawing import draw_neighbours
from archipel.protocol.secagg_plus.envelope import DEALT_BYTES, bind, commit_pair, divide, envelope_key, seal, unseal
from archipel.protocol.secagg_plus.inclusion import inclusion, presence, require_inclusions
from archipel.protocol.secagg_plus.member import Distinct, RoundKeys, read_member, seed_digest, sign_member, split_keys
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
    Packed,
    Partners,
    Question,
    Refused,
    pack,
    unpack,
)
from archipel.protocol.secagg_plus.sizes import check_sizes
from archipel.protocol.secagg_plus.state import LEFT, State, read_state, write_state
from archipel.protocol.secagg_plus.terms import Terms
from archipel.protocol.secagg_plus.tree import check_members, hash_member
from archipel.protocol.vector import Vector, check_vector

M = TypeVar("M", bound=Packed)
_STEPS = ("advertise", "draw", "deal", "receive", "mask", "confirm", "answer", "done")


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
        self._salt = terms.session.salt
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
            kept.member, session, device._enrolment_key, device._own.population
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
        with self._step("advertise"):
            state.cipher_secret, state.mask_secret = self._draw(keys.KEY_BYTES), self._draw(keys.KEY_BYTES)
            state.seed = self._draw(keys.KEY_BYTES)
            public = RoundKeys(
                keys.public_key(state.cipher_secret),
                keys.public_key(state.mask_secret),
                seed_digest(state.seed, self._terms.session),
            )
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

        return self._once("draw", pack(invitation), Drawn, act)

    def deal(self, neighbours: Neighbours) -> Dealt:
        """Step 2: verifies the neighbours; returns shares of the mask key and of the seed, sealed for each.

        Raises CertificateError, MessageError, SecureAggregationError or ConsistencyError.
        """

        def act() -> Dealt:
            public = self._check_neighbours(neighbours)
            self._state.mask_keys = {
                place: public[place].mask_key for place in self._state.neighbours[: self._terms.sizes.partners]
            }
            # Every check is done: only now are secrets split and leave the device.
            count = len(self._state.neighbours)
            pairs = zip(
                shares.split(self._state.mask_secret, self._terms.sizes.threshold, count, self._draw),
                shares.split(self._state.seed, self._terms.sizes.threshold, count, self._draw),
                strict=True,
            )
            own, private, dealt = self._invitation.place, keys.private_key(self._state.cipher_secret), []
            for position, (place, pair) in enumerate(zip(self._state.neighbours, pairs, strict=True), start=1):
                theirs = public[place].cipher_key
                key = envelope_key(private, theirs, self._salt, self._public.cipher_key, theirs)
                dealt += [
                    seal(key, self._bound, own, place, pair, self._draw),
                    commit_pair(self._bound, own, position, pair),
                ]
            return Dealt(places=self._state.neighbours, dealt=b"".join(dealt))

        return self._once("deal", pack(neighbours), Dealt, act)

    def receive(self, inbox: Inbox) -> Refused:
        """Step 3: opens the envelopes that others sealed for this device; returns whose it cannot accept.

        Nobody is blamed for one: the server, the dealer or this device may have garbled it. Who dealt it loses a holder
        of its shares. Raises ShareError for an inbox that no honest server makes.
        """

        def act() -> Refused:
            refused, own, private = [], self._invitation.place, keys.private_key(self._state.cipher_secret)
            cipher_keys = divide("inbox", inbox.cipher_keys, keys.KEY_BYTES, len(inbox.dealers))
            envelopes = divide("inbox", inbox.dealt, DEALT_BYTES, len(inbox.dealers))
            for dealer, position, theirs, dealt in zip(
                inbox.dealers, inbox.positions, cipher_keys, envelopes, strict=True
            ):
                # A second envelope would replace the first, and a share of the one be shown for the other.
                if dealer in self._state.held or dealer in refused:
                    raise ShareError(f"inbox: shares from place {dealer} twice")
                if dealer == own or dealer >= self._invitation.size:
                    raise ShareError(f"inbox: shares from place {dealer}, which is nobody else's in the cohort")
                try:
                    key = envelope_key(private, theirs, self._salt, theirs, self._public.cipher_key)
                    self._state.held[dealer] = unseal(key, self._bound, dealer, own, position, dealt)
                except (ShareError, SecureAggregationError):
                    refused.append(dealer)
            # What leaks from the device later opens no envelope.
            self._state.cipher_secret = b""
            return Refused(dealers=sorted(refused))

        return self._once("receive", pack(inbox), Refused, act)

    def mask(self, vector: Vector, partners: Partners) -> Vector:
        """Step 4: masks `vector` (uint32 [length], entries below 2^modulus_bits) and returns the result.

        The masks are the self mask and one for each partner: those that this device drew and that are not gone, and
        those that drew it. Raises ConsistencyError, ThresholdError (too many are gone to hide this device) or
        ProtocolError.
        """
        with self._step("mask"):
            check_vector("update", vector, self._terms.modulus_bits)
            masked = vector.copy()
            own_key, private = self._public.mask_key, keys.private_key(self._state.mask_secret)
            # Should this device seem to have left, its mask key is reconstructed. If its vector comes after all, this
            # mask alone still hides it.
            masks = [(keys.self_mask_key(self._state.seed, self._salt, own_key), 1)]
            for place, public in self._remaining(partners).items():
                key = keys.pairwise_mask_key(keys.agree(private, public), self._salt, own_key, public)
                # The one at the higher place adds the pair's mask, the other subtracts it.
                masks.append((key, 1 if self._invitation.place > place else -1))
            apply_masks(masked, masks)
            reduce(masked, self._terms.modulus_bits)
            # Without these no other vector can be masked, by whatever way the step is reached again.
            self._state.mask_secret = self._state.seed = b""
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

        return self._once("confirm", pack(question), Confirmed, act)

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

        return self._once("answer", pack(question) + pack(inclusions), Answer, act)

    def _check_neighbours(self, neighbours: Neighbours) -> dict[int, RoundKeys]:
        places = [*self._state.neighbours, self._invitation.place]
        if len(neighbours.members) != len(places):
            raise ConsistencyError(f"neighbours: expected {len(places)} members, got {len(neighbours.members)}")
        leaves = {place: hash_member(member) for place, member in zip(places, neighbours.members, strict=True)}
        check_members(self._invitation.root, self._invitation.size, leaves, neighbours.proof)
        # With other keys than its own, which an earlier attempt may have signed, nobody could open anything.
        if neighbours.members[-1] != self._state.member:
            raise ConsistencyError("cohort: this device is not at its place with the keys that it advertised")
        distinct, public = Distinct(), {}
        for place, member in zip(places, neighbours.members, strict=True):
            device, round_keys = self._read(member)
            if device.kind != self._own.kind:
                raise ConsistencyError(f"cohort: {device.device_id} is a {device.kind}, this participant another kind")
            distinct.add(device, round_keys)
            public[place], self._state.device_keys[place] = round_keys, device.device_key
        del self._state.device_keys[self._invitation.place]
        return public

    def _read(self, member: bytes) -> tuple[VerifiedDevice, RoundKeys]:
        return read_member(member, self._terms.session, self._enrolment_key, self._own.population, self._revoked)

    def _check_question(self, question: Question) -> None:
        asked = [*question.present, *question.left]
        if len(set(asked)) != len(asked):
            raise ConsistencyError("question: a dealer is asked for twice; both of its shares would unmask it")
        foreign = sorted(set(asked) - set(self._state.held))
        if foreign:
            raise ConsistencyError(f"question: this device holds no shares of places {foreign[:3]}")

    def _remaining(self, partners: Partners) -> dict[int, bytes]:
        """The mask keys of everybody that this device shares a mask with, by place."""
        gone = set(partners.gone)
        if not gone <= set(self._state.mask_keys):
            raise ConsistencyError("partners: the server says that somebody left whom this device did not draw")
        own = {place: key for place, key in self._state.mask_keys.items() if place not in gone}
        # Of those that hide this device, `sizes` counts on so many at this point.
        needed = self._terms.sizes.threshold if self._terms.assumed.server == "malicious" else 1
        drawn = len(self._state.mask_keys)
        if len(own) < min(needed, drawn):
            raise ThresholdError(
                f"partners: {len(own)} of {drawn} are still there, {needed} are needed to hide a vector"
            )
        mask_keys = divide("partners", partners.mask_keys, keys.KEY_BYTES, len(partners.others))
        others = dict(zip(partners.others, mask_keys, strict=True))
        if self._invitation.place in others or len(others) != len(partners.others):
            raise ConsistencyError("partners: this device itself, or somebody twice")
        # A pair that drew each other shares one mask, with the key that this device has verified.
        return {**others, **own}

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

    def _once(self, name: str, given: bytes, kind: type[M], act: Callable[[], M]) -> M:
        """What `act` returns; where the step was done with the same `given`, what it has returned then."""
        digest = hashlib.sha256(given).digest()
        if (self._state.done, self._state.given) == (name, digest):
            return unpack(self._state.said, kind)
        with self._step(name):
            message = act()
            self._state.given, self._state.said = digest, pack(message)
            return message

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        state = self._state
        if state.next != name:
            raise SecureAggregationError(f"step {name!r} in round {state.round_id}: expected {state.next!r}")
        # Before the step: an interrupted step cannot be repeated, such as `answer` to another question.
        state.next = LEFT
        try:
            yield
        except BaseException:
            state.forget()
            raise
        state.done, state.next = name, _STEPS[_STEPS.index(name) + 1]
        if name == "answer":
            state.forget()
