"""The gradient of a convolution in its weight: each output gradient times the window that it came from, summed.

The static shape decides which formulation is cheapest on ONNX Runtime's CPU build. `_laid_out` copies all windows into
one matrix (im2col), for kernels with few elements per filter. `_shifted_rows` makes one product per row of the kernel
and copies less where a window has many elements. `_diagonals` multiplies whole lines, for depthwise convolutions
over short ones, and sums diagonals of the products. The limits between them were found by trial on one machine;
`benchmarks/step.py --profile` shows what a network's gradients cost on yours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from archipel.autodiff.rules.windows import LAST, Window, suits_kernels, unfold
from archipel.graph.build import Builder
from archipel.graph.outline import outline
from archipel.graph.shapes import dims, dtype_of, fixed_sizes, static_size

# For windows of at most this many elements one matrix of all windows is cheaper than one product per row of the kernel.
_FEW = 64
# For longer lines than this `_diagonals` computes too many products that lie on no diagonal.
_LINE = 64


def weight_gradient(
    op: Builder, g: ir.Value, x: ir.Value, window: Window, group: int, filters: int, per_group: int
) -> ir.Value:
    """x [batch, group * per_group, *spatial] and the output's gradient g [batch, filters, *output] ->
    [filters, per_group, *kernel]."""

    def body(op: Builder, x: ir.Value, g: ir.Value) -> list[ir.Value]:
        return [_standard(op, g, x, window, group, filters, per_group)]

    # A product of matrices is one already: no kernel beats MatMul.
    if not suits_kernels(x, window) or (_is_product(window) and group == 1):
        return body(op, x, g)[0]
    return outline(op, "ConvGradWeight", [x, g], body, group=group, **window.attributes)[0]


def _is_product(window: Window) -> bool:
    """A kernel of one element at stride 1: the input is its own windows."""
    return window.size == 1 and set(window.strides) == {1} and not any(window.pads)


def _standard(
    op: Builder, g: ir.Value, x: ir.Value, window: Window, group: int, filters: int, per_group: int
) -> ir.Value:
    if _is_product(window):
        return _laid_out(op, g, x, window, group, filters, per_group)
    if per_group == 1 and filters == group and _short_lines(x, g):
        return _diagonals(op, g, x, window, group)
    if _rows_are_shifted(window) and per_group * window.size > _FEW:
        return _shifted_rows(op, g, x, window, group, filters, per_group)
    return _laid_out(op, g, unfold(op, x, window, group * per_group), window, group, filters, per_group)


def _laid_out(
    op: Builder, g: ir.Value, windows: ir.Value, window: Window, group: int, filters: int, per_group: int
) -> ir.Value:
    """From all windows, [batch, group * per_group * window.size, ...].

    One product per example and a sum over the examples; or one product for all, where those per example would have more
    elements than their operands (few positions, many filters).
    """
    rows, positions = per_group * window.size, static_size(dims(g)[2:])
    if group == 1 and positions is not None and positions * (rows + filters) < rows * filters:
        left, right = _channels_first(op, g, filters), _channels_first(op, windows, rows)
        return op.Reshape(op.MatMul(left, op.swap_last(right)), [filters, per_group, *window.kernel])
    return _arrange(op, [_products(op, windows, rows, g, group, filters)], window, group, filters, per_group)


def _products(op: Builder, windows: ir.Value, rows: int, g: ir.Value, group: int, filters: int) -> ir.Value:
    """[group, rows, filters / group]: windows [batch, group * rows, ...] times g, over positions and batch.

    g is transposed, as the smaller of the two in most cases; ONNX Runtime does so while it multiplies.
    """
    positions = _positions(g)
    left = op.Reshape(windows, [0, group, rows, positions])
    right = op.Reshape(g, [0, group, filters // group, positions])
    products = op.MatMul(left, op.swap_last(right))
    return op.Squeeze(products, [0]) if dims(g)[0] == 1 else op.ReduceSum(products, [0], keepdims=0)


def _channels_first(op: Builder, value: ir.Value, channels: int) -> ir.Value:
    """[batch, channels, ...] -> [channels, batch * positions]."""
    turned = op.Transpose(op.Reshape(value, [0, channels, _positions(value)]), perm=[1, 0, 2])
    return op.Reshape(turned, [channels, -1])


def _positions(value: ir.Value) -> int:
    """Size of all axes behind the channels, as a Reshape takes it; -1, which no batch of 0 has, only if not fixed."""
    size = static_size(dims(value)[2:])
    return -1 if size is None else size


def _arrange(
    op: Builder, parts: Sequence[ir.Value], window: Window, group: int, filters: int, per_group: int
) -> ir.Value:
    """The weight's layout from one part per position on the kernel's first axis, or from one part for all positions.

    Each part is [group, per_group * its positions, filters / group]. Joined so that the only transpose left is one of
    matrices: with more axes it takes ten times longer.
    """
    if len(parts) > 1:
        # One line per input channel: the parts' positions follow each other inside it, as in the kernel.
        lines = [op.Reshape(part, [group * per_group, -1]) for part in parts]
        total = op.Concat(*lines, axis=1)
    else:
        total = parts[0]
    matrices = [-1, filters] if group == 1 else [group, -1, filters // group]
    turned = op.swap_last(op.Reshape(total, matrices))
    return op.Reshape(turned, [filters, per_group, *window.kernel])


def _rows_are_shifted(window: Window) -> bool:
    """Whether each kernel row along the first axis reads the input's rows at a fixed shift: stride 1, and padding that
    a shift of the gradient can stand for."""
    inside = max(window.before[0], window.after[0]) < window.extent[0]
    return window.kernel[0] > 1 and window.strides[0] == 1 and inside


def _shifted_rows(
    op: Builder, g: ir.Value, x: ir.Value, window: Window, group: int, filters: int, per_group: int
) -> ir.Value:
    """Unfold all axes but the first, and shift the output's gradient along that one.

    As many multiplications as `_laid_out`, but 1 / kernel[0] of the copies.
    """
    n = len(window.kernel)
    row = Window(
        (1, *window.kernel[1:]),
        window.strides,
        window.dilations,
        (0, *window.before[1:]),
        (0, *window.after[1:]),
    )
    plain = row.size == 1 and set(row.strides) == {1} and not any(row.pads)
    rows = x if plain else unfold(op, x, row, group * per_group)
    # The kernel row at `shift` joins row r of the input with row r + before - shift of g. With
    # reach - pad zeros on each side of g every shift is a slice as long as the input: no row is a special case.
    reach = window.extent[0] - 1
    rest = [0] * (n - 1)
    padded = op.Pad(g, [0, 0, reach - window.before[0], *rest, 0, 0, reach - window.after[0], *rest])
    parts = []
    for shift in range(0, reach + 1, window.dilations[0]):
        moved = op.Slice(padded, [reach - shift], [-shift if shift else LAST], [2])
        parts.append(_products(op, rows, per_group * row.size, moved, group, filters))
    return _arrange(op, parts, window, group, filters, per_group)


def _short_lines(x: ir.Value, g: ir.Value) -> bool:
    sizes = dims(x)[-1], dims(g)[-1]
    return all(isinstance(size, int) and 0 < size <= _LINE for size in sizes)


def _diagonals(op: Builder, g: ir.Value, x: ir.Value, window: Window, channels: int) -> ir.Value:
    """Depthwise, with lines along the last axis. For each position on the kernel's other axes: the product of every
    element of a line of g with every element of the input line that it meets, summed over batch and lines, [channels,
    length of g, length of x]. Each position on the last axis is the sum of one diagonal of that.
    """
    n = len(window.kernel)
    swap = [1, 0, *range(2, n + 2)]
    # The last axis needs no padding: `_diagonal_sums` leaves out what lies outside the line.
    lines = [*window.before[:-1], 0, 0, 0, *window.after[:-1], 0]
    padded = op.Pad(x, [0, 0, *lines]) if any(lines) else x
    source = op.Transpose(padded, perm=swap)
    size, length = fixed_sizes([dims(x)[-1], dims(g)[-1]])
    turned = op.swap_last(op.Reshape(op.Transpose(g, perm=swap), [channels, -1, length]))
    reach = [e - 1 for e in window.extent[:-1]]
    parts = []
    for tap in itertools.product(*map(range, window.kernel[:-1])):
        starts = [t * d for t, d in zip(tap, window.dilations)]
        ends = [-(r - start) if r > start else LAST for r, start in zip(reach, starts)]
        # The lines that this position of the kernel reads: every stride-th from its start on.
        met = source
        if any(reach) or set(window.strides[:-1]) - {1}:
            met = op.Slice(source, starts, ends, list(range(2, n + 1)), list(window.strides[:-1]))
        products = op.MatMul(turned, op.Reshape(met, [channels, -1, size]))
        parts.append(op.Reshape(products, [channels, 1, -1]))
    stacked = op.Concat(*parts, axis=1) if len(parts) > 1 else parts[0]
    total = op.MatMul(stacked, _diagonal_sums(window, size, length).astype(dtype_of(x).numpy()))
    return op.Reshape(total, [channels, 1, *window.kernel])


def _diagonal_sums(window: Window, size: int, length: int) -> np.ndarray:
    """[length * size, kernel's last axis]: 1 where the output element reads the input element at that position."""
    stride, step, before = window.strides[-1], window.dilations[-1], window.before[-1]
    out, place = np.mgrid[:length, :size]
    joined = [(place == out * stride + tap * step - before).reshape(-1) for tap in range(window.kernel[-1])]
    return np.stack(joined, axis=1)
