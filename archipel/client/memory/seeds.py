"""The randomness of a round: the order of the examples, and what graphs draw with their `seed`.

It follows from a secret of this device, so that neither server nor publisher can tell beforehand, or reckon afterwards,
which numbers a device drew. A round that is trained again draws the same ones: what is uploaded is the same.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_LABEL = b"archipel/agent/1/seed"


class RoundSeeds:
    """`secret`: the device's data key, 32 bytes (keystore.data_key); gone with it when the device is erased."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def derive(self, plan: str) -> int:
        """From 0 to 2**32 - 1, for the round with this plan digest (protocol.policy.plan_digest)."""
        derived = HKDF(algorithm=SHA256(), length=4, salt=plan.encode(), info=_LABEL).derive(self._secret)
        return int.from_bytes(derived, "big")
