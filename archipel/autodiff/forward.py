"""Forward mode, as the transpose of the transpose: a vector-Jacobian product is linear in its cotangents, so its
derivative with respect to them, taken in reverse, is the Jacobian-vector product.

There is no second rule book: every reverse rule whose nodes have rules themselves has a forward derivative. Nodes of
the first sweep that only the cotangents' values reach are dead afterwards. An operator with a rule of forward mode
leaves one node in the first sweep, whose gradient in the second is what that rule emits.

Radul et al., You Only Linearize Once (2023), takes the opposite way: reverse mode as the transpose of forward mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import ForwardContext, RuleContext
from archipel.autodiff.registry import FORWARD, OWN_RULE, ForwardRule, Gradients, Rule, Tangents, find_rule, source_file
from archipel.autodiff.reverse import differentiate
from archipel.errors import AutodiffError, MissingRuleError
from archipel.graph.build import Builder
from archipel.graph.shapes import Dim, dims, dtype_of
from archipel.graph.walk import ancestors, descendants


def push_forward(
    op: Builder,
    targets: Sequence[ir.Value],
    tangents: Mapping[ir.Value, ir.Value],
) -> list[ir.Value]:
    """Emit the directional derivative of each target.

    Arguments:
        op: builder of the graph; it appends nodes to it.
        targets: floating-point values of the graph.
        tangents: value -> its tangent, of the value's shape and type.

    Returns one tangent for each target, of its shape and type; zeros where it depends on no value of `tangents`.

    Raises the errors of `differentiate`, and MissingRuleError for an operator whose gradient cannot be differentiated.
    """
    # Each is a value of its own: equal constants are one initializer, and equal gradients may be one value.
    before = list(op.graph)
    cotangents = [op.Identity(op.full_like(target, 0.0)) for target in targets]
    transposed = _Transposed()
    # A rule for one call also counts in place of one of forward mode.
    standard = [node for node in before if OWN_RULE not in node.meta]
    own = {node: transposed.emit for node in standard if (node.domain, node.op_type) in FORWARD}
    gradients = differentiate(op, dict(zip(targets, cotangents)), list(tangents), own=own, again=False)
    seeds = {op.Identity(gradient): tangent for gradient, tangent in zip(gradients, tangents.values())}
    first = op.graph[-1]
    with second_sweep("jvp"):
        # The first sweep has found every obstacle.
        results = differentiate(op, seeds, cotangents, own=transposed.rules, flat_steps=True)
    _read_shapes_elsewhere(op, before, cotangents, first)
    transposed.expand_what_is_read(op, results)
    return results


class _Transposed:
    """Nodes that stand for the gradient of an operator with a rule of forward mode. None of them stays."""

    def __init__(self) -> None:
        self.rules: dict[ir.Node, Rule] = {}
        self._contexts: dict[ir.Node, tuple[RuleContext, list[ir.Value], list[int]]] = {}

    def emit(self, ctx: RuleContext) -> Gradients:
        """The rule of the first sweep: one node from the cotangents to the gradients."""
        places = [i for i, value in enumerate(ctx.inputs) if value is not None and ctx.wants(i)]
        names = [ctx.op.unique(f"{ctx.node.name}.vjp/transposed") for _ in places]
        results = [
            ir.Value(name=name, type=ir.TensorType(dtype_of(ctx.input(i))), shape=ctx.input(i).shape)
            for name, i in zip(names, places)
        ]
        node = ir.Node("archipel.forward", "Transposed", list(ctx.cotangents), outputs=results, name=names[0])
        ctx.op.graph.append(node)
        forward = FORWARD[ctx.node.domain, ctx.node.op_type]

        def push(second: RuleContext) -> Gradients:
            moved = dict(zip(places, second.cotangents))
            third = ForwardContext(ctx.op, ctx.node, tuple(moved.get(i) for i in range(len(ctx.inputs))))
            tangents = forward(third)
            # An output that no target depends on is not asked for.
            asked = [v if g is not None else None for v, g in zip(tangents, ctx.cotangents)]
            _check(third, forward, [*asked, *tangents[len(asked) :]])
            return asked

        self.rules[node] = push
        self._contexts[node] = (ctx, results, places)
        gradients: list[ir.Value | None] = [None] * len(ctx.inputs)
        for i, result in zip(places, results):
            gradients[i] = result
        return gradients

    def expand_what_is_read(self, op: Builder, results: Sequence[ir.Value]) -> None:
        """Put the gradient itself in place of a node that the results read all the same, for the shape of it."""
        # From the last on: what takes a node's place may read those before it.
        for node, (ctx, outputs, places) in reversed(self._contexts.items()):
            if ancestors(op.graph, [*results, *op.graph.outputs]).isdisjoint(outputs):
                continue
            with op.before(node), op.scope(f"{ctx.node.name}.vjp"):
                gradients = find_rule(ctx.node)(ctx)
            for place, output in zip(places, outputs):
                gradient = gradients[place]
                output.replace_all_uses_with(op.full_like(output, 0.0) if gradient is None else gradient)


def _check(ctx: ForwardContext, rule: ForwardRule, tangents: Tangents) -> None:
    title = f"forward rule for {ctx.node.op_type} ({source_file(rule)}), node {ctx.node.name!r}"
    if len(tangents) > len(ctx.outputs):
        raise AutodiffError(f"{title}: {len(tangents)} tangents for {len(ctx.outputs)} outputs")
    for index, (output, tangent) in enumerate(zip(ctx.outputs, tangents)):
        if tangent is not None and (tangent.dtype != output.dtype or len(dims(tangent)) != len(dims(output))):
            have = f"{tangent.dtype}{list(dims(tangent))}"
            raise AutodiffError(f"{title}: tangent {index} is {have}, the output {output.dtype}{list(dims(output))}")


def _read_shapes_elsewhere(
    op: Builder, before: Sequence[ir.Node], cotangents: Sequence[ir.Value], first: ir.Node
) -> None:
    """Let Shape nodes of the second sweep, those behind `first`, read values of the model in place of one of the first
    sweep that has sizes of the same names: else that would not be dead."""
    nodes = list(op.graph)
    doomed = descendants(nodes, cotangents)
    lasting = [v for node in before for v in node.outputs if v.shape is not None]
    lasting += [v for v in (*op.graph.inputs, *op.graph.initializers.values()) if v.shape is not None]
    whole = {dims(v): v for v in lasting}
    single: dict[Dim, tuple[ir.Value, int]] = {
        d: (v, axis) for v in lasting for axis, d in enumerate(dims(v)) if isinstance(d, str)
    }
    for node in nodes[nodes.index(first) + 1 :]:
        source = node.inputs[0] if node.op_type == "Shape" else None
        if source is None or source not in doomed:
            continue
        if dims(source) in whole and None not in dims(source):
            node.replace_input_with(0, whole[dims(source)])
        elif all(isinstance(d, int) or d in single for d in dims(source)) and not node.attributes:
            with op.before(node):
                sizes = [
                    np.array([d], np.int64)
                    if isinstance(d, int)
                    else op.Shape(single[d][0], start=single[d][1], end=single[d][1] + 1)
                    for d in dims(source)
                ]
                node.outputs[0].replace_all_uses_with(op.Concat(*sizes, axis=0))


@contextmanager
def second_sweep(title: str) -> Iterator[None]:
    """A context: an error for a missing rule says that the rule is one for a node of a gradient, not of the model."""
    try:
        yield
    except MissingRuleError as error:
        raise MissingRuleError(
            f"{title} differentiates a gradient, and a node of it has no derivative: {error}"
        ) from None
