"""Exact samples of the discrete Gaussian distribution.

Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), algorithms 1 to 3, in integer
arithmetic. There is no continuous Gaussian here, because floating-point samplers leak what they should hide (Mironov,
"On significance of the least significant bits for differential privacy", 2012).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from fractions import Fraction

import numpy as np

Randomness = Callable[[int], bytes]
"""Takes a number of bytes, returns that many uniformly random ones."""

_CHUNK = 1 << 12


class DiscreteGaussian:
    """Samples k with probability proportional to exp(-k**2 / (2 sigma**2)), for the exact value of `sigma`."""

    def __init__(self, sigma: float | Fraction, randomness: Randomness = secrets.token_bytes) -> None:
        exact = Fraction(sigma)
        if exact <= 0:
            raise ValueError(f"discrete Gaussian: sigma must be above 0, is {sigma}")
        self._bits = _Bits(randomness)
        # The scale of the Laplace proposals: floor(sigma) + 1, for which the paper bounds the rejections.
        self._t = int(exact) + 1
        # The acceptance exponent (|y| - sigma^2/t)^2 / (2 sigma^2), as ((|y| * a - b)^2) / c in integers.
        variance = exact * exact
        p, q, t = variance.numerator, variance.denominator, self._t
        self._a, self._b, self._c = q * t, p, 2 * p * q * t * t

    def sample(self, count: int) -> np.ndarray:
        """int64 `[count]`."""
        return np.fromiter((self._sample_one() for _ in range(count)), dtype=np.int64, count=count)

    def _sample_one(self) -> int:
        # Algorithm 3: a discrete Laplace proposal, accepted with exp(-(|y| - sigma^2/t)^2 / (2 sigma^2)).
        while True:
            y = self._sample_laplace()
            offset = abs(y) * self._a - self._b
            if self._bernoulli_exp(offset * offset, self._c):
                return y

    def _sample_laplace(self) -> int:
        # Algorithm 2: probability proportional to exp(-|y| / t).
        t, bits = self._t, self._bits
        while True:
            u = bits.below(t)
            if not self._bernoulli_exp(u, t):
                continue
            # y = u + t * v: u is the position within a block of t, v (geometric) the number of the block.
            v = 0
            while self._bernoulli_exp(1, 1):
                v += 1
            y = u + t * v
            # A sign bit; -0 is rejected, or 0 would come twice as often.
            if not bits.below(2):
                return y
            if y:
                return -y

    def _bernoulli_exp(self, numerator: int, denominator: int) -> bool:
        # Algorithm 1: true with probability exp(-numerator / denominator).
        # exp(-x) for x > 1 is exp(-1) times exp(-(x - 1)): one trial for each factor.
        while numerator > denominator:
            if not self._bernoulli_exp(1, 1):
                return False
            numerator -= denominator
        # For x in [0, 1]: the first k whose trial with probability x / k fails is odd with probability exp(-x), by the
        # power series of exp.
        k = 1
        while self._bits.below(denominator * k) < numerator:
            k += 1
        return k % 2 == 1


class _Bits:
    """Uniform integers from a source of random bytes, which is read in chunks."""

    def __init__(self, randomness: Randomness) -> None:
        self._randomness = randomness
        self._chunk = b""
        self._at = 0

    def below(self, bound: int) -> int:
        """Uniform on 0 ... bound - 1, by rejection."""
        # The fewest bits that hold bound - 1, so fewer than half of the values are rejected. `% bound` would favour
        # small numbers.
        bits = (bound - 1).bit_length()
        size = (bits + 7) // 8
        excess = size * 8 - bits
        while True:
            value = int.from_bytes(self._take(size), "little") >> excess
            if value < bound:
                return value

    def _take(self, size: int) -> bytes:
        if self._at + size > len(self._chunk):
            self._chunk = self._randomness(max(_CHUNK, size))
            self._at = 0
        self._at += size
        return self._chunk[self._at - size : self._at]
