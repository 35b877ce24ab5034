"""Means over spatial axes."""

from __future__ import annotations

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.passes.replacement import take_over
from archipel.graph.shapes import constant_array, dims, is_float


class UseGlobalAverage(LevelPass):
    """ReduceMean over all spatial axes becomes GlobalAveragePool.

    ONNX Runtime computes GlobalAveragePool in the blocked layout of the convolutions before it, and in integers where
    its surroundings are quantized. `benchmarks/predict_passes.py --without` prints what that saves.
    """

    def change_level(self, op: Builder) -> bool:
        modified = False
        for node in list(op.graph):
            if node.domain != "" or node.op_type != "ReduceMean" or node.inputs[0] is None:
                continue
            source, output = node.inputs[0], node.outputs[0]
            axes = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
            if axes is None or source.shape is None or len(source.shape) != 4 or not is_float(source):
                continue
            # All spatial axes of [batch, channels, height, width], and no other.
            if sorted(int(axis) % 4 for axis in axes.reshape(-1)) != [2, 3]:
                continue
            with op.after(node):
                mean = op.GlobalAveragePool(source)
                if not node.attributes.get_int("keepdims", 1):
                    mean = op.Flatten(mean) if isinstance(dims(source)[1], int) else op.Squeeze(mean, [2, 3])
            take_over(op, output, mean)
            op.graph.remove(node, safe=True)
            modified = True
        return modified


use_global_average = UseGlobalAverage()
