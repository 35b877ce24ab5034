"""Sums of a round that keep updates apart: each by itself, or one sum for each secure group."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from archipel.protocol.plain import PlainSum, decode_plain, encode_plain
from archipel.protocol.vector import DecodedSum, Layout
from archipel.simulation.sums import Arrays, SecureSum, Sum


class KeptUpdates(Sum):
    """Single updates by client. `plain`: each is checked and rounded as the update of a plain round."""

    def __init__(self, layout: Layout, *, plain: bool) -> None:
        self._layout, self._plain = layout, plain
        self.updates: dict[int, Arrays] = {}

    def add(self, arrays: Arrays, client: int = -1) -> None:
        if self._plain:
            self.updates[client] = decode_plain(encode_plain(self._layout, arrays), self._layout)
        else:
            # Copied: lanes give views of the arrays of all lanes.
            self.updates[client] = {name: np.array(array) for name, array in self._layout.check(arrays).items()}

    def merge(self, other: Sum) -> None:
        if not isinstance(other, KeptUpdates):
            raise TypeError(f"kept updates and a {type(other).__name__}")
        self.updates |= other.updates

    def decoded(self, devices: int) -> DecodedSum:
        total = PlainSum(self._layout)
        for client in sorted(self.updates):
            total.add(self.updates[client])
        decoded = total.decoded()
        self._layout.check_sum(decoded, devices)
        return decoded


class GroupSums(Sum):
    """The sums of secure groups: of each the whole numbers that a secure round of it alone adds up.

    Arguments:
        layout: of the updates.
        modulus_bits: that hold the sum of a group.
        largest: the most devices of a group.
        groups: client -> its group.
    """

    def __init__(self, layout: Layout, modulus_bits: int, largest: int, groups: Mapping[int, int]) -> None:
        self._layout, self._bits, self._largest, self._groups = layout, modulus_bits, largest, groups
        self.sums: dict[int, SecureSum] = {}
        self.counts: dict[int, int] = {}

    def add(self, arrays: Arrays, client: int = -1) -> None:
        group = self._groups[client]
        self._of(group).add(arrays)
        self.counts[group] = self.counts.get(group, 0) + 1

    def put(self, group: int, total: SecureSum, devices: int) -> None:
        """Take the sum of so many devices for that of a group, which has none yet."""
        self.sums[group], self.counts[group] = total, devices

    def merge(self, other: Sum) -> None:
        if not isinstance(other, GroupSums):
            raise TypeError(f"group sums and a {type(other).__name__}")
        for group, total in other.sums.items():
            self._of(group).merge(total)
            self.counts[group] = self.counts.get(group, 0) + other.counts[group]

    def decoded(self, devices: int) -> DecodedSum:
        whole = [self.decode_group(group) for group in sorted(self.sums)]
        sums = {port: np.sum([each.read(port) for each in whole], axis=0) for port in self._layout.updates}
        return DecodedSum.of({port: np.asarray(array) for port, array in sums.items()})

    def decode_group(self, group: int) -> DecodedSum:
        """The sum of one group, checked as a server checks it. Raises ProtocolError, BoundError."""
        return self.sums[group].decoded(self.counts[group])

    def _of(self, group: int) -> SecureSum:
        if group not in self.sums:
            self.sums[group] = SecureSum(self._layout, self._bits, self._largest)
        return self.sums[group]


def divide(clients: NDArray[np.int64], count: int, order: NDArray[np.int64]) -> dict[int, int]:
    """client -> group, 0 to count - 1: the clients in this order, in groups whose sizes differ by one at most."""
    ordered = clients[order]
    return {int(client): place * count // len(ordered) for place, client in enumerate(ordered)}
