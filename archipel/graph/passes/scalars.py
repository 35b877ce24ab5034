"""Scalar operands beside tensors whose last axis may have size 1."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.shapes import constant_array, dims

_PAIRWISE = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"})


class LiftScalars(LevelPass):
    """Give a scalar the rank of the other operand, if that one's last axis has size 1 or a size known at run time only.

    Beside a scalar of rank 0 ONNX Runtime loops along the last axis of such a tensor, one element at a time
    (`benchmarks/traps.py` prints what that costs).
    """

    def change_level(self, op: Builder) -> bool:
        lifted: dict[tuple[ir.Value, int], ir.Value] = {}
        for node in list(op.graph):
            if node.domain != "" or node.op_type not in _PAIRWISE:
                continue
            for index, (value, other) in enumerate(zip(node.inputs, reversed(node.inputs))):
                if value is None or other is None or value.shape is None or other.shape is None:
                    continue
                rank, last = len(dims(other)), dims(other)[-1:]
                if rank < 2 or (isinstance(last[0], int) and last[0] != 1):
                    continue
                if set(dims(value)) - {1} or len(dims(value)) >= rank:
                    continue
                if (value, rank) not in lifted:
                    with op.before(node):
                        lifted[value, rank] = _lift(op, value, rank)
                node.replace_input_with(index, lifted[value, rank])
        return bool(lifted)


lift_scalars = LiftScalars()


def _lift(op: Builder, value: ir.Value, rank: int) -> ir.Value:
    content = constant_array(value)
    if content is not None:
        return op.constant(np.reshape(content, [1] * rank))
    return op.Reshape(value, [1] * rank)
