"""How a weight counts as a matrix of inputs and outputs, by the layers that read it, whatever lies in between."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from archipel.compression.layer_weights import LayerWeight
from archipel.graph.shapes import dims, rank
from archipel.graph.walk import final_readers

LAYERS = ("Gemm", "MatMul", "Conv", "ConvTranspose", "Gather")
# These hand a weight on to its layer, in another layout, type or rounding.
_HANDED_ON = frozenset(
    {"Transpose", "Unsqueeze", "Squeeze", "Slice", "Split", "Concat", "Reshape", "Flatten", "Identity", "Expand"}
    | {"Cast", "QuantizeLinear", "DequantizeLinear"}
)


@dataclass(frozen=True)
class Form:
    """A weight as a matrix [rows, columns], or as a stack of such: some first axes together, then the others.

    With `outputs_first` the rows are the outputs, else the inputs. `lookup`: the rows are what an embedding looks up.
    """

    matrix: tuple[int, ...]
    outputs_first: bool
    lookup: bool = False


def find_form(value: ir.Value, weight: LayerWeight | None) -> Form | None:
    """The form of a parameter, by the first layer that reads it; None where no layer does.

    Conv has [outputs, inputs, ...], ConvTranspose [inputs, outputs, ...]; Gemm by transB; MatMul [inputs, outputs]; a
    Transpose or Reshape in front of the layer moves these axes. `weight` is what `layer_weights` knows of the value.
    """
    if rank(value) < 2:
        return None
    shape = static(value)
    found = None if weight is None else _by_axes(weight, shape)
    if found is not None:
        return found
    ends = final_readers(value, lambda node: node.domain == "" and node.op_type in _HANDED_ON)
    readers = {node.op_type for node, slot in ends if _is_weight(node, slot)}
    matrix = (shape[0], math.prod(shape[1:]))
    if readers - {"Gather"}:
        # The axes are not known, as behind a rounding; PyTorch's layers have the outputs first.
        return Form(matrix, outputs_first=True)
    return Form(matrix, outputs_first=False, lookup=True) if readers else None


def static(value: ir.Value) -> tuple[int, ...]:
    """The shape of a stored tensor."""
    return tuple(int(size) for size in dims(value) if isinstance(size, int))


def _by_axes(weight: LayerWeight, shape: tuple[int, ...]) -> Form | None:
    """By the axes of the first layer that tells inputs from outputs."""
    for reader in weight.readers:
        node, read = reader.node, reader.node.inputs[reader.slot]
        factor = node.op_type in ("Gemm", "MatMul")
        if not (factor or (node.op_type in LAYERS and reader.slot == 1)) or read is None:
            continue
        if factor and len(dims(read)) != 2:
            # A stack of matrices, each with inputs and outputs of its own.
            if reader.path or len(shape) < 3:
                continue
            return Form(shape, outputs_first=reader.outputs == len(shape) - 2)
        if reader.outputs == 0:
            return Form((shape[0], math.prod(shape[1:])), outputs_first=True)
        if reader.outputs == len(shape) - 1:
            return Form((math.prod(shape[:-1]), shape[-1]), outputs_first=False)
        if reader.axis == 0:
            return Form((shape[0], math.prod(shape[1:])), outputs_first=False)
    return None


def _is_weight(node: ir.Node, slot: int) -> bool:
    """Whether a layer has its weight there: one factor of a product, the table of an embedding and not the tokens."""
    if node.domain != "" or node.op_type not in LAYERS:
        return False
    return slot < 2 if node.op_type in ("Gemm", "MatMul") else slot == (0 if node.op_type == "Gather" else 1)
