"""What of a graph must go together: every index of every axis is a slot, and operators tie slots to one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntFlag

import numpy as np
import onnx_ir as ir

from archipel.graph.shapes import constant_array

Key = tuple[ir.Value, int]
"""A value and one of its axes, counted from 0."""

Quiet = bool | Key | tuple[str, Sequence["Quiet"]]
"""When a value is zero along an axis: always or never, where another is, or ("all" | "any" | "unless", of these)."""

_FIXED = 0  # the slot that everything is tied to that must stay


class Role(IntFlag):
    """What an axis of a stored tensor is for a layer.

    WEIGHT: the layer's output channels. AFFINE: what is added to or multiplied with them, such as bias and scale.
    CONSUMER: the channels that a layer sums over. FOLLOWER: statistics and divisors, which come along.
    """

    WEIGHT = 1
    AFFINE = 2
    CONSUMER = 4
    FOLLOWER = 8


class Opaque(Exception):
    """Raised by a rule that cannot say how the channels go through its node; the text is the reason."""


class Links:
    """Collects slots and ties. An axis of size 1 has no slots, and one of unknown size only where a rule made some."""

    def __init__(self) -> None:
        self.node: ir.Node | None = None
        """The node whose rule is running."""
        self._count = 1
        self._slots: dict[Key, np.ndarray] = {}
        self._sizes: dict[Key, int] = {}
        self._ties: list[tuple[np.ndarray, np.ndarray]] = []
        self._fixed: list[tuple[np.ndarray, str]] = []
        self._roles: list[tuple[np.ndarray, Role]] = []
        self._stored: set[ir.Value] = set()
        self._stored_ties: list[tuple[np.ndarray, np.ndarray]] = []
        self._quiet: dict[Key, Quiet] = {}
        self._summed: list[tuple[list[Key], str]] = []
        self._later: list[Callable[[np.ndarray], None]] = []

    # Shapes.

    def shape(self, value: ir.Value | None) -> tuple[int | None, ...]:
        """Sizes, None for one that is not fixed. Raises Opaque where the rank is not known."""
        if value is None or value.shape is None:
            raise Opaque(f"the shape of {'an input' if value is None else value.name!r} is not known")
        return tuple(
            self._sizes.get((value, axis), size if isinstance(size, int) else None)
            for axis, size in enumerate(value.shape)
        )

    def rank(self, value: ir.Value | None) -> int:
        return len(self.shape(value))

    def axis(self, value: ir.Value, axis: int) -> int:
        return axis % max(self.rank(value), 1)

    def set_size(self, value: ir.Value, axis: int, size: int) -> None:
        """The size of an axis that the graph's own shapes leave open."""
        self._sizes[value, axis] = size

    def slots(self, value: ir.Value, axis: int) -> np.ndarray | None:
        """The slots along an axis; None where it has none."""
        found = self._slots.get((value, axis))
        if found is None:
            size = self.shape(value)[axis]
            if size is not None and size > 1:
                found = self.own(value, axis, size)
        return found

    def own(self, value: ir.Value, axis: int, size: int) -> np.ndarray:
        """New slots for an axis; for one of unknown size they are its innermost block of this size, repeated."""
        found = np.arange(self._count, self._count + size)
        self._count += size
        self._slots[value, axis] = found
        return found

    def lanes(self) -> Iterator[tuple[Key, np.ndarray]]:
        """Every axis that has slots, with them."""
        yield from self._slots.items()

    # Stored tensors: initializers, and what is computed from nothing else.

    def store(self, value: ir.Value) -> None:
        self._stored.add(value)

    def is_stored(self, value: ir.Value | None) -> bool:
        return value is not None and value in self._stored

    def mark(self, value: ir.Value | None, axis: int, role: Role) -> None:
        """Say what an axis of a stored tensor is; of others it says nothing."""
        if value is not None and self.is_stored(value):
            slots = self.slots(value, axis)
            if slots is not None:
                self._roles.append((slots, role))

    # Ties.

    def join(self, source: ir.Value, i: int, target: ir.Value, j: int, role: Role | None = Role.AFFINE) -> None:
        """Index k along axis `i` of `source` goes with k along axis `j` of `target`, which is zero where it is.

        `role` is what `source` is where it is stored and `target` is not. Sizes that differ fix both.
        """
        self.link(source, i, target, j, role)
        self.carry(target, j, (source, i))

    def link(self, source: ir.Value, i: int, target: ir.Value, j: int, role: Role | None = Role.AFFINE) -> None:
        """As `join`, with nothing said of zeros."""
        ours, theirs = self.slots(source, i), self.slots(target, j)
        if ours is None and theirs is None:
            return
        if ours is not None and theirs is None and self.shape(source)[i] is None and self.shape(target)[j] is None:
            theirs = self.own(target, j, len(ours))
        if ours is None or theirs is None or len(ours) != len(theirs):
            self.fix(source, i, "its size is not known where it meets another")
            self.fix(target, j, "its size is not known where it meets another")
            return
        self.tie(ours, theirs)
        if role is not None and not self.is_stored(target):
            self.mark(source, i, role)

    def tie(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        """The slots go in pairs."""
        self._ties.append((ours, theirs))
        if self.node is not None and all(self.is_stored(value) for value in self.node.outputs):
            self._stored_ties.append((ours, theirs))

    def fix(self, value: ir.Value, axis: int | None, why: str) -> None:
        """What lies along this axis, or any, stays."""
        if value.shape is None:
            return
        for place in range(len(value.shape)) if axis is None else [axis]:
            slots = self.slots(value, place)
            if slots is not None:
                self.fix_slots(slots, why)

    def fix_slots(self, slots: np.ndarray, why: str) -> None:
        name = "" if self.node is None else f"{self.node.op_type} {self.node.name!r}: "
        self._fixed.append((slots, name + why))

    # Zeros: a channel can only be left out exactly where it is zero once the weights that make it are.

    def carry(self, value: ir.Value, axis: int, when: Quiet) -> None:
        """Say when channels along this axis are zero; several such words must all be true."""
        before = self._quiet.get((value, axis), True)
        self._quiet[value, axis] = when if before is True else ("all", [before, when])

    def loud(self, value: ir.Value) -> None:
        """Channels of this value are never zero by themselves."""
        for axis in range(self.rank(value)):
            self._quiet[value, axis] = False

    def replace_carry(self, value: ir.Value, axis: int, when: Quiet) -> None:
        self._quiet[value, axis] = when

    def summed(self, keys: list[Key], why: str) -> None:
        """A sum runs over these axes; one of them must be zero where a channel is to go, or all stay."""
        self._summed.append((keys, why))

    # What is decided when everything else is known.

    def later(self, decide: Callable[[np.ndarray], None]) -> None:
        """Run this at the end, with the labels that all slots have by then."""
        self._later.append(decide)

    def settle(self) -> None:
        """Run what was left for later, and fix what is summed over without being zero."""
        labels, node = self.labels(), self.node
        for decide in self._later:
            decide(labels)
        self.node = node
        labels = self.labels()
        # Of what stays nobody asks whether it is zero: a picture in a Concat with channels that may go.
        known = {key: True for key, slots in self.lanes() if not labels[slots].any()}
        for keys, why in self._summed:
            if not any(self._is_quiet(key, known) for key in keys):
                for value, axis in keys:
                    slots = self.slots(value, axis)
                    if slots is not None:
                        self._fixed.append((slots, why))

    def _is_quiet(self, key: Key, known: dict[Key, bool]) -> bool:
        if key not in known:
            when = self._quiet.get(key, self.is_stored(key[0]))
            known[key] = self._holds(when, known)
        return known[key]

    def _holds(self, when: Quiet, known: dict[Key, bool]) -> bool:
        if isinstance(when, bool):
            return when
        if isinstance(when[0], str):
            mode, parts = when[0], when[1]
            found = [self._holds(part, known) for part in parts]
            if mode == "unless":
                return found[0] and not any(found[1:])
            return any(found) if mode == "any" else all(found)
        return self._is_quiet((when[0], int(when[1])), known)

    # Results.

    @property
    def count(self) -> int:
        return self._count

    def labels(self, fixed: bool = True) -> np.ndarray:
        """For every slot the smallest that it is tied to, 0 for what must stay; `fixed=False` leaves that out."""
        ours = [a for a, _ in self._ties]
        theirs = [b for _, b in self._ties]
        if fixed:
            for slots, _ in self._fixed:
                ours.append(slots)
                theirs.append(np.full(len(slots), _FIXED))
        if not ours:
            return np.arange(self._count)
        return _components(self._count, np.concatenate(ours), np.concatenate(theirs))

    def reasons(self) -> dict[int, str]:
        """For every label of `labels(fixed=False)` that must stay, the first reason for it."""
        labels = self.labels(fixed=False)
        found: dict[int, str] = {}
        for slots, why in self._fixed:
            for label in np.unique(labels[slots]):
                found.setdefault(int(label), why)
        return found

    def roles(self) -> np.ndarray:
        """The roles of every slot, as the sum of their numbers."""
        found = np.zeros(self._count, np.int64)
        for slots, role in self._roles:
            found[slots] |= int(role)
        # What a layer reads of a stored tensor through a Transpose or Slice is a role of the tensor itself.
        if self._stored_ties:
            ours, theirs = (np.concatenate(side) for side in zip(*self._stored_ties))
            same = _components(self._count, ours, theirs)
            shared = np.zeros_like(found)
            np.bitwise_or.at(shared, same, found)
            found = shared[same]
        return found


def constant_is_zero(value: ir.Value | None) -> bool:
    content = constant_array(value)
    return content is not None and not np.any(content)


def _components(count: int, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Connected components: for each of `count` nodes the smallest in its component."""
    label = np.arange(count)
    while True:
        low = np.minimum(label[ours], label[theirs])
        following = label.copy()
        np.minimum.at(following, label[ours], low)
        np.minimum.at(following, label[theirs], low)
        while not np.array_equal(following, shortened := following[following]):
            following = shortened
        if np.array_equal(following, label):
            return label
        label = following
