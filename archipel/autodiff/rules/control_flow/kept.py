"""Which values the way back reads from the way there, and which it computes again.

A body's gradient is emitted into a copy of the body, so it could compute everything again from what goes into the body.
That needs the least memory. Values that are expensive to compute are kept instead: the forward node returns them as
well, and the copy reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.graph.build import Builder
from archipel.graph.markers import CLIP, is_marker
from archipel.graph.shapes import constant_array, dims, same_shape
from archipel.graph.walk import bodies, dependencies

UNREAD = "archipel.unread"
"""Metadata key of a node in a branch whose result stands in for one of the other branch: nobody reads it."""

# Products, and what has a loop inside. Everything else costs about as much as reading it from memory would.
_EXPENSIVE = {
    *("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "Attention", "TopK", "DFT", "Det"),
    *("DeformConv", "MatMulInteger", "QLinearConv", "QLinearMatMul", "ConvInteger", "If", "Loop", "Scan"),
}
# Computed again they would be other numbers.
_RANDOM = {
    "Dropout",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
}


def show_masks(op: Builder, body: ir.Graph) -> None:
    """Give each Dropout of a body the mask as a result, which its gradient reads."""
    for node in body:
        if node.domain == "" and node.op_type == "Dropout" and _draws(node):
            if len(node.outputs) < 2:
                node.resize_outputs(2)
            data, mask = node.outputs
            mask.name = mask.name or op.unique(f"{node.name}/mask")
            mask.type, mask.shape = ir.TensorType(ir.DataType.BOOL), data.shape


def read_shapes_elsewhere(copies: Mapping[ir.Value, ir.Value], graph: ir.Graph, free: Sequence[ir.Value]) -> None:
    """Have the copy `graph` read no shape of a value that it would compute for that alone, if one of `free` has the
    same: what is there in any case, such as cotangents."""
    forward = set(copies.values())
    for node in graph:
        value = node.inputs[0] if node.domain == "" and node.op_type == "Shape" else None
        if value is None or value not in forward or value.shape is None:
            continue
        same = (v for v in free if v.shape is not None and same_shape(dims(v), dims(value)))
        other = next(same, None)
        if other is not None:
            node.replace_input_with(0, other)


def values_to_keep(
    ctx: RuleContext,
    copies: Mapping[ir.Value, ir.Value],
    results: Sequence[ir.Value],
    fits: Callable[[ir.Value], bool],
    free: Collection[ir.Value] = (),
) -> list[ir.Value]:
    """The values of a body that its copy should read instead of computing them.

    Arguments:
        ctx: of the node with the body.
        copies: each value of the body -> the copy's.
        results: what the copy returns, in the end: gradients.
        fits: whether a value of the body can be returned by its node.
        free: values of the body that are there in any case.

    Raises MissingRuleError for random numbers that would have to be kept and do not fit.
    """
    originals = {copy: value for value, copy in copies.items()}
    kept: dict[ir.Value, None] = {}
    seen: set[ir.Value] = set()
    waiting = list(results)
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        maker, original = value.producer(), originals.get(value)
        if maker is None:
            continue
        random = _draws(maker)
        keep = (random and not bodies(maker)) or _is_worth_keeping(maker, original)
        if original is not None and (original in free or (keep and fits(original))):
            kept[original] = None
        elif random:
            ctx.refuse(
                f"{maker.op_type} {maker.name!r} in the body",
                "its random numbers cannot be drawn again on the way back; give them to the model as an input",
            )
        else:
            waiting.extend(dependencies(maker))
    return list(kept)


def _draws(node: ir.Node) -> bool:
    """Whether the node, or one in its bodies, draws random numbers."""
    if node.domain == "" and node.op_type == "Dropout":
        training = node.inputs[2] if len(node.inputs) > 2 else None
        known = constant_array(training)
        return training is not None and (known is None or bool(known.any()))
    if node.domain == "" and node.op_type in _RANDOM:
        return True
    return any(_draws(inner) for body in bodies(node) for inner in body)


def _is_worth_keeping(maker: ir.Node, original: ir.Value | None) -> bool:
    # Computed again, a value would have two markers in second derivatives, each with a limit for its part alone.
    if is_marker(maker, CLIP):
        return True
    # A loop whose gradient is taken runs again in any case: the copy has further results, which the gradient reads.
    node = None if original is None else original.producer()
    widened = node is None or len(node.outputs) != len(maker.outputs)
    return maker.domain == "" and maker.op_type in _EXPENSIVE and not (bodies(maker) and widened)
