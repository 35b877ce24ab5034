"""The ways to split a layer in two: which matrix is factored, and the cost of each unit of rank.

In each way the first new layer reads the rows of a matrix [rows, columns], and the second one writes its columns; a
product of rank r is a pair of layers with r channels between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.compression.layer_weights import LayerWeight
from archipel.graph.build import Attribute
from archipel.graph.shapes import dims


@dataclass(frozen=True)
class Window:
    """A convolution's window over its spatial axes; `pads`: before each axis, then behind each; None: `auto_pad`."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...] | None
    auto_pad: str

    def along(self, axes: tuple[int, ...]) -> Window:
        """The same along some axes, and a window of 1 along the others."""
        count = len(self.kernel)

        def pick(values: tuple[int, ...], other: int) -> tuple[int, ...]:
            return tuple(value if i % count in axes else other for i, value in enumerate(values))

        pads = None if self.pads is None else pick(self.pads, 0)
        return Window(pick(self.kernel, 1), pick(self.strides, 1), pick(self.dilations, 1), pads, self.auto_pad)

    def attributes(self) -> dict[str, Attribute]:
        attributes: dict[str, Attribute] = {
            "kernel_shape": self.kernel, "strides": self.strides, "dilations": self.dilations, "pads": self.pads
        }  # fmt: skip
        return attributes if self.pads is not None else {**attributes, "auto_pad": self.auto_pad}


@dataclass(frozen=True)
class Split:
    """One way to split a layer in two. `flops` and `elements` are for each unit of rank.

    `windows` are those of the two convolutions; None: two matrix products.
    """

    kind: str
    matrix: np.ndarray
    flops: float
    windows: tuple[Window, Window] | None = None

    @property
    def elements(self) -> int:
        return sum(self.matrix.shape)


def layer_splits(weight: LayerWeight, flops: int) -> tuple[list[Split], str]:
    """The splits of the layer that reads `weight` and costs `flops`; without any, the reason."""
    node, slot = weight.readers[0].node, weight.readers[0].slot
    if len(weight.readers) > 1 or not weight.alone:
        return [], "several operators read the weight"
    if node.op_type == "Conv" and slot == 1:
        if node.attributes.get_int("group", 1) != 1:
            return [], "the convolution is grouped"
        kernel = weight.readers[0].rearrange(weight.content)
        if kernel is None:
            return [], "the weight is computed"
        return list(_convolution(kernel.astype(np.float64), node, flops)), ""
    matrix = _matrix(weight)
    if matrix is None:
        return [], f"{node.op_type} with the weight as input {slot}, of shape {list(weight.kept.shape)}, is not split"
    return [Split("product", matrix, flops * sum(matrix.shape) / max(matrix.size, 1))], ""


def is_transposed(weight: LayerWeight) -> bool:
    """Whether a Gemm or MatMul multiplies with the transpose of the parameter."""
    return weight.kept.ndim == 2 and weight.readers[0].axis == 1


def window(node: ir.Node, kernel: tuple[int, ...]) -> Window:
    """The window of a Conv whose weight has this `kernel`."""
    count, attributes = len(kernel), node.attributes
    auto = attributes.get_string("auto_pad", "NOTSET")
    pads = tuple(attributes.get_ints("pads") or (0,) * (2 * count)) if auto == "NOTSET" else None
    strides = tuple(attributes.get_ints("strides") or (1,) * count)
    return Window(kernel, strides, tuple(attributes.get_ints("dilations") or (1,) * count), pads, auto)


def _matrix(weight: LayerWeight) -> np.ndarray | None:
    """[inputs, outputs] of a Gemm or MatMul that has the weight on its right."""
    reader = weight.readers[0]
    node, content = reader.node, reader.rearrange(weight.content)
    if node.op_type not in ("Gemm", "MatMul") or reader.slot != 1 or content is None or content.ndim != 2:
        return None
    if node.op_type == "Gemm" and node.attributes.get_int("transA", 0) != 0:
        return None
    flipped = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
    return (content.T if flipped else content).astype(np.float64)


def _convolution(content: np.ndarray, node: ir.Node, flops: int) -> Iterator[Split]:
    outputs, inputs, *kernel = content.shape
    full_window = window(node, tuple(kernel))
    count = len(kernel)
    per_weight = flops / max(content.size, 1)  # every element of the weight is used once at each place of the output
    rows, columns = inputs * math.prod(kernel), outputs
    point = full_window.along(())
    # First all of the window with few outputs, then a 1 x 1 convolution.
    yield Split("channels", content.reshape(outputs, rows).T, per_weight * (rows + columns), (full_window, point))
    if count != 2 or 1 in kernel:
        return
    for axis in (0, 1):
        other = 1 - axis
        # [inputs, first kernel axis, other kernel axis, outputs].
        moved = content.transpose(1, 2 + axis, 2 + other, 0)
        matrix = moved.reshape(inputs * kernel[axis], kernel[other] * outputs)
        # The first layer strides along `axis` alone, so it runs at more places than the output has.
        wide = _widening(node, full_window, other)
        cost = per_weight * (matrix.shape[0] * wide + matrix.shape[1])
        yield Split(
            ("vertical", "horizontal")[axis], matrix, cost, (full_window.along((axis,)), full_window.along((other,)))
        )


def _widening(node: ir.Node, whole: Window, axis: int) -> float:
    """How many times as many places the first layer has along an axis that only the second one strides over."""
    source, output = node.inputs[0], node.outputs[0]
    if source is not None and source.shape is not None and output.shape is not None:
        before, after = dims(source)[2 + axis], dims(output)[2 + axis]
        if isinstance(before, int) and isinstance(after, int):
            return before / max(after, 1)
    return float(whole.strides[axis])
