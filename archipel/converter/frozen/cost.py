"""What it costs for each example to keep a result, or to compute it in every step.

The unit is one FLOP. An operator that multiplies no matrices costs one unit for each byte of its largest operand or
result, since its time goes into moving them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import DType
from archipel.converter.frozen.computations import Frozen, Result
from archipel.graph.flops import einsum_products
from archipel.graph.shapes import constant_array, dims, dtype_of, is_static

KEPT_BYTE = 8
"""Units for each kept byte: the cost of reading it back from memory, or from the file behind it."""


def kept_bytes(frozen: Frozen, result: Result) -> int | None:
    """Bytes of an example; None for what is no feature: batch not first, examples of different sizes, odd types."""
    value = frozen.value(result)
    if frozen.is_computed(result):  # an example as it comes is stored whatever its shape and type are
        alike = frozen.rows[result] == (0, 1) and is_static(dims(value)[1:])
        if not alike or dtype_of(value).numpy().name not in get_args(DType):
            return None
    return row_bytes(value)


def row_bytes(value: ir.Value) -> int:
    """Bytes of an example; a free size, such as the batch, counts as 1."""
    return math.ceil(_size(dims(value)) * dtype_of(value).itemsize)


def step_cost(frozen: Frozen, number: int) -> int:
    """Units for computation `number`, and at least 1, so that of equal cuts the latest is the cheapest."""
    node, _, inputs = frozen.computations[number]
    if node is None:
        return 0
    count = _products(node)
    if count:
        return 2 * count
    read = [result for result in inputs if result in frozen.rows]
    return max(1, *(row_bytes(frozen.value(result)) for result in (*read, Result(number, 0)) if result is not None))


def _products(node: ir.Node) -> int:
    """Multiplications for an example, without those by the zeros of a fixed kernel, such as one that cuts out patches.

    `_size` counts a free size as 1, so sizes that include the batch give the number for one example.
    """
    shapes = [() if value is None else dims(value) for value in node.inputs]
    out = dims(node.outputs[0])
    if node.op_type in ("Conv", "ConvTranspose"):
        kernel = constant_array(node.inputs[1])
        size = _size(shapes[1]) if kernel is None else int(np.count_nonzero(kernel))
        # The whole kernel meets each spatial position: of the result, or for ConvTranspose of the input.
        return size * _size((out if node.op_type == "Conv" else shapes[0])[2:])
    if node.op_type == "Gemm":
        return _size(out) * _size(shapes[0][0 if node.attributes.get_int("transA", 0) else 1 :][:1])
    if node.op_type == "MatMul":
        return _size(out) * _size(shapes[0][-1:])
    if node.op_type == "Einsum":
        return einsum_products(node, _shape)
    if node.op_type in ("LSTM", "GRU", "RNN"):
        # In each time step all weights, those of the input and those of the state.
        return _size(shapes[0][:1]) * (_size(shapes[1]) + _size(shapes[2]))
    return 0


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    return () if value is None else tuple(d if isinstance(d, int) else 1 for d in dims(value))


def _size(shape: Sequence[int | str | None]) -> int:
    return math.prod(d for d in shape if isinstance(d, int))
