"""onnx.reference in float64, with PyTorch behind the operators that it cannot run in every legal form.

Its ConvTranspose fails with groups, its MaxPool with windows that lie in the padding, its AveragePool
counts what lies behind the input with ceil_mode, its GlobalMaxPool forgets an axis, its
Resize takes sizes that are no whole numbers for the output's, its GatherElements with fewer
indices than data, its Pad with negative pads, and its
Slice takes nothing where a start before the first element means the first, going backwards.
Its Erf and with it Gelu round to float32, its Softsign and ReduceLogSumExp fail with scalars, its Mean with
broadcasting, and its NegativeLogLikelihoodLoss counts labels of -1 that are to be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from gradient_cases.loop_reference import LOOPS
from gradient_cases.recurrent_reference import RECURRENT
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_resize import Resize as Resampling
from torch.nn import functional as F

TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def evaluator(model: onnx.ModelProto | bytes) -> ReferenceEvaluator:
    return ReferenceEvaluator(
        model,
        new_ops=[
            *BY_TORCH,
            *RECURRENT,
            *LOOPS,
            ReduceLogSumExp,
            ConvTranspose,
            MaxPool,
            AveragePool,
            GlobalMaxPool,
            Resize,
            GatherElements,
            Pad,
            Slice,
            GroupNormalization,
            LpNormalization,
        ],
    )


class ConvTranspose(OpRun):
    op_domain = ""

    def _run(self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, **given: Any) -> tuple[np.ndarray]:
        n = x.ndim - 2
        full = TRANSPOSED[n](
            torch.tensor(x),
            torch.tensor(w),
            stride=given.get("strides") or [1] * n,
            dilation=given.get("dilations") or [1] * n,
            groups=given.get("group") or 1,
        )
        before, after = transposed_padding(list(x.shape[2:]), list(w.shape[2:]), given)
        y = F.pad(full, around([-p for p in before], [-p for p in after])).numpy()
        return (y if b is None else y + b.reshape(-1, *[1] * n),)


def transposed_padding(spatial: list[int], kernel: list[int], given: dict[str, Any]) -> tuple[list[int], list[int]]:
    """What ConvTranspose-11 cuts off before and after what the input reaches; less than 0 where it adds zeros."""
    n = len(spatial)
    strides, dilations = given.get("strides") or [1] * n, given.get("dilations") or [1] * n
    extra, mode = given.get("output_padding") or [0] * n, given.get("auto_pad") or "NOTSET"
    full = [s * (z - 1) + d * (k - 1) + 1 + e for s, z, d, k, e in zip(strides, spatial, dilations, kernel, extra)]
    size = given.get("output_shape") or ([s * z for s, z in zip(strides, spatial)] if mode.startswith("SAME") else None)
    if size:
        totals = [max(f - y, 0) for f, y in zip(full, size)]
        small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
        before = small if mode == "SAME_UPPER" else large
        after = [f - y - b for f, y, b in zip(full, size, before)]
    else:
        pads = (given.get("pads") if mode == "NOTSET" else None) or [0] * (2 * n)
        before, after = list(pads[:n]), list(pads[n:])
    return before, [a - e for a, e in zip(after, extra)]


class MaxPool(OpRun):
    op_domain = ""

    def _run(self, x: np.ndarray, **given: Any) -> tuple[np.ndarray, ...]:
        kernel, strides, dilations, before, after = sliding(x, given)
        n = len(kernel)
        value = F.pad(torch.tensor(x), around(before, after), value=-float("inf"))
        y = POOL[n](value, kernel, strides, 0, dilations, ceil_mode=bool(given.get("ceil_mode")))
        # PyTorch knows nothing of the padding, so it keeps windows that start in it.
        starts = (slice(-(-(z + b) // s)) for z, b, s in zip(x.shape[2:], before, strides))
        y = y[(..., *starts)]
        # Nothing here reads the indices.
        return (y.numpy(), np.zeros(y.shape, np.int64))[: len(self.onnx_node.output)]


class AveragePool(OpRun):
    op_domain = ""

    def _run(self, x: np.ndarray, **given: Any) -> tuple[np.ndarray]:
        kernel, strides, dilations, before, after = sliding(x, given)
        n = len(kernel)
        extra = [s - 1 if given.get("ceil_mode") else 0 for s in strides]
        value = torch.tensor(x).reshape(-1, 1, *x.shape[2:])
        counted = F.pad(torch.ones_like(value), around(before, after), value=float(given.get("count_include_pad") or 0))
        ones = torch.ones(1, 1, *kernel, dtype=value.dtype)
        total, count = (
            CONV[n](F.pad(padded, around([0] * n, extra)), ones, stride=strides, dilation=dilations)
            for padded in (F.pad(value, around(before, after)), counted)
        )
        starts = (slice(-(-(z + b) // s)) for z, b, s in zip(x.shape[2:], before, strides))
        y = (total / count.clamp(min=1))[(..., *starts)]
        return (y.reshape(*x.shape[:2], *y.shape[2:]).numpy(),)


class GlobalMaxPool(OpRun):
    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class Resize(Resampling):
    """As ONNX Runtime does it, from its outputs for each unit vector: exact, whatever the input's type."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        roi: np.ndarray | None = None,
        scales: np.ndarray | None = None,
        sizes: np.ndarray | None = None,
        **given: Any,
    ) -> tuple[np.ndarray]:
        plain = given["mode"] == "nearest" and given["coordinate_transformation_mode"] == "asymmetric"
        if plain and given["nearest_mode"] == "floor" and not given.get("axes"):
            return super()._run(x, roi, scales, sizes, **given)
        fixed = tuple(None if v is None else tuple(np.asarray(v).tolist()) for v in (roi, scales, sizes))
        offset, columns = resampled(x.shape, fixed, self.onnx_node.SerializeToString())
        return (offset + np.tensordot(x.reshape(-1), columns, 1),)


