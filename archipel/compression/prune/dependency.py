"""The channel dependency graph: which indices of which tensors must be removed together.

The idea is that of Fang et al. 2023 (DepGraph): the operators between layers couple them. Here single indices of single
axes are coupled. Every operator ties indices of its inputs to indices of its outputs (`rules`). Indices that are tied
together are one unit, which goes as a whole or stays. So an offset in a Concat, a block of a Flatten, a head of
attention, a gate of an LSTM or a group of a convolution needs no case of its own.
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
from archipel.graph.passes.constants import EXACT
from archipel.graph.shapes import constant_array
from archipel.graph.walk import dependencies

Part = Literal["weight", "affine", "consumer", "follower"]


@dataclass(frozen=True, eq=False)
class Member:
    """A stored tensor that loses indices along one axis when a unit goes: `indices` is int64 [units, per unit].

    `role`: "weight" (a layer's output channels), "affine" (what is added to or multiplied with them, such as bias and
    scale), "consumer" (the channels a layer sums over), "follower" (statistics, divisors). Weights and affine members
    produce the unit: if they are zero, so is what it computes. A constant that is no parameter counts once for each
    node that reads it; from the second on it is called `<name>/copy`.
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
    """Units of the same kind. Each can go by itself without changing the shapes of the model's inputs and outputs.

    `name` is that of the first weight that makes them, `size` the number of units. `granularity` is how many of its
    channels are one unit: 1, or those of a group of a convolution, of an attention head, of a hidden unit's gates.
    """

    name: str
    size: int
    granularity: int
    members: tuple[Member, ...]


def channel_groups(model: Model) -> list[ChannelGroup]:
    """The groups of units that can be removed, in the order of the model's initializers."""
    return _dependencies(model).groups


def fixed_channels(model: Model) -> dict[str, str]:
    """Weights of layers with output channels that must stay, and the reason for the first such channel."""
    return _dependencies(model).reasons()


def _dependencies(model: Model) -> Dependencies:
    copy = model.copy().ir
    separate_constants(copy)
    return Dependencies(copy.graph)


