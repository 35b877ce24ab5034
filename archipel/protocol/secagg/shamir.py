"""Shamir's secret sharing (Shamir 1979): any `threshold` shares give the secret, fewer give nothing.

The field is the integers modulo 2^256 + 297, the smallest prime above 2^256, so that every 32-byte secret is one
element. The share of the participant at position x (1, 2, ...) is the polynomial's value there; x is not sent, because
both sides know it.

Python's integers do not compute in constant time. That is accepted: an attacker who can time this process so finely
runs on the same machine and could as well read its memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from archipel.errors import ShareError, ThresholdError

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, threshold: int, count: int, randomness: Callable[[int], bytes]) -> list[bytes]:
    """Shares of `secret` (32 bytes) for positions 1 to `count`, 33 bytes each (big-endian).

    `randomness(n)` gives n bytes of a cryptographic generator. Raises ShareError for a secret of another length,
    ThresholdError unless `threshold` is from 1 to `count`.
    """
    if len(secret) != SECRET_BYTES:
        raise ShareError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if not 1 <= threshold <= count:
        raise ThresholdError(f"threshold {threshold} must be from 1 to the number of shares, {count}")
    # 64 bytes for an element: taken modulo the prime they are within 2^-255 of uniform. The secret is the constant
    # term, so it is the value at 0, and the degree is below the threshold.
    coefficients = [int.from_bytes(randomness(64), "big") % PRIME for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))
    return [_polynomial(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, count + 1)]


def decode_share(share: bytes) -> int:
    """The field element of a share. Raises ShareError unless it has exactly 33 bytes and is below the prime."""
    if len(share) != SHARE_BYTES:
        raise ShareError(f"a share has {SHARE_BYTES} bytes, got {len(share)}")
    y = int.from_bytes(share, "big")
    if y >= PRIME:
        raise ShareError("a share must be below 2^256 + 297")
    return y


class Interpolation:
    """Reconstructs many secrets from shares at the same positions `xs`: the coefficients are computed once.

    Arguments:
        xs: the positions, distinct and positive, at least `threshold` of them.
        threshold: how many shares determine a secret.
        challenge: bytes that seed the check of surplus shares: random ones, or all the shares that will be given. An
            attacker who knows it before choosing shares could choose wrong ones that pass.

    Raises ShareError for wrong positions, ThresholdError for too few. `surplus` is how many exceed `threshold`.
    """

    def __init__(self, xs: Sequence[int], threshold: int, challenge: bytes) -> None:
        if len(set(xs)) != len(xs) or any(not 0 < x < PRIME for x in xs):
            raise ShareError(f"positions of shares must be distinct and positive, got {list(xs)}")
        if threshold < 1 or len(xs) < threshold:
            raise ThresholdError(f"{len(xs)} shares, the threshold is {threshold}")
        self._xs = list(xs)
        self._threshold = threshold
        self.surplus = len(xs) - threshold
        first = xs[:threshold]
        # Lagrange's basis polynomials at 0, over the first `threshold` positions: they suffice, as `secret` checks that
        # the other shares lie on the same polynomial.
        self._at_zero = [_product(-other for other in first if other != x) * _weight(x, first) for x in first]
        # The values of a polynomial of degree < threshold are exactly those orthogonal to weight(x) * r(x) for every r
        # of degree < surplus: the dual Reed-Solomon code. One r with unpredictable coefficients, the powers of
        # `factor`, tests them all: wrong values pass for fewer than `surplus` of all factors. Without surplus r is 0.
        self._dual = [_weight(x, xs) for x in xs]
        factor = int.from_bytes(hashlib.sha512(b"archipel/v1/shamir\0" + challenge).digest(), "big")
        self._test = [
            weight * _polynomial([pow(factor, k, PRIME) for k in range(self.surplus)], x) % PRIME
            for weight, x in zip(self._dual, xs)
        ]

    def secret(self, shares: Sequence[bytes]) -> bytes:
        """The 32-byte secret of `shares`, in the order of `xs`.

        Shares beyond the threshold must lie on the polynomial of the others. Raises ShareError when they do not, or
        when the result has more than 32 bytes. With exactly `threshold` shares, wrong ones mostly go unnoticed here.
        """
        if len(shares) != len(self._xs):
            raise ShareError(f"expected {len(self._xs)} shares, got {len(shares)}")
        ys = [decode_share(share) for share in shares]
        if sum(weight * y for weight, y in zip(self._test, ys)) % PRIME:
            raise ShareError(f"{len(ys)} shares do not lie on one polynomial of degree below {self._threshold}")
        secret = sum(weight * y for weight, y in zip(self._at_zero, ys)) % PRIME
        if secret >= 1 << (8 * SECRET_BYTES):
            raise ShareError("the shares do not give a 32-byte secret")
        return secret.to_bytes(SECRET_BYTES, "big")

    def outlier(self, shares: Sequence[bytes]) -> int | None:
        """The index of the one wrong share without which the others are consistent; None where there is no such one."""
        # Decoding one error of a Reed-Solomon code takes two syndromes: one for its value, one for its position.
        if self.surplus < 2:
            return None
        ys = [decode_share(share) for share in shares]
        syndromes = [
            sum(v * pow(x, k, PRIME) * y for v, x, y in zip(self._dual, self._xs, ys)) % PRIME
            for k in range(self.surplus)
        ]
        # One error at x has the syndromes c, c x, c x^2, ... with c not zero. The quotient of two gives x, and all the
        # others must fit to it: otherwise there are more errors.
        if not syndromes[0]:
            return None
        x = syndromes[1] * pow(syndromes[0], -1, PRIME) % PRIME
        if x not in self._xs or any((s * x - after) % PRIME for s, after in pairwise(syndromes)):
            return None
        return self._xs.index(x)


def reconstruct(shares: Sequence[tuple[int, bytes]], threshold: int) -> bytes:
    """The 32-byte secret from (position, share) pairs. Raises ThresholdError or ShareError, see Interpolation."""
    xs, ys = [x for x, _ in shares], [share for _, share in shares]
    return Interpolation(xs, threshold, b"".join(ys)).secret(ys)


def _polynomial(coefficients: Sequence[int], x: int) -> int:
    # Horner's rule, the highest power first.
    y = 0
    for coefficient in coefficients:
        y = (y * x + coefficient) % PRIME
    return y


def _weight(x: int, xs: Sequence[int]) -> int:
    # The barycentric weight of x, 1 / product(x - other).
    return pow(_product(x - other for other in xs if other != x), -1, PRIME)


def _product(factors: Iterable[int]) -> int:
    result = 1
    for factor in factors:
        result = result * factor % PRIME
    return result
