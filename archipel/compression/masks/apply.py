"""Masks in the graph: layers read `Mul(weight, Cast(mask))`, so that zeros stay zeros while weights train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from archipel.compression.compressed import CompressedModel
from archipel.compression.layer_weights import LayerWeight, find_mask
from archipel.errors import CompressionError
from archipel.graph import Builder
from archipel.graph.parameters import parameter_names, record_parameters
from archipel.graph.shapes import dims, dtype_of

SUFFIX = ".mask"


def write_masks(model: CompressedModel, masks: Mapping[str, np.ndarray]) -> CompressedModel:
    """A copy in which every reader of a parameter sees zeros where its mask, bool of the same shape, is false.

    The parameter itself is set to zero there too. An earlier mask is replaced. The mask is an initializer
    `<parameter>.mask` and no parameter, so training does not move it. Raises CompressionError for a parameter that the
    model does not have, and for a mask of another shape or dtype.
    """
    result = model.copy()
    graph = result.ir.graph
    parameters = parameter_names(result.ir)
    record_parameters(result.ir, parameters)  # without a record a mask could count as a parameter
    op = Builder(graph)
    for name, mask in masks.items():
        value = graph.initializers.get(name)
        if value is None or name not in parameters or value.const_value is None:
            raise CompressionError(f"a mask for {name!r}: the model has no such parameter")
        if mask.dtype != bool or mask.shape != dims(value):
            raise CompressionError(
                f"a mask for {name!r} must be bool{list(dims(value))}, is {mask.dtype}{list(mask.shape)}"
            )
        content = value.const_value.numpy()
        # Gradients of masked weights are zero, but the product alone would leave old numbers in the stored parameter.
        value.const_value = ir.tensor(np.where(mask, content, 0).astype(content.dtype), name=name)
        before = find_mask(value, set(parameters))
        if before is None:
            _insert(op, value, mask)
        else:
            kind = dtype_of(before.stored).numpy()
            before.stored.const_value = ir.tensor(mask.astype(kind), name=before.stored.name)
    return result


def _insert(op: Builder, value: ir.Value, mask: np.ndarray) -> None:
    graph = op.graph
    # Listed before the product is made, which must go on reading the parameter.
    uses = list(value.uses())
    stored = ir.Value(
        name=op.unique(f"{value.name}{SUFFIX}"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(mask.shape)
    )
    stored.const_value = ir.tensor(mask, name=stored.name)
    graph.register_initializer(stored)
    with op.before(graph[0]), op.scope(str(value.name)):
        masked = op.Mul(value, op.Cast(stored, to=int(dtype_of(value))))
    for use in uses:
        use.node.replace_input_with(use.idx, masked)


def sparsity(weights: Sequence[LayerWeight]) -> float:
    """The share of masked elements among all elements of these weights."""
    total = sum(weight.kept.size for weight in weights)
    return 1.0 - sum(int(weight.kept.sum()) for weight in weights) / max(total, 1)
