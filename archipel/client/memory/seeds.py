"""The randomness of a round: the order of the examples, and what graphs draw with their `seed`.

A seed is derived from a secret of this device, so neither server nor publisher can predict, or compute afterwards,
which numbers the device draws. A round that is trained again draws the same numbers, and so uploads the same update.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_LABEL = b"archipel/agent/1/seed"


class RoundSeeds:
    """Derives seeds from `secret`, the device's data key of 32 bytes (keystore.data_key)."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def derive(self, plan: str) -> int:
        """The seed, 0 to 2**32 - 1, of the round whose plan has this digest (protocol.policy.plan_digest)."""
        derived = HKDF(algorithm=SHA256(), length=4, salt=plan.encode(), info=_LABEL).derive(self._secret)
        return int.from_bytes(derived, "big")
