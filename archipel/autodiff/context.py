"""What a gradient rule is given."""

from __future__ import annotations

from typing import Any, NoReturn

import onnx_ir as ir

from archipel.autodiff.registry import find, where
from archipel.errors import AutodiffError, MissingRuleError
from archipel.graph.build import Builder
from archipel.graph.shapes import dtype_of


class RuleContext:
    """One node to be differentiated in reverse, and the builder that the rule writes with.

    `inputs` and `outputs` are the node's own (None: an optional input left out); `cotangents` has the gradient of the
    scalar with respect to each output, None for an output that does not influence it.
    """

    def __init__(
        self, op: Builder, node: ir.Node, cotangents: tuple[ir.Value | None, ...], wanted: tuple[bool, ...]
    ) -> None:
        self.op = op
        self.node = node
        self.inputs: tuple[ir.Value | None, ...] = tuple(node.inputs)
        self.outputs: tuple[ir.Value, ...] = tuple(node.outputs)
        self.cotangents = cotangents
        self._wanted = wanted

    @property
    def cotangent(self) -> ir.Value:
        """The cotangent of the first output; zeros if only other outputs have one."""
        found = self.cotangents[0]
        return self.op.full_like(self.outputs[0], 0.0) if found is None else found

    @property
    def output(self) -> ir.Value:
        return self.outputs[0]

    def input(self, index: int) -> ir.Value:
        """A required input. Raises AutodiffError if it was left out."""
        value = self.optional(index)
        if value is None:
            raise AutodiffError(f"{self.title}: input {index} is missing")
        return value

    def optional(self, index: int) -> ir.Value | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def wants(self, index: int) -> bool:
        """Whether anybody asks for the gradient of this input."""
        return index < len(self._wanted) and self._wanted[index]

    def replace(self, *values: ir.Value) -> None:
        """Let what reads the node's outputs read these values instead: a forward pass that keeps what the gradient
        needs. Emit them inside `ctx.op.after(ctx.node)`; the node itself goes away as dead code."""
        for old, new in zip(self.outputs, values, strict=True):
            if not old.uses() and not old.is_graph_output():
                continue  # may be one that was left out, of no type
            new.shape, new.dtype = old.shape, dtype_of(old)
            if old.is_graph_output():
                new = self._take_over_name(old, new)
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)

    def _take_over_name(self, old: ir.Value, new: ir.Value) -> ir.Value:
        if new.is_graph_output() or new.is_graph_input() or new.producer() is None:
            with self.op.after(self.node):
                new = self.op.Identity(new)
        old.name, new.name = self.op.unique(f"{old.name}/replaced"), old.name
        return new

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute's value, or the default that ONNX gives it."""
        found = self.node.attributes.get(name)
        if found is None:
            return default
        value = found.value
        return list(value) if isinstance(value, tuple) else value

    def refuse(self, what: str, reason: str) -> NoReturn:
        """Raise MissingRuleError for an attribute or input that the rule does not cover."""
        raise MissingRuleError(f"{self.title}: {what}: {reason}; the rule is in {where(find(self.node))}")

    @property
    def title(self) -> str:
        return f"{self.node.op_type} {self.node.name!r}"
