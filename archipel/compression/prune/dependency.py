"""The channel dependency graph: which indices of which tensors go together.

The idea is that of Fang et al. 2023 (DepGraph): layers are coupled through what lies between them. Here the unit of
coupling is a single index of a single axis. Every operator ties indices of its inputs to indices of its outputs
(`rules`), and what is tied together is one unit: it goes as a whole, or stays. So an offset in a Concat, a block of a
Flatten, a head of attention, a gate of an LSTM or a group of a convolution is nothing special.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from archipel.compression.prune.links import Key, Links, Opaque, Role
from archipel.compression.prune.rules.table import RULES
from archipel.compression.prune.separate import separate_constants
from archipel.compression.prune.shape_flow import ShapeFlow
from archipel.graph import Model
from archipel.graph.shapes import constant_array
from archipel.graph.walk import dependencies

Part = Literal["weight", "affine", "consumer", "follower"]


@dataclass(frozen=True, eq=False)
class Member:
    """A stored tensor that loses indices along one axis when a unit goes: `indices` is int64 [units, per unit].

    `role`: "weight" (a layer's output channels), "affine" (bias, scale and whatever else is added to or multiplied with
    them), "consumer" (the channels a layer sums over), "follower" (statistics, divisors). Weights and affine members
    are the producers: with these zero, so is what the unit computes. A constant that is no parameter counts once for
    each node that reads it; from the second on it is called `<name>/copy`.
    """

    tensor: str
    axis: int
    role: Part
    indices: np.ndarray

    @property
    def produces(self) -> bool:
        return self.role in ("weight", "affine")


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Units of the same kind, each of which can go by itself without changing the model's inputs and outputs.

    `name` is that of the first weight that makes them. `granularity` is the number of its channels in a unit: 1, or
    those of a group of a convolution, of an attention head, of the gates of a hidden unit.
    """

    name: str
    size: int
    granularity: int
    members: tuple[Member, ...]


def channel_groups(model: Model) -> list[ChannelGroup]:
    """The groups of units that can be removed, in the order of the model's initializers."""
    return _dependencies(model).groups


def fixed_channels(model: Model) -> dict[str, str]:
    """The weights of layers with output channels that must stay, and the reason for the first of these."""
    return _dependencies(model).reasons()


def _dependencies(model: Model) -> Dependencies:
    copy = model.copy().ir
    separate_constants(copy)
    return Dependencies(copy.graph)


