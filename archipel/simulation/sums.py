"""The sum of a round's updates: whole numbers as in secure rounds, or floating point as in plain ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from archipel.privacy.central import Noise, release_sum
from archipel.protocol.bounds import groups, largest, step, weight_port
from archipel.protocol.noised.layout import NoisedLayout
from archipel.protocol.plain import PlainSum, decode_plain, encode_plain
from archipel.protocol.vector import DecodedSum, Layout, Vector

_TAIL = 12.0

Arrays = Mapping[str, NDArray[Any]]


class LaneArrays(Protocol):
    """What adds up arrays of many devices where they are, in memory or on a GPU."""

    def fetch(self, held: Any) -> NDArray[Any]:
        """What is held as an array, which nothing changes."""

    def sum_steps(
        self, held: Any, lanes: NDArray[np.int64], limit: NDArray[np.float64] | None, step: float, largest: int
    ) -> NDArray[np.int64]:
        """The sum of these lanes of `[lanes, ...]` in whole steps, flat: each element is cut off at +-`limit` of its
        lane (`[len(lanes)]`; None: at none), divided by `step` in float64, rounded to even and cut off at +-`largest`.
        """


class Sum(ABC):
    """A running sum."""

    @abstractmethod
    def add(self, arrays: Arrays, client: int = -1) -> None:
        """Add one device's update, by output name. Raises ProtocolError for one that its device could not upload.

        `client` is its number, which matters where a sum keeps updates apart.
        """

    @abstractmethod
    def merge(self, other: Sum) -> None:
        """Add another sum of the same kind."""

    @abstractmethod
    def decoded(self, devices: int) -> DecodedSum:
        """The sum of so many devices, checked. Raises ProtocolError, BoundError."""

    def add_lanes(
        self, arrays: Mapping[str, Any], lanes: NDArray[np.int64], clients: Sequence[int], held_by: LaneArrays
    ) -> None:
        """Add the updates of several devices as `add` would one after the other.

        Arguments:
            arrays: `[devices, ...]` by output name, arrays or what `held_by` holds.
            lanes: which of the devices count.
            clients: their numbers.
        """
        fetched = {name: held_by.fetch(array) for name, array in arrays.items()}
        for lane, client in zip(lanes, clients):
            self.add({name: array[lane] for name, array in fetched.items()}, client)


class SecureSum(Sum):
    """The sum of encoded updates modulo 2^bits, without masks, which cancel. Exact, so in any order.

    Changes count (1 + staleness)^-exponent.
    """

    def __init__(
        self, layout: Layout, modulus_bits: int, cohort: int, staleness: int = 0, exponent: float = 0.0
    ) -> None:
        self._stale = (staleness, exponent)
        self._layout, self._bits, self._cohort = layout, modulus_bits, cohort
        # Values without a clip are at most the range times the device's weight, as protocol.bounds.clamp says.
        self._limited = {
            group.ports[0].name for group in groups(layout.updates) if group.weighted and group.norm is None
        }
        self.total: Vector = np.zeros(layout.length, np.uint32)

    def add(self, arrays: Arrays, client: int = -1) -> None:
        self.total += self._layout.encode(self._discounted(arrays), modulus_bits=self._bits, max_cohort=self._cohort)

    def add_lanes(
        self, arrays: Mapping[str, Any], lanes: NDArray[np.int64], clients: Sequence[int], held_by: LaneArrays
    ) -> None:
        if isinstance(self._layout, NoisedLayout):
            # Each device draws noise of its own.
            return super().add_lanes(arrays, lanes, clients, held_by)
        start, arrays = 0, self._discounted(arrays)
        weight = weight_port(self._layout.updates)
        weights = None
        if weight is not None:
            weights = np.asarray(held_by.fetch(arrays[weight.name]), np.float64).reshape(-1)[lanes]
        for port in self._layout.updates:
            limit = None
            if port.name in self._limited and weights is not None:
                limit = np.minimum(port.range, port.range * weights + port.noise * _TAIL)
            whole = held_by.sum_steps(arrays[port.name], lanes, limit, step(port), largest(port))
            self.total[start : start + len(whole)] += whole.astype(np.uint32)
            start += len(whole)

    def _discounted(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        # Before encoding, as devices do it.
        return self._layout.discount(arrays, *self._stale) if self._stale[0] else arrays

    def merge(self, other: Sum) -> None:
        if not isinstance(other, SecureSum):
            raise TypeError(f"a secure sum and a {type(other).__name__}")
        self.total += other.total

    def decoded(self, devices: int) -> DecodedSum:
        total = self.total & np.uint32(2**self._bits - 1)
        decoded = self._layout.decode_sum(total, cohort=devices, modulus_bits=self._bits)
        self._layout.check_sum(decoded, devices)
        return decoded

    def released(self, devices: int, noise: Noise) -> DecodedSum:
        """The changes of so many devices with the server's noise, checked as `decoded` checks them."""
        total = self.total & np.uint32(2**self._bits - 1)
        return release_sum(total, self._layout, cohort=devices, modulus_bits=self._bits, noise=noise)


class FloatSum(Sum):
    """The sum of updates of plain rounds, in float64, in the order in which they are added.

    Changes count (1 + staleness)^-exponent.
    """

    def __init__(self, layout: Layout, staleness: int = 0, exponent: float = 0.0) -> None:
        self._layout, self._scale = layout, (1.0 + staleness) ** -exponent
        self._sum = PlainSum(layout)

    def add(self, arrays: Arrays, client: int = -1) -> None:
        self._sum.add(decode_plain(encode_plain(self._layout, arrays), self._layout), self._scale)

    def merge(self, other: Sum) -> None:
        if not isinstance(other, FloatSum):
            raise TypeError(f"a sum of floating point and a {type(other).__name__}")
        for name, array in other._sum.arrays.items():
            self._sum.arrays[name] += array

    def decoded(self, devices: int) -> DecodedSum:
        decoded = self._sum.decoded()
        self._layout.check_sum(decoded, devices)
        return decoded
