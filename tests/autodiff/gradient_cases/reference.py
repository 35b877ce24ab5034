"""onnx.reference in float64, with PyTorch behind the operators that it cannot run in every legal form.

Its ConvTranspose fails with groups, its MaxPool with windows that lie in the padding, its GatherElements with fewer
indices than data.
"""

from __future__ import annotations

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
    return ReferenceEvaluator(model, new_ops=[ConvTranspose, MaxPool, GatherElements])


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
