"""Shamir's secret sharing (Shamir 1979) of many secrets at once, with NumPy.

The field is the integers modulo 2^31 - 1, whose products fit into 64 bits. A secret of 32 bytes is nine elements, 30
bits each, shared on polynomials of their own; the share of the holder at position x (1, 2, ...) is their values there.
Any `threshold` shares give the secret, fewer give nothing: the coefficients are uniform in the field.

A dealer commits to every share with a hash. So a holder that later shows another share is found at once, whoever else
answers; Feldman's commitments would also show that the shares lie on one polynomial, for an exponentiation a share. The
dealer's commitment to the secret itself shows that here, once the secret is reconstructed.

NumPy does not compute in constant time, see `secagg.shamir`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from archipel.errors import ShareError, ThresholdError

PRIME = np.uint64(2**31 - 1)
SECRET_BYTES = 32
ELEMENTS = 9
SHARE_BYTES = 4 * ELEMENTS
COMMITMENT_BYTES = 16
_BITS = 30
_SHIFT = np.uint64(31)
_DEALERS = 256

Elements = NDArray[np.uint64]


def split(secret: bytes, threshold: int, holders: int, randomness: Callable[[int], bytes]) -> list[bytes]:
    """Shares of `secret` (32 bytes) for positions 1 to `holders`, 36 bytes each.

    `randomness(n)` gives n bytes of a cryptographic generator. Raises ShareError for a secret of another length,
    ThresholdError unless `threshold` is from 1 to `holders`.
    """
    if len(secret) != SECRET_BYTES:
        raise ShareError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if not 1 <= threshold <= holders:
        raise ThresholdError(f"threshold {threshold} must be from 1 to the number of holders, {holders}")
    positions = np.arange(1, holders + 1, dtype=np.uint64)[:, None]
    values = np.zeros((holders, ELEMENTS), np.uint64)
    # Horner's rule, the highest power first; the secret is the constant term.
    for coefficients in _uniform(threshold - 1, randomness):
        values = _reduce((values + coefficients) * positions)
    values = (values + _to_elements(secret)) % PRIME
    return [row.tobytes() for row in values.astype("<u4")]


def commit(dealer: int, position: int, share: bytes, associated: bytes) -> bytes:
    """The dealer's commitment to a share, 16 bytes: nobody can show another share that fits it.

    `associated` names the session. A share has 279 uniform bits, so its hash needs no salt to hide it.
    """
    where = dealer.to_bytes(4, "big") + position.to_bytes(4, "big")
    return hashlib.sha256(b"archipel/v2/share\0" + associated + where + share).digest()[:COMMITMENT_BYTES]


def check_share(share: bytes) -> None:
    """Raises ShareError unless it has 36 bytes that are elements of the field."""
    if len(share) != SHARE_BYTES:
        raise ShareError(f"a share has {SHARE_BYTES} bytes, got {len(share)}")
    if (np.frombuffer(share, "<u4") >= PRIME).any():
        raise ShareError("a share must have elements below 2^31 - 1")


def reconstruct(positions: NDArray[np.integer], shares: NDArray[np.uint32]) -> list[bytes | None]:
    """The secrets of many dealers, each from exactly `threshold` shares.

    Arguments:
        positions: [dealers, threshold], distinct in each row, from 1.
        shares: [dealers, threshold, 9], elements of the field.

    Returns:
        For each dealer its 32 bytes; None where the shares give none, because they are not of one polynomial.
    """
    secrets: list[bytes | None] = []
    # A few hundred dealers at a time stay in the processor's cache.
    for start in range(0, len(positions), _DEALERS):
        at_zero = _at_zero(positions[start : start + _DEALERS].astype(np.uint64))
        values = _reduce(at_zero[:, :, None] * shares[start : start + _DEALERS].astype(np.uint64))
        # Fewer than 2^33 summands of 31 bits do not overflow.
        secrets += [_to_secret(row) for row in values.sum(axis=1) % PRIME]
    return secrets


def _at_zero(positions: Elements) -> Elements:
    """Lagrange's basis polynomials at 0, [dealers, threshold]: the product over all other x of x / (x - own)."""
    above, below = np.ones_like(positions[:, :1]), positions.copy()
    for index in range(positions.shape[1]):
        other = positions[:, index : index + 1]
        above = _reduce(above * other)
        # Above PRIME less a position nothing is negative.
        difference = other + PRIME - positions
        difference[:, index] = 1
        below = _reduce(below * difference)
    return _reduce(above * _inverse(below))


def _inverse(values: Elements) -> Elements:
    # Fermat's little theorem: the power PRIME - 2, whose bits are 29 ones, a zero and a one.
    result, power = values.copy(), values
    for bit in range(1, 31):
        power = _reduce(power * power)
        if (int(PRIME) - 2) >> bit & 1:
            result = _reduce(result * power)
    return result


def _reduce(values: Elements) -> Elements:
    """The same modulo 2^31 - 1, but below 2^31 + 2; of any 64 bits. `%` gives the smallest, and takes longer."""
    values = (values & PRIME) + (values >> _SHIFT)
    return (values & PRIME) + (values >> _SHIFT)


def _uniform(count: int, randomness: Callable[[int], bytes]) -> Elements:
    """[count, 9] uniform elements of the field."""
    wanted, found = count * ELEMENTS, np.zeros(0, np.uint64)
    while found.size < wanted:
        drawn = np.frombuffer(randomness(4 * (wanted - found.size)), "<u4").astype(np.uint64) & PRIME
        # Drawing again, and not taking a remainder, keeps them uniform.
        found = np.concatenate([found, drawn[drawn < PRIME]])
    return found.reshape(count, ELEMENTS)


def _to_elements(secret: bytes) -> Elements:
    number = int.from_bytes(secret, "little")
    return np.array([number >> (_BITS * i) & ((1 << _BITS) - 1) for i in range(ELEMENTS)], np.uint64)


def _to_secret(elements: Elements) -> bytes | None:
    if (elements >> np.uint64(_BITS)).any():
        return None
    number = sum(int(element) << (_BITS * i) for i, element in enumerate(elements))
    return number.to_bytes(SECRET_BYTES, "little") if number < 1 << (8 * SECRET_BYTES) else None
