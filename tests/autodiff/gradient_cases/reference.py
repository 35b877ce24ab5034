"""onnx.reference in float64, with PyTorch behind the operators that it cannot run in every legal form.

Its ConvTranspose fails with groups, its MaxPool with windows that lie in the padding, its GatherElements with fewer
indices than data, its Pad with negative pads, and its
Slice takes nothing where a start before the first element means the first, going backwards.
Its Erf (so its
Gelu too) rounds to float32, its Softsign fails with scalars, its Mean with broadcasting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch.nn import functional as F

TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def evaluator(model: onnx.ModelProto | bytes) -> ReferenceEvaluator:
    return ReferenceEvaluator(
        model,
        new_ops=[*POINTWISE, ConvTranspose, MaxPool, GatherElements, Pad, Slice, GroupNormalization, LpNormalization],
    )


class ConvTranspose(OpRun):
    op_domain = ""

    def _run(self, x: Any, w: Any, b: Any = None, **given: Any) -> tuple[np.ndarray]:
        n = x.ndim - 2
        strides, dilations = given.get("strides") or [1] * n, given.get("dilations") or [1] * n
        pads, extra = given.get("pads") or [0] * (2 * n), given.get("output_padding") or [0] * n
        full = TRANSPOSED[n](
            torch.tensor(x),
            torch.tensor(w),
            None if b is None else torch.tensor(b),
            stride=strides,
            dilation=dilations,
            groups=given.get("group") or 1,
        ).numpy()
        full = np.pad(full, [(0, 0), (0, 0), *((0, e) for e in extra)])
        inner = tuple(slice(pads[i], full.shape[i + 2] - pads[i + n]) for i in range(n))
        return (full[(slice(None), slice(None), *inner)],)


class MaxPool(OpRun):
    op_domain = ""

    def _run(self, x: Any, **given: Any) -> tuple[np.ndarray, ...]:
        kernel = list(given["kernel_shape"])
        n = len(kernel)
        strides, dilations = list(given.get("strides") or [1] * n), list(given.get("dilations") or [1] * n)
        pads, mode = list(given.get("pads") or [0] * (2 * n)), given.get("auto_pad") or "NOTSET"
        value = torch.tensor(x)
        if mode.startswith("SAME"):
            totals = [
                max((-(-s // t) - 1) * t + d * (k - 1) + 1 - s, 0)
                for s, t, k, d in zip(x.shape[2:], strides, kernel, dilations)
            ]
            small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
            before, after = (small, large) if mode == "SAME_UPPER" else (large, small)
            around = [p for i in reversed(range(n)) for p in (before[i], after[i])]
            value, pads = F.pad(value, around, value=-float("inf")), [0] * (2 * n)
        y = POOL[n](value, kernel, strides, pads[:n], dilations, ceil_mode=bool(given.get("ceil_mode")))
        # Nothing here reads the indices.
        return (y.numpy(), np.zeros(y.shape, np.int64))[: len(self.onnx_node.output)]


class GatherElements(OpRun):
    op_domain = ""

    def _run(self, data: Any, indices: Any, axis: int | None = None) -> tuple[np.ndarray]:
        axis = axis or 0
        positive = np.where(indices < 0, indices + data.shape[axis], indices).astype(np.int64)
        return (torch.gather(torch.tensor(data), axis, torch.tensor(positive)).numpy(),)


class Pad(OpRun):
    op_domain = ""

    def _run(self, x: Any, pads: Any, value: Any = None, axes: Any = None, mode: Any = None) -> tuple[np.ndarray]:
        axes = range(x.ndim) if axes is None else [int(axis) % x.ndim for axis in axes]
        width = [(0, 0)] * x.ndim
        for axis, before, after in zip(axes, pads, pads[len(axes) :]):
            width[axis] = (int(before), int(after))
        # What is cut off is no part of what is repeated.
        kept = x[tuple(slice(max(-b, 0), size - max(-a, 0)) for size, (b, a) in zip(x.shape, width))]
        extra = [(max(b, 0), max(a, 0)) for b, a in width]
        if mode not in (None, "constant"):
            return (np.pad(kept, extra, mode),)
        return (np.pad(kept, extra, constant_values=0 if value is None else np.asarray(value).item()),)


class Slice(OpRun):
    op_domain = ""

    def _run(self, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> tuple[np.ndarray]:
        for i, axis in enumerate(range(len(starts)) if axes is None else axes):
            step = 1 if steps is None else int(steps[i])
            x = np.take(x, sliced(x.shape[axis], int(starts[i]), int(ends[i]), step), axis)
        return (x,)


def sliced(size: int, start: int, end: int, step: int) -> list[int]:
    """The positions that Slice-13 takes of an axis of this size, with its clamping."""
    start, end = (bound + size if bound < 0 else bound for bound in (start, end))
    if step > 0:
        return list(range(min(max(start, 0), size), min(max(end, 0), size), step))
    return list(range(min(max(start, 0), size - 1), min(max(end, -1), size - 1), step))


def pointwise(op_type: str, function: Callable[..., torch.Tensor]) -> type[OpRun]:
    def run(self: OpRun, *inputs: Any, **given: Any) -> tuple[np.ndarray]:
        return (function(*map(torch.tensor, inputs), **given).numpy(),)

    return type(op_type, (OpRun,), {"op_domain": "", "_run": run})


POINTWISE = [
    pointwise("Erf", torch.erf),
    pointwise("Gelu", lambda x, approximate="none": F.gelu(x, approximate=approximate or "none")),
    pointwise("Softsign", F.softsign),
    pointwise("Mean", lambda *inputs: sum(inputs) / len(inputs)),
]


class GroupNormalization(OpRun):
    op_domain = ""

    def _run(
        self, x: Any, scale: Any, bias: Any, epsilon: Any = None, num_groups: Any = None, stash_type: Any = None
    ) -> tuple[np.ndarray]:
        tensors = [torch.tensor(value) for value in (x, scale, bias)]
        return (F.group_norm(tensors[0], num_groups, *tensors[1:], eps=epsilon).numpy(),)


class LpNormalization(OpRun):
    op_domain = ""

    def _run(self, x: Any, axis: int | None = None, p: int | None = None) -> tuple[np.ndarray]:
        return (F.normalize(torch.tensor(x), p=p, dim=axis, eps=1e-300).numpy(),)
