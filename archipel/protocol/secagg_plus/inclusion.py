"""What devices sign of a round: that they take a dealer as present, and that they were in it themselves.

Who has signed the first never shows a share of that dealer's mask key. The second proves to others that devices took
part in the round (protocol.provenance).
"""

from __future__ import annotations

from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from archipel.errors import ConsistencyError, ThresholdError
from archipel.protocol.secagg_plus.envelope import divide
from archipel.protocol.secagg_plus.messages import SIGNATURE_BYTES, Inclusions


def inclusion(bound: bytes, dealer: int, holder: int) -> bytes:
    """The bytes that the holder signs; `bound` names the session, the others are places in its cohort."""
    return b"archipel/v2/included\0" + bound + dealer.to_bytes(4, "big") + holder.to_bytes(4, "big")


def presence(bound: bytes) -> bytes:
    """The bytes that a device signs when it answers the last question of a round; `bound` as of `inclusion`."""
    return b"archipel/v2/present\0" + bound


def require_inclusions(
    inclusions: Inclusions, device_keys: Mapping[int, bytes], bound: bytes, dealer: int, threshold: int
) -> None:
    """Raises unless at least `threshold` of a dealer's neighbours signed that it is present.

    `device_keys` are the neighbours' raw 32-byte keys, by place. A wrong signature does not count: its neighbour may
    have sent it so. Raises ConsistencyError for others or one twice, ThresholdError for too few.
    """
    seen, confirmed = set(), 0
    signatures = divide("inclusions", inclusions.signatures, SIGNATURE_BYTES, len(inclusions.neighbours))
    for neighbour, signature in zip(inclusions.neighbours, signatures, strict=True):
        if neighbour not in device_keys or neighbour in seen:
            raise ConsistencyError(f"inclusions: place {neighbour} is no neighbour of this device, or twice")
        try:
            key = Ed25519PublicKey.from_public_bytes(device_keys[neighbour])
            key.verify(signature, inclusion(bound, dealer, neighbour))
            confirmed += 1
        except (InvalidSignature, ValueError):
            pass
        seen.add(neighbour)
    if confirmed < threshold:
        raise ThresholdError(
            f"inclusions: {confirmed} neighbours take this device as present, the threshold is {threshold}; "
            "nothing is shown"
        )