@lru_cache(maxsize=8)
def resampled(shape: tuple[int, ...], fixed: tuple[Any, ...], serialized: bytes) -> tuple[np.ndarray, np.ndarray]:
    node = onnx.NodeProto.FromString(serialized)
    names = ["x", "roi", "scales", "sizes"]
    given = [(name, v) for name, v in zip(names[1:], fixed) if v]
    used = [name if name == "x" or name in dict(given) else "" for name in names]
    del node.input[:], node.output[:]
    node.input.extend(used)
    node.output.append("y")
    kinds = {"roi": np.float32, "scales": np.float32, "sizes": np.int64}
    graph = onnx.helper.make_graph(
        [node],
        "resize",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.array(v, kinds[name]), name) for name, v in given],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    units = np.eye(int(np.prod(shape)), dtype=np.float32).reshape(-1, *shape)
    offset = session.run(None, {"x": np.zeros(shape, np.float32)})[0].astype(np.float64)
    return offset, np.stack([session.run(None, {"x": unit})[0] - offset for unit in units])


def sliding(x: np.ndarray, given: dict[str, Any]) -> tuple[list[int], ...]:
    """Kernel, strides, dilations, and padding before and after, of a pooling operator."""
    kernel = list(given["kernel_shape"])
    n = len(kernel)
    strides, dilations = list(given.get("strides") or [1] * n), list(given.get("dilations") or [1] * n)
    mode = given.get("auto_pad") or "NOTSET"
    if mode.startswith("SAME"):
        totals = [
            max((-(-z // s) - 1) * s + d * (k - 1) + 1 - z, 0)
            for z, s, k, d in zip(x.shape[2:], strides, kernel, dilations)
        ]
        small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
        return kernel, strides, dilations, *((small, large) if mode == "SAME_UPPER" else (large, small))
    pads = (given.get("pads") if mode == "NOTSET" else None) or [0] * (2 * n)
    return kernel, strides, dilations, list(pads[:n]), list(pads[n:])


def around(before: list[int], after: list[int]) -> list[int]:
    """Padding in the order that PyTorch takes it."""
    return [p for pair in reversed(list(zip(before, after))) for p in pair]


class GatherElements(OpRun):
    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int | None = None) -> tuple[np.ndarray]:
        axis = axis or 0
        positive = np.where(indices < 0, indices + data.shape[axis], indices).astype(np.int64)
        return (torch.gather(torch.tensor(data), axis, torch.tensor(positive)).numpy(),)


class Pad(OpRun):
    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        pads: np.ndarray,
        value: np.ndarray | None = None,
        axes: Sequence[int] | np.ndarray | None = None,
        mode: Any | None = None,
    ) -> tuple[np.ndarray]:
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

    def _run(
        self,
        x: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        axes: np.ndarray | None = None,
        steps: np.ndarray | None = None,
    ) -> tuple[np.ndarray]:
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


class ReduceLogSumExp(OpRun):
    op_domain = ""

    def _run(
        self, x: Any, axes: np.ndarray | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> tuple[np.ndarray]:
        over = [int(axis) for axis in ([] if axes is None else axes)]
        if not over and not noop_with_empty_axes:
            over = list(range(x.ndim))
        return (np.logaddexp.reduce(x, axis=tuple(over), keepdims=bool(keepdims)) if over else x,)


def by_torch(op_type: str, function: Callable[..., torch.Tensor]) -> type[OpRun]:
    def run(self: OpRun, *inputs: np.ndarray, **given: Any) -> tuple[np.ndarray]:
        return (function(*map(torch.tensor, inputs), **given).numpy(),)

    return type(op_type, (OpRun,), {"op_domain": "", "_run": run})


def label_loss(
    x: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str | None = None,
    ignore_index: int | None = None,
) -> torch.Tensor:
    ignored = -100 if ignore_index is None else ignore_index
    return F.nll_loss(x, labels.long(), weight, ignore_index=ignored, reduction=reduction or "mean")


BY_TORCH = [
    by_torch("Erf", torch.erf),
    by_torch("Gelu", lambda x, approximate="none": F.gelu(x, approximate=approximate or "none")),
    by_torch("Softsign", F.softsign),
    by_torch("Mean", lambda *inputs: sum(inputs) / len(inputs)),
    by_torch("NegativeLogLikelihoodLoss", label_loss),
]


class GroupNormalization(OpRun):
    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        bias: np.ndarray,
        epsilon: Any = None,
        num_groups: Any = None,
        stash_type: int | None = None,
    ) -> tuple[np.ndarray]:
        tensors = [torch.tensor(value) for value in (x, scale, bias)]
        return (F.group_norm(tensors[0], num_groups, *tensors[1:], eps=epsilon).numpy(),)


class LpNormalization(OpRun):
    op_domain = ""

    def _run(self, x: np.ndarray, axis: int | None = None, p: int | None = None) -> tuple[np.ndarray]:
        return (F.normalize(torch.tensor(x), p=p, dim=axis, eps=1e-300).numpy(),)
