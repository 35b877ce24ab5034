"""What rules work with: `RuleContext` those of reverse mode, `ForwardContext` those of forward mode."""

from __future__ import annotations

from typing import Any, NoReturn

import onnx_ir as ir

from archipel.autodiff.registry import find_rule, source_file
from archipel.errors import AutodiffError, MissingRuleError
from archipel.graph.build import Builder
from archipel.graph.shapes import dtype_of


class Described:
    """What rules of all kinds ask a `node` for."""

    node: ir.Node

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute's value, lists as `list`; `default`, which is to be ONNX's, if the node does not set it."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        value = attribute.value
        return list(value) if isinstance(value, tuple) else value

    @property
    def title(self) -> str:
        """Operator and name of the node, for errors."""
        return f"{self.node.op_type} {self.node.name!r}"


class NodeContext(Described):
    """One node to be differentiated, and the builder `op` that the rule emits nodes with.

    Attributes:
        op: builder of the graph; `ctx.op.Mul(a, b)` appends a node and returns its value.
        node: the node to differentiate.
        inputs, outputs: the node's own values; None for an optional input that the node leaves out.
    """

    def __init__(self, op: Builder, node: ir.Node) -> None:
        self.op = op
        self.node = node
        self.inputs: tuple[ir.Value | None, ...] = tuple(node.inputs)
        self.outputs: tuple[ir.Value, ...] = tuple(node.outputs)

    @property
    def output(self) -> ir.Value:
        """The first output."""
        return self.outputs[0]

    def input(self, index: int) -> ir.Value:
        """A required input. Raises AutodiffError if the node leaves it out."""
        value = self.optional(index)
        if value is None:
            raise AutodiffError(f"{self.title}: input {index} is missing")
        return value

    def optional(self, index: int) -> ir.Value | None:
        """An input, or None if the node leaves it out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def replace(self, *values: ir.Value) -> None:
        """Make the readers of the node's outputs read these values instead: a forward pass that also keeps
        intermediate results for the gradient.

        Emit the values inside `ctx.op.after(ctx.node)`, so that they come before their readers. The node stays, without
        readers, until dead code is removed.
        """
        for old, new in zip(self.outputs, values, strict=True):
            if not old.uses() and not old.is_graph_output():
                continue  # nothing reads it; an output that the node leaves out has no type to copy either
            new.shape, new.dtype = old.shape, dtype_of(old)
            if old.is_graph_output():
                new = self._take_over_name(old, new)  # the name of a model's output is part of its interface
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)

    def _take_over_name(self, old: ir.Value, new: ir.Value) -> ir.Value:
        # A value with a name of its own to keep cannot take another: a copy of it can.
        if new.is_graph_output() or new.is_graph_input() or new.producer() is None:
            with self.op.after(self.node):
                new = self.op.Identity(new)
        old.name, new.name = self.op.unique(f"{old.name}/replaced"), old.name
        return new

    def refuse(self, what: str, reason: str) -> NoReturn:
        """Raise MissingRuleError: the rule does not cover `what`, an attribute or input, for this `reason`."""
        raise MissingRuleError(f"{self.title}: {what}: {reason}; the rule is in {source_file(find_rule(self.node))}")


class RuleContext(NodeContext):
    """A node to be differentiated in reverse, as `NodeContext`, with the cotangents of its outputs.

    Attributes:
        cotangents: for each output the gradient of the differentiated scalar with respect to it, of the output's shape
            and type; None for an output that the scalar does not depend on.
        captured: the values of the graph around it that the node's bodies read; () for a node without bodies. Their
            gradients come behind those of the inputs.

    Example: see `archipel.autodiff.rule`.
    """

    def __init__(
        self,
        op: Builder,
        node: ir.Node,
        cotangents: tuple[ir.Value | None, ...],
        wanted: tuple[bool, ...],
        captured: tuple[ir.Value, ...] = (),
    ) -> None:
        super().__init__(op, node)
        self.cotangents = cotangents
        self.captured = captured
        self._wanted = wanted

    @property
    def cotangent(self) -> ir.Value:
        """The cotangent of the first output; zeros if only other outputs have one."""
        first = self.cotangents[0]
        return self.op.full_like(self.outputs[0], 0.0) if first is None else first

    def wants(self, index: int) -> bool:
        """Whether the gradient of this input is needed; a rule may return None for one that is not.

        The captured values have the indices behind those of the inputs.
        """
        return index < len(self._wanted) and self._wanted[index]


class ForwardContext(NodeContext):
    """A node to be differentiated in forward mode, as `NodeContext`, with the tangents of its inputs.

    Attributes:
        tangents: for each input its tangent, of its shape and type; None for an input that does not move.

    Example: see `archipel.autodiff.forward_rule`.
    """

    def __init__(self, op: Builder, node: ir.Node, tangents: tuple[ir.Value | None, ...]) -> None:
        super().__init__(op, node)
        self.tangents = tangents

    def tangent(self, index: int) -> ir.Value | None:
        """The tangent of an input, or None if it does not move or the node leaves it out."""
        return self.tangents[index] if index < len(self.tangents) else None
