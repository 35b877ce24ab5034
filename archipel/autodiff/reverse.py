"""Reverse mode: walk the graph backwards, ask each node's rule, add up what arrives.

Griewank and Walther, Evaluating Derivatives (2008), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from archipel.autodiff.activity import active, influencing, obstacle, passes
from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Rule, find, require_kept, where
from archipel.errors import AutodiffError, NotDifferentiableError
from archipel.graph.build import Builder
from archipel.graph.shapes import complete_shape, dims, is_float
from archipel.graph.walk import dependencies


def differentiate(op: Builder, seeds: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]) -> list[ir.Value]:
    """Emit the gradient with respect to each of `wrt` of the sum over seeds of <target, seed>.

    `seeds` maps each target to its cotangent. Everything is appended to the builder's graph. Where a target does not
    depend on a value its gradient is zeros. Raises MissingRuleError for an operator on the way that has no rule and
    NotDifferentiableError if the dependence is there but not through floating-point values.
    """
    require_kept(op.graph)
    nodes = list(op.graph)
    relevant = influencing(nodes, seeds)
    carriers = active(nodes, wrt) & relevant
    sums = _Sums(op)
    for target, seed in seeds.items():
        if target in carriers:
            sums.add(target, seed)
    for node in reversed(nodes):
        cotangents = tuple(sums.total(value) for value in node.outputs)
        if all(cotangent is None for cotangent in cotangents):
            continue
        wanted = tuple(value is not None and value in carriers and passes(node, value) for value in node.inputs)
        if not any(value in carriers for value in dependencies(node)):
            continue
        rule = find(node)
        with op.scope(f"{node.name}.vjp"):
            gradients = rule(RuleContext(op, node, cotangents, wanted))
            _check(node, rule, gradients)
            for value, gradient, want in zip(node.inputs, gradients, wanted):
                if value is not None and gradient is not None and want:
                    complete_shape(gradient, value)
                    sums.add(value, gradient)
    return [_finish(op, sums, nodes, value, relevant) for value in wrt]


class _Sums:
    """Contributions to each value's cotangent, added up when it is asked for."""

    def __init__(self, op: Builder) -> None:
        self._op = op
        self._parts: dict[ir.Value, list[ir.Value]] = {}

    def add(self, value: ir.Value, part: ir.Value) -> None:
        self._parts.setdefault(value, []).append(part)

    def total(self, value: ir.Value) -> ir.Value | None:
        parts = self._parts.get(value)
        if not parts:
            return None
        while len(parts) > 1:
            parts[:2] = [self._op.Add(parts[0], parts[1])]
        return parts[0]


def _finish(op: Builder, sums: _Sums, nodes: list[ir.Node], value: ir.Value, relevant: set[ir.Value]) -> ir.Value:
    found = sums.total(value)
    if found is not None:
        return found
    if value in relevant:
        node = obstacle(nodes, value, relevant)
        through = f"{node.op_type} {node.name!r}" if node is not None else "an input that has no derivative"
        raise NotDifferentiableError(
            f"the gradient with respect to {value.name!r} does not exist: the target depends on it only through "
            f"{through}, which passes no derivative on; leave {value.name!r} out of wrt"
        )
    return op.full_like(value, 0.0)


def _check(node: ir.Node, rule: Rule, gradients: Sequence[ir.Value | None]) -> None:
    # Every rule is held to its contract here, so that a wrong one is named and not the node that trips over it.
    title = f"gradient rule for {node.op_type} ({where(rule)}), node {node.name!r}"
    if any(gradient is not None for gradient in gradients[len(node.inputs) :]):
        raise AutodiffError(f"{title}: {len(gradients)} gradients for {len(node.inputs)} inputs")
    for index, (value, gradient) in enumerate(zip(node.inputs, gradients)):
        if gradient is None:
            continue
        if value is None or not passes(node, value):
            raise AutodiffError(f"{title}: a gradient for input {index}, which takes none")
        # That of an integer which was quantized has the type of the real number it stands for.
        if gradient.dtype != (value.dtype if is_float(value) else node.outputs[0].dtype):
            raise AutodiffError(f"{title}: gradient of input {index} is {gradient.dtype}, the input {value.dtype}")
        have, want = dims(gradient), dims(value)
        fits = len(have) == len(want) and all(
            h == w or not (isinstance(h, int) and isinstance(w, int)) for h, w in zip(have, want)
        )
        if not fits:
            raise AutodiffError(f"{title}: gradient of input {index} has shape {list(have)}, the input {list(want)}")
