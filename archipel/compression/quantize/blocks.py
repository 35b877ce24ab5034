"""Rounding of stored weights: one scale for each row of a matrix, or for each block of a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.compression.quantize.weight_search import best_shares
from archipel.graph import Builder
from archipel.graph.shapes import dims

DTYPES = {8: ir.DataType.INT8, 4: ir.DataType.INT4}


@dataclass(frozen=True)
class Grid:
    """A weight seen as a matrix of `shape`, with one scale for each block of `block` elements along `axis`, 0 or 1.

    With `block` 0 there is one scale for each index of `axis`, over all of the other axis.
    """

    shape: tuple[int, int]
    axis: int
    block: int

    @classmethod
    def of(cls, sizes: tuple[int, ...], inputs: int, outputs: int, block: int | None) -> Grid:
        """The grid of a weight with these sizes: layers sum over its axis `inputs`; `outputs` has the output channels.

        All axes but the first count as one: a convolution's block runs over its input channels and its window, an
        embedding's over the row of one entry.
        """
        rows = int(np.prod(sizes[:-1])) if outputs == len(sizes) - 1 else sizes[0]
        if len(sizes) == 3 and outputs == 1:  # recurrent weights: a matrix for each direction
            rows = sizes[0] * sizes[1]
        shape = (rows, int(np.prod(sizes)) // rows)
        # [inputs, outputs] (MatMul) is summed over axis 0; in other layouts a row makes one output.
        along = 0 if outputs == len(sizes) - 1 and inputs < outputs else 1
        # One block for all of a channel is one scale for each channel.
        if block is None or block >= shape[along]:
            return cls(shape, 1 - along, 0)
        return cls(shape, along, block)

    def blocks(self, matrix: np.ndarray) -> np.ndarray:
        """The elements of each scale, [scales, elements], row by row (with `axis` 0: column by column).

        Zeros fill the last block of each.
        """
        if not self.block:
            return matrix if self.axis == 0 else matrix.T
        rows = matrix if self.axis == 1 else matrix.T
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % self.block)))
        return padded.reshape(-1, self.block)

    def scale_shape(self) -> tuple[int, ...]:
        if not self.block:
            return (self.shape[self.axis],)
        count = -(-self.shape[self.axis] // self.block)
        return (self.shape[0], count) if self.axis == 1 else (count, self.shape[1])

    def shares(self, matrix: np.ndarray, levels: int) -> np.ndarray:
        """The factor of each scale with the least squared error (`best_shares`), in the shape of the scales."""
        shares = best_shares(self.blocks(matrix), levels)
        if self.block and self.axis == 0:
            # `blocks` went down the columns: [columns, blocks].
            return shares.reshape(self.scale_shape()[::-1]).T
        return shares.reshape(self.scale_shape())

    def spread(self, scale: np.ndarray) -> np.ndarray:
        """The scale of every element, in the matrix's shape."""
        if not self.block:
            return np.broadcast_to(scale[:, None] if self.axis == 0 else scale[None, :], self.shape)
        # The last block may be shorter than the others.
        return np.repeat(scale, self.block, axis=self.axis).take(range(self.shape[self.axis]), axis=self.axis)


def round_weight(
    op: Builder, weight: ir.Value, grid: Grid, bits: int, shares: np.ndarray | None, name: str
) -> ir.Value:
    """Write the rounding of a weight into the graph. Returns the rounded weight, in the shape of the weight."""
    sizes = dims(weight)
    matrix = weight if sizes == grid.shape else op.Reshape(weight, list(grid.shape))
    scale = _scale(op, matrix, grid, 2 ** (bits - 1) - 1)
    if shares is not None:
        scale = op.Mul(scale, op.initializer(f"{name}.weight_ratio", shares.astype(np.float32)))
    block = grid.block or None
    integers = op.QuantizeLinear(matrix, scale, axis=grid.axis, block_size=block, output_dtype=int(DTYPES[bits]))
    result = op.DequantizeLinear(integers, scale, axis=grid.axis, block_size=block)
    result.shape = ir.Shape(grid.shape)
    if sizes != grid.shape:
        result = op.Reshape(result, [int(d) for d in sizes if isinstance(d, int)])
    return result


def _scale(op: Builder, matrix: ir.Value, grid: Grid, levels: int) -> ir.Value:
    magnitude = op.Abs(matrix)
    if grid.block:
        count = grid.scale_shape()[grid.axis]
        missing = count * grid.block - grid.shape[grid.axis]
        if missing:
            # Zeros up to a whole block do not change its maximum.
            magnitude = op.Pad(magnitude, [0, 0, missing, 0] if grid.axis == 0 else [0, 0, 0, missing])
        shape = [count, grid.block, grid.shape[1]] if grid.axis == 0 else [grid.shape[0], count, grid.block]
        largest = op.ReduceMax(op.Reshape(magnitude, shape), np.array([grid.axis + 1]), keepdims=0)
    else:
        largest = op.ReduceMax(magnitude, np.array([1 - grid.axis]), keepdims=0)
    # A block of zeros would get the scale 0, and divide by it; any positive scale rounds it to zeros.
    return op.Where(op.Greater(largest, 0.0), op.Div(largest, float(levels)), np.array(1.0, np.float32))
