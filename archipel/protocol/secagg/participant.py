"""The device's side of secure aggregation: six steps, each once and in order.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", figure 4 with the steps
against an active server (signed keys, consistency check), complete neighbour graph; and a step in which devices
complain about peers whose shares do not open, before anything that holds a vector is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.errors import (
    CertificateError,
    ConsistencyError,
    PolicyError,
    SecureAggregationError,
    ShareError,
    ThresholdError,
)
from archipel.protocol.identity import verify_chain
from archipel.protocol.messages import (
    Advertisement,
    AdvertiseRequest,
    Chain,
    Cohort,
    Complaint,
    Complaints,
    Confirmation,
    Confirmations,
    EncryptedShare,
    RevealedShare,
    RoundPlan,
    Shares,
    Survivors,
    Unmasking,
)
from archipel.protocol.policy import splits
from archipel.protocol.revocations import NOBODY, Revoked
from archipel.protocol.sealed import Sealed, public_bytes, seal
from archipel.protocol.secagg import keys, shamir
from archipel.protocol.secagg.checks import check_confirmation, survivors_digest
from archipel.protocol.secagg.cohort import cohort_digest, read_envelope_keys, verify_cohort
from archipel.protocol.secagg.complaints import check_complaints, complaints_digest
from archipel.protocol.secagg.envelope import NONCE_BYTES, check_signature, open_shares, seal_shares, sign_envelope
from archipel.protocol.secagg.key_tree import KeyTree
from archipel.protocol.secagg.masks import apply_mask, pairwise_sign, reduce
from archipel.protocol.secagg.session import Peer, Session
from archipel.protocol.vector import Vector, check_vector

_STEPS = ("advertise", "share", "complain", "mask", "confirm", "unmask", "done")


class Participant:
    """One device in one secure round.

    A step that fails ends the participation: the secrets are dropped, and every later call raises
    SecureAggregationError. A step out of order raises it, too, and changes nothing. Secrets live in memory only: after
    a restart the device leaves the round.

    Arguments:
        plan: the round's plan, which the caller has verified and checked against the policy.
        plan_digest: `policy.plan_digest` of the plan's Sealed, 64 hexadecimal digits.
        identity: the device's identity key.
        chain: the certificates from the enrolment key to `identity`.
        enrolment_key: the raw 32-byte public key at the start of every member's chain.
        randomness: `randomness(n)` gives n bytes from a cryptographic generator (`secrets.token_bytes`).
        revoked: cohorts with one of these members are refused.

    Raises CertificateError (chain or identity) or PolicyError (not a plan that can be secure).
    """

    def __init__(
        self,
        plan: RoundPlan,
        plan_digest: str,
        identity: Ed25519PrivateKey,
        chain: Chain,
        enrolment_key: bytes,
        randomness: Callable[[int], bytes],
        revoked: Revoked = NOBODY,
    ) -> None:
        self._own = verify_chain(chain, enrolment_key)
        if public_bytes(identity) != self._own.device_key:
            raise CertificateError(f"device {self._own.device_id}: its chain is for another identity key")
        # The colluders' vectors are known to the server, so at least two others are needed to hide each other.
        if plan.privacy != "secure" or plan.min_cohort - plan.colluders < 2:
            raise PolicyError(
                f"plan {plan.round_id}: expected a secure round with min_cohort of at least {2 + plan.colluders}, "
                f"got {plan.privacy!r} with {plan.min_cohort}"
            )
        self._plan = plan
        self._plan_digest = plan_digest
        self._identity = identity
        self._enrolment_key = enrolment_key
        self._randomness = randomness
        self._revoked = revoked
        self._salt = keys.round_salt(plan.round_id, plan_digest)
        self._next = "advertise"
        # Secrets of this round: two raw X25519 private keys, the secret from which the envelope keys are derived, the
        # self-mask seed; and per dealer this device's shares of (mask key, seed).
        self._cipher_secret = self._mask_secret = self._envelope_secret = self._seed = b""
        self._held: dict[str, tuple[bytes, bytes]] = {}
        # Public: this device's envelope keys, U1, U2, the devices that it accuses, the digest of the complaints, U3,
        # and the confirmation that it signs.
        self._tree = KeyTree(b"", 0)
        self._session = Session(plan.round_id, plan_digest, "", {}, plan.max_cohort)
        self._sharers: frozenset[str] = frozenset()
        self._accused: frozenset[str] = frozenset()
        self._complaints = ""
        self._survivors = Survivors(devices=[])
        self._confirmation: Confirmation | None = None

    def __repr__(self) -> str:
        return f"<Participant {self._own.device_id} in round {self._plan.round_id}, next: {self._next}>"

    @property
    def device_id(self) -> str:
        return self._own.device_id

    def advertise(self) -> AdvertiseRequest:
        """Step 0: makes the round's X25519 keys, an envelope key for each possible sender among them.

        Returns the public halves: cipher key, mask key and the envelope keys' Merkle root signed, the envelope keys
        beside them.
        """
        with self._step("advertise"):
            self._cipher_secret = self._draw(keys.KEY_BYTES)
            self._mask_secret = self._draw(keys.KEY_BYTES)
            self._envelope_secret = self._draw(keys.KEY_BYTES)
            # The cohort is not known yet, so every place that it may have gets a key: a complaint can then publish the
            # private key of one envelope, which opens no other.
            places = range(self._plan.max_cohort)
            public = b"".join(keys.public_key(self._envelope_private(place)) for place in places)
            self._tree = KeyTree(public, self._plan.max_cohort)
            advertisement = Advertisement(
                round_id=self._plan.round_id,
                plan=self._plan_digest,
                cipher_key=keys.public_key(self._cipher_secret),
                mask_key=keys.public_key(self._mask_secret),
                envelope_root=self._tree.root,
            )
            return AdvertiseRequest(
                advertisement=seal("advertisement", advertisement, self._identity), envelope_keys=public
            )

    def share(self, cohort: Cohort) -> Shares:
        """Step 1: verifies U1; returns shares of the mask key and of the self-mask seed, sealed for each peer, signed.

        Raises CertificateError, MessageError, ConsistencyError or ThresholdError.
        """
        with self._step("share"):
            plan = self._plan
            peers = verify_cohort(
                cohort, self._own, self._enrolment_key, plan.round_id, self._plan_digest, self._revoked
            )
            self._session = Session(plan.round_id, self._plan_digest, cohort_digest(cohort), peers, plan.max_cohort)
            self._check_cohort()
            envelope_keys = read_envelope_keys(cohort, self.device_id, self._session)
            # Every check of U1 is done: only now are secrets split and leave the device.
            self._seed = self._draw(keys.KEY_BYTES)
            mask_key_shares = shamir.split(self._mask_secret, plan.threshold, len(peers), self._draw)
            seed_shares = shamir.split(self._seed, plan.threshold, len(peers), self._draw)
            own = peers[self.device_id]
            # The device is its own peer here: `unmask` reveals its share of its own seed like that of any survivor.
            self._held[self.device_id] = (mask_key_shares[own.place], seed_shares[own.place])
            shares = []
            for peer in self._others(peers):
                public = envelope_keys[peer.device_id]
                shared = keys.agree(self._cipher_secret, public)
                associated = self._session.associated(self.device_id, peer.device_id)
                ciphertext = seal_shares(
                    keys.envelope_key(shared, self._salt, own.cipher_key, public),
                    self._draw(NONCE_BYTES),
                    mask_key_shares[peer.place],
                    seed_shares[peer.place],
                    associated,
                )
                signature = sign_envelope(self._identity, ciphertext, associated)
                shares.append(EncryptedShare(peer=peer.device_id, ciphertext=ciphertext, signature=signature))
            # Each secret is dropped after its last use: what leaks from the device later opens no envelope.
            self._cipher_secret = b""
            return Shares(shares=shares)

    def complain(self, inbox: Shares) -> Complaints:
        """Step 2: opens the envelopes in `inbox`, which the other members of U2 sealed for this device.

        Returns a complaint, with its proof, about each sender whose signed envelope holds no shares; mostly none. Where
        a signature does not verify, the device accuses nobody and leaves, because the server may have garbled the
        envelope. Raises CertificateError, ShareError or ThresholdError.
        """
        with self._step("complain"):
            self._check_senders([share.peer for share in inbox.shares])
            complaints = [complaint for share in inbox.shares if (complaint := self._receive(share)) is not None]
            self._accused = frozenset(complaint.accused for complaint in complaints)
            # The accused stay in U2 until `mask`, where all members exclude the same devices.
            self._sharers = frozenset(self._held) | self._accused
            # A complaint carries the one private key that proves it; the secret opens no envelope after this.
            self._envelope_secret = b""
            self._require("devices that shared keys", len(self._sharers))
            return Complaints(complaints=sorted(complaints, key=lambda complaint: complaint.accused))

    def mask(self, vector: Vector, complaints: Complaints) -> Vector:
        """Step 3: masks `vector` (uint32 [length], entries below 2^b, the plan's modulus) and returns the result.

        The masks are the self mask and one for each other member of U2. `complaints` are the round's; the device
        verifies each and takes the accused out of U2: it neither masks with them nor reveals shares of theirs.

        Raises ConsistencyError (a complaint of this device is missing, or it is accused itself), ShareError,
        CertificateError, ThresholdError or ProtocolError.
        """
        with self._step("mask"):
            check_vector("update", vector, self._plan.modulus_bits)
            # Before the masks: with a device that the others exclude, a pairwise mask would never cancel.
            self._exclude(complaints)
            own = self._session.peers[self.device_id]
            masked = vector.copy()
            # The paper's double masking: the peers reveal the mask key of a device that seems to have dropped out.
            # Should its vector arrive after all, this mask alone still hides it.
            apply_mask(masked, keys.self_mask_key(self._seed, self._salt, own.mask_key), 1)
            for peer in self._others(self._sharers):
                shared = keys.agree(self._mask_secret, peer.mask_key)
                key = keys.pairwise_mask_key(shared, self._salt, own.mask_key, peer.mask_key)
                apply_mask(masked, key, pairwise_sign(self.device_id, peer.device_id))
            reduce(masked, self._plan.modulus_bits)
            self._mask_secret = self._seed = b""
            return masked

    def confirm(self, survivors: Survivors) -> Sealed:
        """Step 4: signs U3, the sorted list of devices whose masked vectors are in the sum, and the complaints.

        Raises ConsistencyError (unsorted, not within U2, this device not in it) or ThresholdError.
        """
        with self._step("confirm"):
            digest = survivors_digest(survivors)
            foreign = sorted(set(survivors.devices) - self._sharers)
            if foreign:
                raise ConsistencyError(f"survivors: {foreign[:3]} did not share keys with this device")
            # As a dropped device it would have its mask key revealed, while the server holds its masked vector.
            if self.device_id not in survivors.devices:
                raise ConsistencyError("survivors: this device is not among them, though its vector was sent")
            self._require("survivors", len(survivors.devices))
            self._survivors = survivors
            self._confirmation = Confirmation(
                round_id=self._plan.round_id,
                plan=self._plan_digest,
                cohort=self._session.cohort,
                complaints=self._complaints,
                survivors=digest,
            )
            return seal("confirmation", self._confirmation, self._identity)

    def unmask(self, confirmations: Confirmations) -> Unmasking:
        """Step 5: reveals one share for every member of U2, once `threshold` survivors signed the same confirmation.

        For a survivor it is the share of the seed, for a dropped device the share of the mask key. Shares of both would
        let the server unmask that device's own vector. Raises CertificateError, ConsistencyError or ThresholdError.
        """
        with self._step("unmask"):
            # First: without this check a server could show two survivor sets and get both shares of one device.
            self._check_confirmations(confirmations)
            survivors = self._survivors.devices
            dropped = sorted(self._sharers - set(survivors))
            return Unmasking(
                self_seeds=[RevealedShare(device=device, share=self._held[device][1]) for device in survivors],
                mask_keys=[RevealedShare(device=device, share=self._held[device][0]) for device in dropped],
            )

    def _check_cohort(self) -> None:
        plan, size = self._plan, len(self._session.peers)
        own = self._session.peers.get(self.device_id)
        # Its own advertisement, which is signed, may still be one of an earlier attempt, whose private keys are gone.
        advertised = (keys.public_key(self._cipher_secret), keys.public_key(self._mask_secret), self._tree.root)
        if own is None or (own.cipher_key, own.mask_key, own.envelope_root) != advertised:
            raise ConsistencyError("cohort: this device is not in it with the keys that it advertised")
        if size > plan.max_cohort:
            raise ConsistencyError(f"cohort: {size} devices, the plan allows {plan.max_cohort}")
        self._require("cohort", size)
        if splits(plan.threshold, size, plan.colluders):
            raise ThresholdError(
                f"cohort: threshold {plan.threshold} is not more than half of {size} devices and {plan.colluders} "
                "colluders together; a server could split the cohort into two groups that each unmask something else"
            )

    def _check_senders(self, senders: Sequence[str]) -> None:
        seen = {self.device_id}
        for sender in senders:
            if sender not in self._session.peers or sender == self.device_id:
                raise ShareError(f"inbox: shares from {sender}, which is not a peer in this cohort", [sender])
            # A second envelope would replace the shares of the first.
            if sender in seen:
                raise ShareError(f"inbox: shares from {sender} twice", [sender])
            seen.add(sender)

    def _receive(self, share: EncryptedShare) -> Complaint | None:
        """Keeps the envelope's two shares; returns a complaint where it holds none."""
        sender = share.peer
        peer, associated = self._session.peers[sender], self._session.associated(sender, self.device_id)
        # The signature first: only an envelope that the sender signed proves anything against it.
        check_signature(peer.device_key, share.signature, share.ciphertext, associated, sender)
        private = self._envelope_private(peer.place)
        shared = keys.agree(private, peer.cipher_key)
        key = keys.envelope_key(shared, self._salt, peer.cipher_key, self._tree.key(peer.place))
        try:
            self._held[sender] = open_shares(key, share.ciphertext, associated, sender)
        except ShareError:
            return Complaint(
                complainer=self.device_id,
                accused=sender,
                ciphertext=share.ciphertext,
                signature=share.signature,
                key=private,
                path=self._tree.path(peer.place),
            )
        return None

    def _exclude(self, complaints: Complaints) -> None:
        accused = check_complaints(complaints, self._session)
        if self.device_id in accused:
            raise ConsistencyError("complaints: this device is accused; leaving the round")
        # The server may merge complaints, but must not suppress one: this device cannot reveal a share that it lacks.
        missing = sorted(self._accused - accused)
        if missing:
            raise ConsistencyError(f"complaints: nobody accuses {missing[:3]}, about which this device complained")
        for device in accused:
            self._held.pop(device, None)
        self._sharers -= accused
        self._complaints = complaints_digest(complaints)
        self._require("devices that shared keys and are not accused", len(self._sharers))

    def _check_confirmations(self, confirmations: Confirmations) -> None:
        own, confirmed = self._confirmation, set()
        if own is None:
            raise ConsistencyError("confirmations: this device has signed none")
        for item in confirmations.confirmations:
            if item.device not in self._survivors.devices:
                raise ConsistencyError(f"confirmations: {item.device} is not one of the survivors")
            # Otherwise a server could reach the threshold by repeating one signature.
            if item.device in confirmed:
                raise ConsistencyError(f"confirmations: {item.device} twice")
            check_confirmation(item.confirmation, self._session.peers[item.device].device_key, own)
            confirmed.add(item.device)
        if len(confirmed) < self._plan.threshold:
            raise ThresholdError(
                f"confirmations: {len(confirmed)}, the threshold is {self._plan.threshold}; nothing is revealed"
            )

    def _require(self, what: str, count: int) -> None:
        # The threshold lets the sum be unmasked; min_cohort is how many devices must be in it to hide each other.
        needed = max(self._plan.threshold, self._plan.min_cohort)
        if count < needed:
            raise ThresholdError(f"{what}: {count}, the plan needs {needed}; leaving the round")

    def _others(self, devices: Iterable[str]) -> list[Peer]:
        return [self._session.peers[device] for device in sorted(devices) if device != self.device_id]

    def _envelope_private(self, place: int) -> bytes:
        return keys.envelope_private_key(self._envelope_secret, self._salt, place)

    def _draw(self, count: int) -> bytes:
        drawn = self._randomness(count)
        # Too short a draw would still make keys, which somebody could guess.
        if len(drawn) != count:
            raise SecureAggregationError(f"randomness: asked for {count} bytes, got {len(drawn)}")
        return drawn

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        if self._next != name:
            raise SecureAggregationError(f"step {name!r} in round {self._plan.round_id}: expected {self._next!r}")
        # Before the step: an interrupted step cannot be repeated, such as `unmask` for other survivors.
        self._next = "nothing, the device left the round"
        try:
            yield
        except BaseException:
            self._forget()
            raise
        self._next = _STEPS[_STEPS.index(name) + 1]
        if name == "unmask":
            self._forget()

    def _forget(self) -> None:
        self._cipher_secret = self._mask_secret = self._envelope_secret = self._seed = b""
        self._held.clear()