class Dependencies:
    """The analysis of one graph, after `separate_constants`.

    `labels` gives for each slot of `links` the unit that it belongs to, 0: it stays.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.links = Links()
        self.flow = ShapeFlow(self.links)
        self._walk()
        self.labels = self.links.labels()
        self._roles = self.links.roles()
        self.units: dict[str, np.ndarray] = {}
        """For each group the labels of its units."""
        self.groups = self._groups()

    def _walk(self) -> None:
        links = self.links
        for value in stored_tensors(self.graph):
            links.store(value)
        for value in self.graph.inputs:
            links.fix(value, None, f"input {value.name!r} of the model")
        for node in self.graph:
            links.node = node
            if node.op_type == "Constant" and node.domain == "":
                continue
            if node.inputs and all(value is None or links.is_stored(value) for value in node.inputs):
                for value in node.outputs:
                    links.store(value)
            if self.flow.follow(node):
                continue
            self.flow.meet(node)
            rule = RULES.get(node.op_type) if node.domain == "" else None
            try:
                if rule is None:
                    raise Opaque("an operator that channels are not followed through")
                rule.link(node, links)
            except Opaque as reason:
                for value in (*dependencies(node), *node.outputs):
                    links.fix(value, None, str(reason))
                    self.flow.leak(value, str(reason))
        links.node = None
        for value in self.graph.outputs:
            links.fix(value, None, f"output {value.name!r} of the model")
            self.flow.leak(value, f"output {value.name!r} of the model")
        links.settle()

    def _groups(self) -> list[ChannelGroup]:
        keys, owner, index, label, role = self._stored_slots()
        order = np.lexsort((index, owner, label))
        owner, index, label, role = owner[order], index[order], label[order], role[order]
        starts = np.flatnonzero(np.r_[True, label[1:] != label[:-1]]) if len(label) else np.zeros(0, np.int64)
        found: dict[bytes, list[slice]] = {}
        for start, end in zip(starts, [*starts[1:], len(label)]):
            part = slice(int(start), int(end))
            if (role[part] & int(Role.WEIGHT)).any():
                found.setdefault(owner[part].tobytes(), []).append(part)
        groups, taken = [], dict[str, int]()
        for parts in sorted(found.values(), key=lambda parts: parts[0].start):
            table = np.stack([index[part] for part in parts])
            bits = np.bitwise_or.reduce(np.stack([role[part] for part in parts]))
            owners = owner[parts[0]]
            members = []
            for place in np.unique(owners):
                columns = owners == place
                value, axis = keys[place]
                part_role = _role(int(np.bitwise_or.reduce(bits[columns])))
                members.append(Member(str(value.name), axis, part_role, table[:, columns]))
            group = self._named(members, len(parts), taken)
            self.units[group.name] = np.array([label[part.start] for part in parts])
            groups.append(group)
        return groups

    def _stored_slots(self) -> tuple[list[Key], np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(keys, and for each slot of a stored tensor that may go: its key, index, label, role)."""
        order = {value: place for place, value in enumerate(stored_tensors(self.graph))}
        found = [(key, slots) for key, slots in self.links.lanes() if key[0] in order]
        found.sort(key=lambda item: (order[item[0][0]], item[0][1]))
        if not found:
            empty = np.zeros(0, np.int64)
            return [], empty, empty, empty, empty
        slots = np.concatenate([slots for _, slots in found])
        owner = np.repeat(np.arange(len(found)), [len(slots) for _, slots in found])
        index = np.concatenate([np.arange(len(slots)) for _, slots in found])
        loose = self.labels[slots] != 0
        return (
            [key for key, _ in found],
            owner[loose],
            index[loose],
            self.labels[slots][loose],
            self._roles[slots][loose],
        )

    def _named(self, members: list[Member], size: int, taken: dict[str, int]) -> ChannelGroup:
        first = next(member for member in members if member.role == "weight")
        taken[first.tensor] = taken.get(first.tensor, 0) + 1
        count = taken[first.tensor]
        name = first.tensor if count == 1 else f"{first.tensor}#{count}"
        return ChannelGroup(name, size, first.indices.shape[1], tuple(members))

    def reasons(self) -> dict[str, str]:
        """For each layer's weight whose output channels do not all belong to a group: why."""
        reasons, loose = self.links.reasons(), self.links.labels(fixed=False)
        slots_of = dict(self.links.lanes())
        found: dict[str, str] = {}
        for value in stored_tensors(self.graph):
            for axis in range(0 if value.shape is None else len(value.shape)):
                slots = slots_of.get((value, axis))
                if slots is None:
                    continue
                held = slots[(self.labels[slots] == 0) & (self._roles[slots] & int(Role.WEIGHT) != 0)]
                why = next((reasons[label] for label in loose[held].tolist() if label in reasons), None)
                if why is not None:
                    found.setdefault(str(value.name), why)
        return found


def stored_tensors(graph: ir.Graph) -> list[ir.Value]:
    """The initializers, and what Constant nodes hold."""
    nodes = [node.outputs[0] for node in graph if node.op_type == "Constant" and node.domain == ""]
    kept = [value for value in graph.initializers.values() if not value.is_graph_input()]
    return [*kept, *(value for value in nodes if constant_array(value) is not None)]


def _role(bits: int) -> Part:
    if bits & Role.WEIGHT:
        return "weight"
    if bits & Role.AFFINE:
        return "affine"
    return "consumer" if bits & Role.CONSUMER else "follower"
