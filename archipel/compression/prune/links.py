"""Which indices of a graph must go together: every index of every axis is a slot, and operators tie slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntFlag

import numpy as np
import onnx_ir as ir

from archipel.graph.shapes import constant_array

Key = tuple[ir.Value, int]
"""A value and one of its axes, counted from 0."""

ZeroWhen = bool | Key | tuple[str, Sequence["ZeroWhen"]]
"""When a value is zero along an axis: always or never (bool), where another is (Key), or a combination of these.

("all", [a, b]): where both are; ("any", [a, b]): where one is; ("unless", [a, b]): where a is and b is not.
"""

_FIXED = 0  # the slot that all slots are tied to that must stay


class Role(IntFlag):
    """What an axis of a stored tensor is for a layer; see `dependency.Member`."""

    WEIGHT = 1
    AFFINE = 2
    CONSUMER = 4
    FOLLOWER = 8


class Opaque(Exception):
    """Raised by a rule that cannot tell how channels go through its node; the text is the reason."""


class Links:
    """Collects slots and ties.

    An axis of size 1 has no slots, and an axis of unknown size only those that a rule made (`make_slots`). Slot 0
    stands for "must stay"; every other slot is one index of one axis.
    """

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
        self._zero_when: dict[Key, ZeroWhen] = {}
        self._required: list[tuple[list[Key], str]] = []
        self._deferred: list[Callable[[np.ndarray], None]] = []

    # Shapes.

    def shape(self, value: ir.Value | None) -> tuple[int | None, ...]:
        """Sizes, None for an open one. Raises Opaque where the rank is not known."""
        if value is None or value.shape is None:
            raise Opaque(f"the shape of {'a missing input' if value is None else value.name!r} is not known")
        return tuple(
            self._sizes.get((value, axis), size if isinstance(size, int) else None)
            for axis, size in enumerate(value.shape)
        )

    def rank(self, value: ir.Value | None) -> int:
        return len(self.shape(value))

    def axis(self, value: ir.Value, axis: int) -> int:
        return axis % max(self.rank(value), 1)

    def set_size(self, value: ir.Value, axis: int, size: int) -> None:
        """Set the size of an axis that the graph's own shapes leave open."""
        self._sizes[value, axis] = size

    def slots(self, value: ir.Value, axis: int) -> np.ndarray | None:
        """The slots along an axis; None where it has none."""
        slots = self._slots.get((value, axis))
        if slots is None:
            size = self.shape(value)[axis]
            if size is not None and size > 1:
                slots = self.make_slots(value, axis, size)
        return slots

    def make_slots(self, value: ir.Value, axis: int, size: int) -> np.ndarray:
        """New slots for an axis. An axis of unknown size repeats them: they are its innermost block, of this size."""
        slots = np.arange(self._count, self._count + size)
        self._count += size
        self._slots[value, axis] = slots
        return slots

    def lanes(self) -> Iterator[tuple[Key, np.ndarray]]:
        """Every axis that has slots, with its slots."""
        yield from self._slots.items()

    # Stored tensors: initializers, and what is computed from nothing else.

    def store(self, value: ir.Value) -> None:
        self._stored.add(value)

    def is_stored(self, value: ir.Value | None) -> bool:
        return value is not None and value in self._stored

    def mark(self, value: ir.Value | None, axis: int, role: Role) -> None:
        """Give an axis of a stored tensor a role; nothing happens to other values."""
        if value is not None and self.is_stored(value):
            slots = self.slots(value, axis)
            if slots is not None:
                self._roles.append((slots, role))

    # Ties.

    def join(self, source: ir.Value, i: int, target: ir.Value, j: int, role: Role | None = Role.AFFINE) -> None:
        """Tie index k along axis `i` of `source` to k along axis `j` of `target`, which is zero where `source` is.

        `role` is the role of `source`, if it is stored and `target` is not. If the sizes differ, both stay.
        """
        self.link(source, i, target, j, role)
        self.declare_zero(target, j, (source, i))

    def link(self, source: ir.Value, i: int, target: ir.Value, j: int, role: Role | None = Role.AFFINE) -> None:
        """As `join`, without a statement about zeros."""
        ours, theirs = self.slots(source, i), self.slots(target, j)
        if ours is None and theirs is None:
            return
        if ours is not None and theirs is None and self.shape(source)[i] is None and self.shape(target)[j] is None:
            theirs = self.make_slots(target, j, len(ours))
        if ours is None or theirs is None or len(ours) != len(theirs):
            self.fix(source, i, "its size is not known where it meets another")
            self.fix(target, j, "its size is not known where it meets another")
            return
        self.tie(ours, theirs)
        if role is not None and not self.is_stored(target):
            self.mark(source, i, role)

    def tie(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Tie the slots in pairs."""
        self._ties.append((ours, theirs))
        # Ties between constants alone also carry roles (`roles`).
        if self.node is not None and all(self.is_stored(value) for value in self.node.outputs):
            self._stored_ties.append((ours, theirs))

    def fix(self, value: ir.Value, axis: int | None, why: str) -> None:
        """Keep everything along this axis (None: along all axes), for the reason `why`."""
        if value.shape is None:
            return
        for place in range(len(value.shape)) if axis is None else [axis]:
            slots = self.slots(value, place)
            if slots is not None:
                self.fix_slots(slots, why)

    def fix_slots(self, slots: np.ndarray, why: str) -> None:
        name = "" if self.node is None else f"{self.node.op_type} {self.node.name!r}: "
        self._fixed.append((slots, name + why))

    # Zeros: leaving a channel out of a sum is exact only if the channel is zero once the weights that make it are.

    def declare_zero(self, value: ir.Value, axis: int, when: ZeroWhen) -> None:
        """State when channels along this axis are zero. Several statements must all be true."""
        before = self._zero_when.get((value, axis), True)
        self._zero_when[value, axis] = when if before is True else ("all", [before, when])

    def declare_nonzero(self, value: ir.Value) -> None:
        """State that channels of this value are never zero."""
        for axis in range(self.rank(value)):
            self._zero_when[value, axis] = False

    def require_zero(self, keys: list[Key], why: str) -> None:
        """A sum runs over these axes: unless one of them is zero where its channel goes, all must stay."""
        self._required.append((keys, why))

    # Decisions that need to know what else may go.

    def defer(self, decide: Callable[[np.ndarray], None]) -> None:
        """Call `decide` at the end, with the labels of all slots by then."""
        self._deferred.append(decide)

    def settle(self) -> None:
        """Make the decisions left for later, then fix what is summed over and not zero."""
        labels, node = self.labels(), self.node
        for decide in self._deferred:
            decide(labels)
        self.node = node
        # Anew, as decisions tie and fix. What stays need not be zero: a picture in a Concat with channels that may go.
        labels = self.labels()
        known = {key: True for key, slots in self.lanes() if not labels[slots].any()}
        for keys, why in self._required:
            if not any(self._is_zero(key, known) for key in keys):
                for value, axis in keys:
                    slots = self.slots(value, axis)
                    if slots is not None:
                        self._fixed.append((slots, why))

    def _is_zero(self, key: Key, known: dict[Key, bool]) -> bool:
        """Whether channels are zero along an axis; a stored tensor without a statement can be set to zero."""
        if key not in known:
            when = self._zero_when.get(key, self.is_stored(key[0]))
            known[key] = self._holds(when, known)
        return known[key]

    def _holds(self, when: ZeroWhen, known: dict[Key, bool]) -> bool:
        if isinstance(when, bool):
            return when
        if isinstance(when[0], str):
            mode, parts = when[0], when[1]
            held = [self._holds(part, known) for part in parts]
            if mode == "unless":
                # A quotient is zero where the dividend is, and NaN if the divisor is zero there too.
                return held[0] and not any(held[1:])
            return any(held) if mode == "any" else all(held)
        return self._is_zero((when[0], int(when[1])), known)

    # Results.

    @property
    def count(self) -> int:
        return self._count

    def labels(self, fixed: bool = True) -> np.ndarray:
        """For every slot the smallest slot that it is tied to; 0 where it must stay, unless `fixed` is False."""
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
        reason_of: dict[int, str] = {}
        for slots, why in self._fixed:
            for label in np.unique(labels[slots]):
                reason_of.setdefault(int(label), why)
        return reason_of

    def roles(self) -> np.ndarray:
        """The roles of every slot, or-ed together."""
        roles = np.zeros(self._count, np.int64)
        for slots, role in self._roles:
            roles[slots] |= int(role)
        # A role that a layer gives to a tensor behind a Transpose or Slice is a role of the stored tensor itself.
        if self._stored_ties:
            ours, theirs = (np.concatenate(side) for side in zip(*self._stored_ties))
            same = _components(self._count, ours, theirs)
            shared = np.zeros_like(roles)
            np.bitwise_or.at(shared, same, roles)
            roles = shared[same]
        return roles


def constant_is_zero(value: ir.Value | None) -> bool:
    content = constant_array(value)
    return content is not None and not np.any(content)


def _components(count: int, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Connected components: for each of `count` nodes the smallest node of its component.

    Each round hooks the labels of tied nodes onto the smaller one, then shortens the chains of labels (as
    Shiloach and Vishkin 1982), so that few rounds suffice.
    """
    label = np.arange(count)
    while True:
        low = np.minimum(label[ours], label[theirs])
        following = label.copy()
        # Labels are nodes themselves: hooking a label moves all nodes that have it.
        np.minimum.at(following, label[ours], low)
        np.minimum.at(following, label[theirs], low)
        # Pointer jumping, until every label points at itself.
        while not np.array_equal(following, shortened := following[following]):
            following = shortened
        if np.array_equal(following, label):
            return label
        label = following
