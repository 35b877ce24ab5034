"""Factor a matrix, and put two layers with the factors in the place of one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.compression.layer_weights import LayerWeight
from archipel.compression.low_rank.splits import Split, Window, is_transposed
from archipel.graph import Builder
from archipel.graph.passes import remove_dead_code

_LEAST_VARIANCE = 1e-6  # of the mean: even directions that calibration never showed must not change freely


@dataclass(frozen=True)
class Factors:
    """The SVD of a split's matrix, or of root^T matrix where moments are known: root root^T = E[x x^T]."""

    left: np.ndarray
    values: np.ndarray
    right: np.ndarray
    root: np.ndarray | None

    @classmethod
    def of(cls, matrix: np.ndarray, moments: np.ndarray | None = None) -> Factors:
        """The SVD of [rows, columns]; `moments` [rows, rows] are E[x x^T] of the inputs x that the matrix multiplies.

        With moments a lower rank has the least error at the layer's output, whereas plain SVD takes all inputs for
        equally large and uncorrelated: SVD-LLM (Wang et al. 2025).
        """
        root = None if moments is None else _root(moments)
        left, values, right = np.linalg.svd(matrix if root is None else root.T @ matrix, full_matrices=False)
        return cls(left, values, right, root)

    @property
    def energy(self) -> np.ndarray:
        """The share of squared singular values that rank 0, 1, 2, ... keeps; 1 for a matrix of zeros."""
        squares = np.concatenate([[0.0], np.cumsum(self.values**2)])
        return squares / squares[-1] if squares[-1] > 0 else np.ones(len(squares))

    def pair(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """[rows, rank] and [rank, columns]; each column of the first has the norm of its row of the second."""
        first = self.left[:, :rank] * self.values[:rank]
        # The SVD is of root^T matrix: undo root^T on the side of the rows.
        if self.root is not None:
            first = np.linalg.solve(self.root.T, first)
        second = self.right[:rank]
        # Rows of `second` have norm 1. Equal norms keep gradients of both layers alike in fine-tuning.
        size = np.linalg.norm(first, axis=0)
        scale = np.where(size > 0, np.sqrt(np.maximum(size, 1e-300)), 1.0)
        return first / scale, second * scale[:, None]


def replace(model: ir.Model, weight: LayerWeight, split: Split, rank: int, factors: Factors) -> tuple[str, str]:
    """Put two layers in the place of the layer that reads `weight`. Returns the names of the new parameters.

    These have the layout of the old one. The second layer has its bias, and its output the old name. Changes `model`.
    """
    node = weight.readers[0].node
    op = Builder(model.graph, scope=node.name or weight.name)
    dtype = weight.content.dtype
    left, right = (matrix.astype(dtype) for matrix in factors.pair(rank))
    bias = node.inputs[2] if node.op_type in ("Conv", "Gemm") and len(node.inputs) > 2 else None
    with op.before(node):
        if split.windows is not None:
            tensors = _kernels(split.windows, left, right)
            first, second = (op.initializer(f"{weight.name}.{n}", t) for n, t in zip(("left", "right"), tensors))
            inner = op.Conv(node.inputs[0], first, **split.windows[0].attributes())
            result = op.Conv(inner, second, bias, **split.windows[1].attributes())
        else:
            flipped = is_transposed(weight)
            tensors = (left.T, right.T) if flipped else (left, right)
            first, second = (op.initializer(f"{weight.name}.{n}", t) for n, t in zip(("left", "right"), tensors))
            if node.op_type == "Gemm":
                # alpha and beta once, in the second layer.
                inner = op.Gemm(node.inputs[0], first, transB=int(flipped))
                scales = {name: node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")}
                result = op.Gemm(inner, second, bias, transB=int(flipped), **scales)
            else:
                factors_of = (op.swap_last(first), op.swap_last(second)) if flipped else (first, second)
                result = op.MatMul(op.MatMul(node.inputs[0], factors_of[0]), factors_of[1])
    output = node.outputs[0]
    result.shape = output.shape
    name, output.name = output.name, op.unique(f"{output.name}/whole")
    result.name = name
    output.replace_all_uses_with(result, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    remove_dead_code(model)
    return str(first.name), str(second.name)


def _kernels(windows: tuple[Window, Window], left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rank = left.shape[1]
    # Rows of the matrix are [inputs, first kernel], columns [second kernel, outputs] (`splits`).
    first = left.T.reshape(rank, -1, *windows[0].kernel)
    outputs = right.shape[1] // math.prod(windows[1].kernel)
    second = right.reshape(rank, -1, outputs).transpose(2, 0, 1).reshape(outputs, rank, *windows[1].kernel)
    return first, second


def _root(moments: np.ndarray) -> np.ndarray:
    """The symmetric square root, well-conditioned, so that `pair` can solve with it."""
    values, vectors = np.linalg.eigh((moments + moments.T) / 2)
    floor = _LEAST_VARIANCE * max(float(np.mean(values)), 1e-30)
    root: np.ndarray = (vectors * np.sqrt(np.maximum(values, floor))) @ vectors.T
    return root
