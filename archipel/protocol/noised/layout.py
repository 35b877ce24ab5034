"""The vector of a device that adds noise itself: from its changes to whole numbers, and from their sum to changes.

The steps are those of Kairouz, Liu and Steinke 2021, in this order, on the device and outside of any graph: clip the
changes to their L2 norm; rotate them (protocol.noised.rotation, by the round's number), so that none is far larger than
the others; scale them to `steps` steps of the clip; round them up or down by chance, again and again until the squares
of the whole numbers add up to D^2 at most (protocol.noised.shares); add noise; take it modulo 2^b. Nothing is clamped
after the noise. That one device changes the sum by D at most is therefore checked in whole numbers, whatever floating
point made of the steps before.

The server knows sums with noise alone. It refuses one with an entry, or a norm, beyond what the cohort's changes and
noise can reach: then a mask is left in it, a device sent something else, or it went round the modulus. One device can
still send anything within those bounds, which noise makes wide. So the changes are shortened to the longest sum of
honest ones, and all further checks hold as without noise.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle.roles import Rotation, Update
from archipel.errors import ProtocolError
from archipel.protocol.bounds import Group, entries, joint_norm, sum_bound
from archipel.protocol.messages import NoiseShare
from archipel.protocol.noised.group import noised_group
from archipel.protocol.noised.rotation import choose_block, rotate, unrotate
from archipel.protocol.noised.shares import squared_norm
from archipel.protocol.vector import DecodedSum, Layout, Vector, check_vector

_TAIL = 12.0
"""In standard deviations: noise, and the elements of a rotated vector, exceed this in one of 10^30 cases."""
_BELOW = 1 - 1e-9
"""A shortened sum stays below its bound in floating point, too."""
_TRIES = 256
"""One try of rounding is short enough with a probability of 0.39 or more."""
_CHUNK = 1 << 16
"""Entries at a time, so that a device needs little memory beside the vector."""

Whole = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class NoisedLayout(Layout):
    """The layout of a training's round whose devices add `noise`. Its `updates` are the changes alone.

    `seed` is that of the rotation. `randomness` gives as many bytes from a cryptographic generator as it is asked for.
    """

    noise: NoiseShare
    seed: int = 0
    randomness: Callable[[int], bytes] = field(default=secrets.token_bytes, compare=False)

    @classmethod
    def over(cls, layout: Layout, noise: NoiseShare, seed: int) -> NoisedLayout:
        """Of the uploads that `layout` describes, with the round's clip. Raises PolicyError where noise cannot cover
        what devices send."""
        return cls(noised_group(layout, "", "distributed").ports, noise=noise, seed=seed)

    @property
    def length(self) -> int:
        """Number of entries of the vector: those of the changes, padded to whole blocks of the rotation."""
        return padded_length(sum(entries(port) for port in self.updates))

    def encode(self, arrays: Mapping[str, NDArray[Any]], *, modulus_bits: int, max_cohort: int) -> Vector:
        """The vector to mask, with noise that differs from call to call. Raises as `Layout.encode`."""
        self._check_modulus(modulus_bits, max_cohort)
        return (self._noisy(self.check(arrays)) & ((1 << modulus_bits) - 1)).astype(np.uint32)

    def to_send(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The changes with noise that differs from call to call, shortened to their clip: for plain rounds."""
        noisy = self._noisy(self.check(arrays)).astype(np.float64)
        return {port.name: array for port, array in self._changes(noisy, self._group.bound).items()}

    def check(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The changes among `arrays`, checked as `Layout.check` does. The others, such as metrics, stay here."""
        names = {port.name for port in self.updates}
        return super().check({name: array for name, array in arrays.items() if name in names})

    def decode_sum(self, total: Vector, *, cohort: int, modulus_bits: int) -> DecodedSum:
        """The noisy sum of the changes, from `total`, the sum of the unmasked vectors modulo 2^b.

        Raises ProtocolError for a sum that no `cohort` devices can have sent.
        """
        rows = self.signed_sum(total, cohort=cohort, modulus_bits=modulus_bits).astype(np.float64)
        most = sum_bound(self.updates, self._group, cohort, float(cohort))
        changes = self._changes(rows, most)
        return DecodedSum({port.tensor: array for port, array in changes.items()}, {}, None)

    def signed_sum(self, total: Vector, *, cohort: int, modulus_bits: int) -> Whole:
        """The noisy sum in whole steps, rotated, `[length]`. Raises ProtocolError as `decode_sum` does."""
        self._check_modulus(modulus_bits, cohort)
        check_vector("sum", total, modulus_bits, self.length)
        signed = total.astype(np.int64)
        signed[signed >= 1 << (modulus_bits - 1)] -= 1 << modulus_bits
        limit = self._largest(cohort)
        if max(int(signed.max()), -int(signed.min())) > limit:
            raise ProtocolError(
                f"sum: an entry is beyond ±{limit}, the most that {cohort} devices can sum to with their noise; a mask "
                "is left in it, or a device sent something else than its update"
            )
        own = math.sqrt(squared_norm(self._steps, self.length))
        noise = self.noise.deviation * math.sqrt(cohort) * (math.sqrt(self.length) + _TAIL)
        norm = joint_norm([signed])
        if norm > cohort * own + noise:
            raise ProtocolError(
                f"sum: its norm is {norm:.6g} steps, and can be {cohort * own + noise:.6g} at most of {cohort} devices "
                "with their noise; at least one of them sent something else"
            )
        return signed

    def fits(self, modulus_bits: int, cohort: int) -> bool:
        """Whether sums of `cohort` devices with their noise go round 2^modulus_bits in less than one case of 10^20."""
        return self._largest(cohort) < 1 << (modulus_bits - 1)

    def widths(self, max_cohort: int) -> list[tuple[int, int]]:
        """As of `Layout`: of the whole vector at once."""
        return [(self.length, self._largest(max_cohort).bit_length() + 1)]

    @property
    def _group(self) -> Group:
        return noised_group(self, "", "distributed")

    @property
    def _block(self) -> int:
        return choose_block(sum(entries(port) for port in self.updates))

    @property
    def _steps(self) -> int:
        return self.noise.steps

    def _largest(self, cohort: int) -> int:
        """The most that an entry of a sum can be, but for chances of 10^-30."""
        # All devices may have the same changes, and all of them in one block. Rotated they are spread over it
        # (Hoeffding); rounding adds less than a step of each device.
        share = min(1.0, _TAIL / math.sqrt(self._block))
        noise = _TAIL * self.noise.deviation * math.sqrt(cohort)
        return math.ceil(cohort * self._steps * share) + cohort + math.ceil(noise)

    def _noisy(self, arrays: Mapping[str, NDArray[Any]]) -> Whole:
        """The changes in whole steps, rotated, with noise, `[length]`."""
        from archipel.lite_runtime.many_samples import sample_gaussian

        noisy = self._round(self._rotated(arrays))
        for start in range(0, noisy.size, _CHUNK):
            part = noisy[start : start + _CHUNK]
            part += sample_gaussian(self.noise.deviation, part.size, self.randomness)
        return noisy

    def _changes(self, rows: NDArray[np.float64], most: float) -> dict[Update, NDArray[np.float64]]:
        """What rotated steps are changes of; shortened, where their norm is above `most`."""
        group = self._group
        size = sum(entries(port) for port in group.ports)
        flat = unrotate(rows, Rotation(parameters=(), block=self._block), size, self.seed)
        flat *= group.bound / self._steps
        norm = joint_norm([flat])
        if norm > most * _BELOW:
            flat *= most * _BELOW / norm
        parts = np.split(flat, np.cumsum([entries(port) for port in group.ports])[:-1])
        return {port: part.reshape([int(dim) for dim in port.shape]) for port, part in zip(group.ports, parts)}

    def _rotated(self, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """The changes, clipped and rotated, in steps, `[length]`."""
        group = self._group
        flat = np.concatenate([arrays[port.name].reshape(-1) for port in group.ports]).astype(np.float64)
        norm = joint_norm([flat])
        if norm > group.bound:
            flat *= group.bound / norm
        return rotate(flat, self._block, self.seed).reshape(-1) * (self._steps / group.bound)

    def _round(self, rotated: NDArray[np.float64]) -> Whole:
        """Whole numbers next to `rotated`, whose mean is `rotated`, but for those that are too long together."""
        most = squared_norm(self._steps, self.length)
        rounded: Whole = np.empty(rotated.size, np.int64)
        for _ in range(_TRIES):
            for start in range(0, rotated.size, _CHUNK):
                part = rotated[start : start + _CHUNK]
                below = np.floor(part)
                drawn = np.frombuffer(self.randomness(8 * part.size), "<u8") >> np.uint64(11)
                rounded[start : start + _CHUNK] = below + (drawn * 2.0**-53 < part - below)
            if int((rounded * rounded).sum()) <= most:
                return rounded
        raise ProtocolError(f"update: rounding made it too long {_TRIES} times, which comes once in 10^50 cases")


def padded_length(size: int) -> int:
    """The number of entries of a vector with `size` changes."""
    block = choose_block(size)
    return -(-size // block) * block