class Dependencies:
    """The analysis of one graph, after `separate_constants`.

    `labels` has for each slot of `links` the label of its unit, 0 where it must stay. `units` has for each group the
    labels of its units.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.links = Links()
        self.flow = ShapeFlow(self.links)
        self._walk()
        self.labels = self.links.labels()
        self._roles = self.links.roles()
        self.units: dict[str, np.ndarray] = {}
        self.groups = self._groups()

    def _walk(self) -> None:
        links = self.links
        for value in stored_tensors(self.graph):
            links.store(value)
        # The model's inputs and outputs keep their shapes.
        for value in self.graph.inputs:
            links.fix(value, None, f"input {value.name!r} of the model")
        for node in self.graph:
            links.node = node
            if node.op_type == "Constant" and node.domain == "":
                continue
            # Computed from constants alone, such as a transposed weight: roles go through to the tensors themselves.
            if node.inputs and all(value is None or links.is_stored(value) for value in node.inputs):
                for value in node.outputs:
                    links.store(value)
            # Arithmetic on sizes moves no channels.
            if self.flow.follow(node):
                continue
            self.flow.meet(node)
            rule = RULES.get(node.op_type) if node.domain == "" else None
            try:
                if EXACT in node.metadata_props:
                    raise Opaque("it prepares the model's input")
                if rule is None:
                    raise Opaque("no rule follows channels through this operator")
                rule.link(node, links)
            # A barrier: all that the node reads or writes stays, with its sizes.
            except Opaque as reason:
                for value in (*dependencies(node), *node.outputs):
                    links.fix(value, None, str(reason))
                    self.flow.leak(value, str(reason))
        links.node = None
        for value in self.graph.outputs:
            links.fix(value, None, f"output {value.name!r} of the model")
            self.flow.leak(value, f"output {value.name!r} of the model")
        # After all outputs are fixed: decisions depend on what may go.
        links.settle()

    def _groups(self) -> list[ChannelGroup]:
        """Units with the same number of indices in the same axes of the same tensors are one group."""
        keys, owner, index, label, role = self._stored_slots()
        # Sorted by label (the last key counts first), so that a unit is one run; within it by axis and index.
        order = np.lexsort((index, owner, label))
        owner, index, label, role = owner[order], index[order], label[order], role[order]
        starts = np.flatnonzero(np.r_[True, label[1:] != label[:-1]]) if len(label) else np.zeros(0, np.int64)
        parts_by_owners: dict[bytes, list[slice]] = {}
        for start, end in zip(starts, [*starts[1:], len(label)]):
            part = slice(int(start), int(end))
            # A unit without a weight has no layer whose channel it is.
            if (role[part] & int(Role.WEIGHT)).any():
                parts_by_owners.setdefault(owner[part].tobytes(), []).append(part)
        groups, name_counts = [], dict[str, int]()
        for parts in sorted(parts_by_owners.values(), key=lambda parts: parts[0].start):
            # [units, slots per unit]: the columns of all units belong to the same axes, as the key of the group says.
            table = np.stack([index[part] for part in parts])
            bits = np.bitwise_or.reduce(np.stack([role[part] for part in parts]))
            owners = owner[parts[0]]
            members = []
            for place in np.unique(owners):
                columns = owners == place
                value, axis = keys[place]
                part_role = _role(int(np.bitwise_or.reduce(bits[columns])))
                members.append(Member(str(value.name), axis, part_role, table[:, columns]))
            group = self._name_group(members, len(parts), name_counts)
            self.units[group.name] = np.array([label[part.start] for part in parts])
            groups.append(group)
        return groups

    def _stored_slots(self) -> tuple[list[Key], np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Keys, and four arrays with an entry for each slot of a stored tensor that may go: key, index, label, role.

        In the order of the stored tensors, so that a group is named after the first of the model's weights.
        """
        order = {value: place for place, value in enumerate(stored_tensors(self.graph))}
        lanes = [(key, slots) for key, slots in self.links.lanes() if key[0] in order]
        lanes.sort(key=lambda item: (order[item[0][0]], item[0][1]))
        if not lanes:
            empty = np.zeros(0, np.int64)
            return [], empty, empty, empty, empty
        slots = np.concatenate([slots for _, slots in lanes])
        owner = np.repeat(np.arange(len(lanes)), [len(slots) for _, slots in lanes])
        index = np.concatenate([np.arange(len(slots)) for _, slots in lanes])
        loose = self.labels[slots] != 0
        return (
            [key for key, _ in lanes],
            owner[loose],
            index[loose],
            self.labels[slots][loose],
            self._roles[slots][loose],
        )

    def _name_group(self, members: list[Member], size: int, name_counts: dict[str, int]) -> ChannelGroup:
        first = next(member for member in members if member.role == "weight")
        # One weight may have several groups: its channels may go to different places.
        name_counts[first.tensor] = name_counts.get(first.tensor, 0) + 1
        count = name_counts[first.tensor]
        name = first.tensor if count == 1 else f"{first.tensor}#{count}"
        return ChannelGroup(name, size, first.indices.shape[1], tuple(members))

    def reasons(self) -> dict[str, str]:
        """For each layer's weight with output channels that belong to no group: why."""
        reasons, loose = self.links.reasons(), self.links.labels(fixed=False)
        slots_of = dict(self.links.lanes())
        reason_of: dict[str, str] = {}
        for value in stored_tensors(self.graph):
            for axis in range(0 if value.shape is None else len(value.shape)):
                slots = slots_of.get((value, axis))
                if slots is None:
                    continue
                # `loose` labels leave out what must stay: they lead from a slot to the reason that holds its unit.
                held = slots[(self.labels[slots] == 0) & (self._roles[slots] & int(Role.WEIGHT) != 0)]
                why = next((reasons[label] for label in loose[held].tolist() if label in reasons), None)
                if why is not None:
                    reason_of.setdefault(str(value.name), why)
        return reason_of


def stored_tensors(graph: ir.Graph) -> list[ir.Value]:
    """The initializers, and what Constant nodes hold."""
    nodes = [node.outputs[0] for node in graph if node.op_type == "Constant" and node.domain == ""]
    initializers = [value for value in graph.initializers.values() if not value.is_graph_input()]
    return [*initializers, *(value for value in nodes if constant_array(value) is not None)]


def _role(bits: int) -> Part:
    """The strongest of several roles."""
    if bits & Role.WEIGHT:
        return "weight"
    if bits & Role.AFFINE:
        return "affine"
    return "consumer" if bits & Role.CONSUMER else "follower"
