"""The device's side of secure aggregation: five steps, each once and in order.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", figure 4 with the steps
against an active server (signed keys, consistency check), complete neighbour graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    Chain,
    Cohort,
    Confirmation,
    Confirmations,
    EncryptedShare,
    RevealedShare,
    RoundPlan,
    Shares,
    Survivors,
    Unmasking,
)
from archipel.protocol.sealed import Sealed, public_bytes, seal
from archipel.protocol.secagg import keys, shamir
from archipel.protocol.secagg.checks import check_confirmation, survivors_digest
from archipel.protocol.secagg.cohort import Peer, cohort_digest, verify_cohort
from archipel.protocol.secagg.envelope import NONCE_BYTES, associated_data, open_shares, seal_shares
from archipel.protocol.secagg.masks import apply_mask, pairwise_sign, reduce
from archipel.protocol.vector import Vector, check_vector

_STEPS = ("advertise", "share", "mask", "confirm", "unmask", "done")


class Participant:
    """One device in one secure round.

    `plan` is verified and within policy already; `plan_digest` is `policy.plan_digest` of its Sealed. `randomness(n)`
    gives n bytes from a cryptographic generator (`secrets.token_bytes`). A step that fails ends the participation: its
    secrets are dropped, and every later call raises SecureAggregationError. A step out of order raises it, too, and
    changes nothing. Secrets live in memory only: after a restart the device leaves the round.
    """

    def __init__(
        self,
        plan: RoundPlan,
        plan_digest: str,
        identity: Ed25519PrivateKey,
        chain: Chain,
        enrolment_key: bytes,
        randomness: Callable[[int], bytes],
    ) -> None:
        """Raises CertificateError (chain or identity) or PolicyError (not a plan that can be secure)."""
        self._own = verify_chain(chain, enrolment_key)
        if public_bytes(identity) != self._own.device_key:
            raise CertificateError(f"device {self._own.device_id}: its chain is for another identity key")
        if plan.privacy != "secure" or plan.min_cohort < 2:
            raise PolicyError(
                f"plan {plan.round_id}: expected a secure round with min_cohort of at least 2, "
                f"got {plan.privacy!r} with {plan.min_cohort}"
            )
        self._plan = plan
        self._plan_digest = plan_digest
        self._identity = identity
        self._enrolment_key = enrolment_key
        self._randomness = randomness
        self._salt = keys.round_salt(plan.round_id, plan_digest)
        self._next = "advertise"
        # Secrets of this round: raw X25519 private keys, the self-mask seed, keys agreed with peers, shares held.
        self._cipher_secret = self._mask_secret = self._seed = b""
        self._envelope_keys: dict[str, bytes] = {}
        self._held: dict[str, tuple[bytes, bytes]] = {}
        # Public: U1 with its digest, U2, U3.
        self._peers: dict[str, Peer] = {}
        self._cohort = ""
        self._sharers: frozenset[str] = frozenset()
        self._survivors = Survivors(devices=[])

    def __repr__(self) -> str:
        return f"<Participant {self._own.device_id} in round {self._plan.round_id}, next: {self._next}>"

    @property
    def device_id(self) -> str:
        return self._own.device_id

    def advertise(self) -> Sealed:
        """Round 0: fresh X25519 key pairs; the public halves, signed."""
        with self._step("advertise"):
            self._cipher_secret = self._draw(keys.KEY_BYTES)
            self._mask_secret = self._draw(keys.KEY_BYTES)
            advertisement = Advertisement(
                round_id=self._plan.round_id,
                plan=self._plan_digest,
                cipher_key=keys.public_key(self._cipher_secret),
                mask_key=keys.public_key(self._mask_secret),
            )
            return seal("advertisement", advertisement, self._identity)

    def share(self, cohort: Cohort) -> Shares:
        """Round 1: verify U1; shares of the mask key and of the self-mask seed, sealed for each peer.

        Raises CertificateError, MessageError, ConsistencyError or ThresholdError.
        """
        with self._step("share"):
            self._peers = verify_cohort(cohort, self._own, self._enrolment_key, self._plan.round_id, self._plan_digest)
            self._check_cohort()
            self._cohort = cohort_digest(cohort)
            self._seed = self._draw(keys.KEY_BYTES)
            mask_key_shares = shamir.split(self._mask_secret, self._plan.threshold, len(self._peers), self._draw)
            seed_shares = shamir.split(self._seed, self._plan.threshold, len(self._peers), self._draw)
            own = self._peers[self.device_id]
            self._held[self.device_id] = (mask_key_shares[own.position - 1], seed_shares[own.position - 1])
            shares = []
            for peer in self._others(self._peers):
                shared = keys.agree(self._cipher_secret, peer.cipher_key)
                key = keys.envelope_key(shared, self._salt, own.cipher_key, peer.cipher_key)
                self._envelope_keys[peer.device_id] = key
                ciphertext = seal_shares(
                    key,
                    self._draw(NONCE_BYTES),
                    mask_key_shares[peer.position - 1],
                    seed_shares[peer.position - 1],
                    self._associated(self.device_id, peer.device_id),
                )
                shares.append(EncryptedShare(peer=peer.device_id, ciphertext=ciphertext))
            return Shares(shares=shares)

    def mask(self, vector: Vector, inbox: Shares) -> Vector:
        """Round 2: `vector` (uint32 [length], entries below 2^b) plus the self mask and the pairwise masks of U2.

        U2 is this device and the senders in `inbox`. Envelopes are opened here, before anything about the vector leaves
        the device. Raises ShareError, ThresholdError or ProtocolError.
        """
        with self._step("mask"):
            check_vector("update", vector, self._plan.modulus_bits)
            self._open(inbox)
            own = self._peers[self.device_id]
            masked = vector.copy()
            apply_mask(masked, keys.self_mask_key(self._seed, self._salt, own.mask_key), 1)
            for peer in self._others(self._sharers):
                shared = keys.agree(self._mask_secret, peer.mask_key)
                key = keys.pairwise_mask_key(shared, self._salt, own.mask_key, peer.mask_key)
                apply_mask(masked, key, pairwise_sign(self.device_id, peer.device_id))
            reduce(masked, self._plan.modulus_bits)
            self._cipher_secret = self._mask_secret = self._seed = b""
            return masked

    def confirm(self, survivors: Survivors) -> Sealed:
        """Round 3: sign U3, the sorted list of those whose masked vectors are in the sum.

        Raises ConsistencyError (unsorted, not within U2, this device not in it) or ThresholdError.
        """
        with self._step("confirm"):
            digest = survivors_digest(survivors)
            foreign = sorted(set(survivors.devices) - self._sharers)
            if foreign:
                raise ConsistencyError(f"survivors: {foreign[:3]} did not share keys with this device")
            if self.device_id not in survivors.devices:
                raise ConsistencyError("survivors: this device is not among them, though its vector was sent")
            self._require("survivors", len(survivors.devices))
            self._survivors = survivors
            confirmation = Confirmation(
                round_id=self._plan.round_id, plan=self._plan_digest, cohort=self._cohort, survivors=digest
            )
            return seal("confirmation", confirmation, self._identity)

    def unmask(self, confirmations: Confirmations) -> Unmasking:
        """Round 4: once `threshold` survivors signed the same U3, reveal one share for every member of U2.

        For a survivor it is that of the seed, for a dropped device that of the mask key; both together would bare a
        single vector. Raises CertificateError, ConsistencyError or ThresholdError.
        """
        with self._step("unmask"):
            self._check_confirmations(confirmations)
            survivors = self._survivors.devices
            dropped = sorted(self._sharers - set(survivors))
            return Unmasking(
                self_seeds=[RevealedShare(device=device, share=self._held[device][1]) for device in survivors],
                mask_keys=[RevealedShare(device=device, share=self._held[device][0]) for device in dropped],
            )

    def _check_cohort(self) -> None:
        plan, size = self._plan, len(self._peers)
        own = self._peers.get(self.device_id)
        mine = (keys.public_key(self._cipher_secret), keys.public_key(self._mask_secret))
        if own is None or (own.cipher_key, own.mask_key) != mine:
            raise ConsistencyError("cohort: this device is not in it with the keys that it advertised")
        if size > plan.max_cohort:
            raise ConsistencyError(f"cohort: {size} devices, the plan allows {plan.max_cohort}")
        self._require("cohort", size)
        if 2 * plan.threshold <= size:
            raise ThresholdError(
                f"cohort: threshold {plan.threshold} of {size} devices is not more than half; a server could split the "
                "cohort into two groups that each unmask something else"
            )

    def _open(self, inbox: Shares) -> None:
        for share in inbox.shares:
            sender = share.peer
            if sender == self.device_id or sender not in self._peers:
                raise ShareError(f"inbox: shares from {sender}, which is not a peer in this cohort", [sender])
            if sender in self._held:
                raise ShareError(f"inbox: shares from {sender} twice", [sender])
            self._held[sender] = open_shares(
                self._envelope_keys[sender], share.ciphertext, self._associated(sender, self.device_id), sender
            )
        self._envelope_keys.clear()
        self._sharers = frozenset(self._held)
        self._require("devices that shared keys", len(self._sharers))

    def _check_confirmations(self, confirmations: Confirmations) -> None:
        confirmed = set()
        for item in confirmations.confirmations:
            if item.device not in self._survivors.devices:
                raise ConsistencyError(f"confirmations: {item.device} is not one of the survivors")
            if item.device in confirmed:
                raise ConsistencyError(f"confirmations: {item.device} twice")
            key = self._peers[item.device].device_key
            check_confirmation(
                item.confirmation,
                key,
                self._plan.round_id,
                self._survivors,
                plan=self._plan_digest,
                cohort=self._cohort,
            )
            confirmed.add(item.device)
        if len(confirmed) < self._plan.threshold:
            raise ThresholdError(
                f"confirmations: {len(confirmed)}, the threshold is {self._plan.threshold}; nothing is revealed"
            )

    def _require(self, what: str, count: int) -> None:
        needed = max(self._plan.threshold, self._plan.min_cohort)
        if count < needed:
            raise ThresholdError(f"{what}: {count}, the plan needs {needed}; leaving the round")

    def _others(self, devices: Iterable[str]) -> list[Peer]:
        return [self._peers[device] for device in sorted(devices) if device != self.device_id]

    def _associated(self, sender: str, recipient: str) -> bytes:
        return associated_data(self._plan.round_id, self._cohort, sender, recipient)

    def _draw(self, count: int) -> bytes:
        drawn = self._randomness(count)
        if len(drawn) != count:
            raise SecureAggregationError(f"randomness: asked for {count} bytes, got {len(drawn)}")
        return drawn

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        if self._next != name:
            raise SecureAggregationError(f"step {name!r} in round {self._plan.round_id}: expected {self._next!r}")
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
        self._cipher_secret = self._mask_secret = self._seed = b""
        self._envelope_keys.clear()
        self._held.clear()
