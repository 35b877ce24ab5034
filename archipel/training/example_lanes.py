"""The gradients of single examples as lanes of one batch: each operator runs once for all examples.

The gradient of a linear layer's weight is the product of a column and a row for each example. Its norm is the product
of their norms, and the sum of all examples' is one product of matrices (Goodfellow, Efficient Per-Example Gradient
Computations, 2015), so these gradients, mostly the largest, are never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.autodiff.batching import Sweep
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of, fixed_sizes
from archipel.graph.walk import bodies
from archipel.training.optimizers import cast

MAX_ELEMENTS = 2**18
"""The most elements of gradients that each example may have to store; above, one example follows the other."""


@dataclass(frozen=True)
class ExampleGradient:
    """One parameter's gradient for each example: `stored` [examples, ...], or the product of `column` [examples, m, 1]
    and `row` [examples, 1, n]."""

    stored: ir.Value
    column: ir.Value | None = None
    row: ir.Value | None = None

    @classmethod
    def of(cls, value: ir.Value) -> ExampleGradient:
        node = _uncast(value).producer()
        if node is not None and node.domain == "" and node.op_type == "MatMul":
            left, right = node.inputs
            if left is not None and right is not None and len(dims(left)) == len(dims(right)) == 3:
                examples = dims(value)[0]
                if dims(left)[2] == dims(right)[1] == 1 and dims(left)[0] == dims(right)[0] == examples:
                    return cls(value, left, right)
        return cls(value)

    def squares(self, op: Builder, dtype: ir.DataType) -> ir.Value:
        """The sum of the squares of each example's elements, [examples]."""
        if self.column is not None and self.row is not None:
            norm = op.Mul(_norm(op, self.column, dtype), _norm(op, self.row, dtype))
            return op.Mul(norm, norm)
        value = cast(op, self.stored, dtype)
        axes = list(range(1, len(dims(value))))
        return op.ReduceSumSquare(value, axes, keepdims=0) if axes else op.Mul(value, value)

    def total(self, op: Builder, factors: ir.Value, like: ir.Value, kept: ir.Value | None) -> ir.Value:
        """The sum over the examples, each times its factor ([examples]), in the factors' type. Those that are not
        `kept` (bool [examples, 1]; None: all are) count as zeros, whatever they are."""

        def flat(value: ir.Value, size: int) -> ir.Value:
            value = op.Reshape(cast(op, value, dtype_of(factors)), [-1, size])
            return value if kept is None else op.Where(kept, value, 0.0)

        if self.column is not None and self.row is not None:
            m, n = fixed_sizes(dims(like))
            left = op.Mul(flat(self.column, m), op.Unsqueeze(factors, [1]))
            return op.MatMul(op.swap_last(left), flat(self.row, n))
        size = int(np.prod(fixed_sizes(dims(like))))
        return op.reshape_like(op.MatMul(op.Unsqueeze(factors, [0]), flat(self.stored, size)), like)


def _norm(op: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The 2-norm of each example's column or row, [examples].

    Divided by its largest element first: squares of a tiny column could vanish while the row is so large that their
    product is above the clip.
    """
    value = cast(op, value, dtype)
    axes = list(range(1, len(dims(value))))
    largest = op.Max(op.ReduceMax(op.Abs(value), axes, keepdims=1), float(np.finfo(dtype.numpy()).tiny))
    scaled = op.ReduceSumSquare(op.Div(value, largest), axes, keepdims=0)
    return op.Mul(op.Squeeze(largest, axes), op.Sqrt(scaled))


def lanes_of(
    op: Builder, body: ir.Graph, lanes: Mapping[ir.Value, ir.Value], results: Sequence[ir.Value]
) -> list[ir.Value]:
    """Emit what a body computes, for all examples at once.

    Arguments:
        op: builder of the graph around the body.
        body: the computation for one example; its nodes are gone afterwards.
        lanes: the body's inputs -> the values of all examples, [examples, ...].
        results: values of the body.
    """
    first = next(iter(lanes.values()))
    sweep = Sweep(op, str(dims(first)[0]), op.Shape(first, start=0, end=1), batched=lanes)
    body.outputs.extend(results)  # or the sweep would take those that no node reads for unused
    sweep.run(body)
    body.outputs.clear()
    found = [
        sweep.value(result) if result in sweep.batched else sweep.repeat(sweep.value(result)) for result in results
    ]
    for node in body.all_nodes():  # else they would count as readers of the values outside
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
    body.remove(list(body))
    return found


def fit_lanes(body: ir.Graph, gradients: Sequence[ir.Value]) -> bool:
    """Whether lanes are the faster way for a body of one example with these gradients.

    A loop in the body would be one over small operators either way, and gradients that have to be stored for each
    example cost memory and the time to write it.
    """
    if any(bodies(node) for node in body):
        return False
    stored = [g for g in gradients if not _is_outer(g)]
    return sum(int(np.prod(fixed_sizes(dims(g)))) for g in stored) <= MAX_ELEMENTS


def _is_outer(gradient: ir.Value) -> bool:
    """Whether the gradient of one example is the product of a column and a row."""
    node = _uncast(gradient).producer()
    if node is None or node.op_type not in ("MatMul", "Gemm") or len(dims(gradient)) != 2:
        return False
    first = node.inputs[0]
    flipped = "transA" in node.attributes and node.attributes["transA"].as_int()
    return first is not None and dims(first)[0 if flipped else 1] == 1


def _uncast(value: ir.Value) -> ir.Value:
    """The value before its types were changed, as mixed precision does with products."""
    while (node := value.producer()) is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        value = node.inputs[0]
    return value
