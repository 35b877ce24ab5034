"""Resize: PyTorch's own interpolation where it has the same weights, else a matrix for each axis."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from archipel.autodiff.rules.interpolation import Interpolation
from archipel.errors import TrainingError
from archipel.graph.shapes import Dim, dims
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering

# PyTorch's modes for each of ONNX's: name, align_corners, and whether it filters where an axis shrinks.
_OWN: dict[str, list[tuple[str, bool | None, bool]]] = {
    "nearest": [("nearest", None, False), ("nearest-exact", None, False)],
    "linear": [("linear", False, False), ("linear", True, False), ("linear", False, True)],
    "cubic": [("bicubic", False, False), ("bicubic", True, False), ("bicubic", False, True)],
}
_NAMES = {3: "linear", 4: "bilinear", 5: "trilinear"}
_PROBE = 5  # elements of an axis that stands for one of symbolic size


@lowering("Resize")
def resize(ctx: NodeContext) -> torch.Tensor:
    form = Interpolation(
        ctx.text("mode", "nearest"),
        ctx.text("coordinate_transformation_mode", "half_pixel"),
        ctx.text("nearest_mode", "round_prefer_floor"),
        ctx.number("cubic_coeff_a", -0.75),
        bool(ctx.integer("exclude_outside", 0)),
        bool(ctx.integer("antialias", 0)),
    )
    rank, x = ctx.rank(), ctx.tensor(0)
    axes = [axis % rank for axis in ctx.integers("axes", list(range(rank)))]
    scales = _scales(ctx, axes)
    lengths = dims(ctx.node.outputs[0])
    crops = form.coordinates == "tf_crop_and_resize"
    regions = {axis: _roi(ctx, axes, axis) if crops else None for axis in axes}
    moving = [axis for axis in axes if scales.get(axis) != 1.0 or regions[axis] not in (None, (0.0, 1.0))]
    fixed = all(isinstance(ctx.dims()[axis], int) and isinstance(lengths[axis], int) for axis in moving)
    if not fixed or not set(moving) <= set(scales):
        return _symbolic(ctx, form, axes, scales)
    matrices: dict[int, np.ndarray] = {}
    for axis in moving:
        size: Any = ctx.dims()[axis]
        length: Any = lengths[axis]
        matrix = form.matrix(size, length, scales[axis], regions[axis])
        if not (size == length and np.array_equal(matrix, np.eye(size))):
            matrices[axis] = matrix
    own = _find_own(form.mode, rank, matrices)
    if own is not None:
        name, align, smooth = own
        wanted: list[Any] = [matrices[i].shape[0] if i in matrices else ctx.size(0, i) for i in range(2, rank)]
        return _interpolate(x, wanted, None, _NAMES[rank] if name == "linear" else name, align, smooth)
    outside: Any = None
    for axis, matrix in matrices.items():
        weights = ctx.new_constant(matrix.astype(ctx.onnx_dtype().numpy()))
        x = torch.matmul(x.movedim(axis, -1), weights.t()).movedim(-1, axis)
        beyond = (matrix == 0).all(1)
        if beyond.any():  # only where tf_crop_and_resize reads behind the input
            along = ctx.new_constant(beyond.reshape([-1, *[1] * (rank - 1 - axis)]))
            outside = along if outside is None else outside | along
    return x if outside is None else torch.where(outside, ctx.number("extrapolation_value", 0.0), x)


def _scales(ctx: NodeContext, axes: list[int]) -> dict[int, float]:
    """Axis -> the scale that its coordinates are computed with, of the axes for which the graph fixes it."""
    given = ctx.constant(2)
    if given is not None and given.numel():
        return dict(zip(axes, map(float, given.tolist())))
    sizes, policy = ctx.constant(3), ctx.text("keep_aspect_ratio_policy", "stretch")
    if sizes is None:
        # Sizes of which the graph computes some, such as the batch's: the shapes say which axes stay as they are.
        before, after = ctx.dims(), dims(ctx.node.outputs[0])
        stretched = axes if ctx.has(3) and policy == "stretch" else []
        return {axis: scale for axis in stretched if (scale := _scale(before[axis], after[axis])) is not None}
    found = {
        axis: length / size for axis, length in zip(axes, sizes.tolist()) if isinstance(size := ctx.dims()[axis], int)
    }
    if policy != "stretch" and found:
        return dict.fromkeys(found, (min if policy == "not_larger" else max)(found.values()))
    return found


def _scale(before: Dim, after: Dim) -> float | None:
    if isinstance(before, int) and isinstance(after, int):
        return after / before
    return 1.0 if before is not None and before == after else None


def _roi(ctx: NodeContext, axes: list[int], axis: int) -> tuple[float, float]:
    region = ctx.constant(1)
    if region is None:
        raise TrainingError(
            f"Resize {ctx.node.name!r}: PyTorch needs its input roi as a constant; export the model with it fixed"
        )
    numbers, place = region.reshape(-1).tolist(), axes.index(axis)
    return float(numbers[place]), float(numbers[place + len(axes)])


def _find_own(mode: str, rank: int, matrices: dict[int, np.ndarray]) -> tuple[str, bool | None, bool] | None:
    """The mode of PyTorch with these weights, if there is one."""
    if not matrices or rank not in _NAMES or min(matrices) < 2 or (mode == "cubic" and rank != 4):
        return None
    for candidate in _OWN[mode]:
        if candidate[2] and rank != 4:
            continue
        # An axis that stays as it is has no matrix here; every mode leaves it alone.
        if all(_matches(candidate, matrix) for matrix in matrices.values()):
            return candidate
    return None


def _matches(candidate: tuple[str, bool | None, bool], matrix: np.ndarray) -> bool:
    length, size = matrix.shape
    found = _own_matrix(*candidate, size, length)
    return bool(np.allclose(found, matrix, rtol=0, atol=1e-6 if matrix.any() else 0))


@functools.lru_cache(maxsize=32)
def _own_matrix(name: str, align: bool | None, smooth: bool, size: int, length: int) -> np.ndarray:
    units = torch.eye(size, dtype=torch.float64)[None, :, :, None]  # [1, size as channels, size, 1]
    name = "bilinear" if name == "linear" else name
    found = _interpolate(units, [length, 1], None, name, align, smooth)
    return found[0, :, :, 0].numpy().T


def _interpolate(
    x: torch.Tensor, sizes: list[int] | None, scales: list[float] | None, name: str, align: bool | None, smooth: bool
) -> torch.Tensor:
    return functional.interpolate(x, sizes, scales, name, align, antialias=smooth)


def _symbolic(ctx: NodeContext, form: Interpolation, axes: list[int], scales: dict[int, float]) -> torch.Tensor:
    """Spatial axes of symbolic size, in the modes that are PyTorch's too."""
    rank, x = ctx.rank(), ctx.tensor(0)
    spatial = list(range(2, rank))
    moving = [axis for axis in axes if scales.get(axis) != 1.0]
    whole = all(scales.get(axis, 0.5).is_integer() for axis in moving)
    if form.mode == "nearest" and form.coordinates != "tf_crop_and_resize" and whole:
        # At a whole scale every element is treated like its neighbours: a few of them show how.
        counts = {axis: int(scales[axis]) for axis in moving}
        if all(np.array_equal(form.matrix(_PROBE, _PROBE * n, n), _repeats(n)) for n in counts.values()):
            if rank in _NAMES and min(moving) >= 2:
                return _interpolate(x, None, [float(counts.get(axis, 1)) for axis in spatial], "nearest", None, False)
            for axis, count in counts.items():
                x = x.repeat_interleave(count, axis)
            return x
    align = form.coordinates == "align_corners"
    usual = form.coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners")
    # Where an axis shrinks, PyTorch's filter leaves out what is outside.
    linear = form.mode == "linear"
    usual = usual and (form.exclude_outside or not form.antialias if linear else not form.exclude_outside)
    if form.mode == "nearest":
        exact = {("asymmetric", "floor"): "nearest", ("half_pixel", "round_prefer_ceil"): "nearest-exact"}
        name = exact.get((form.coordinates, form.nearest), "")
    elif form.mode == "linear":
        name = _NAMES.get(rank, "") if usual else ""
    else:
        name = "bicubic" if usual and rank == 4 and form.cubic_a == -0.75 else ""
    policy = ctx.text("keep_aspect_ratio_policy", "stretch")
    known = ctx.has(3) or set(axes) <= set(scales)
    if not name or not known or not set(moving) <= set(spatial) or policy != "stretch" or rank not in _NAMES:
        unknown: list[Dim] = [ctx.dims()[axis] for axis in axes]
        raise TrainingError(
            f"Resize {ctx.node.name!r} (mode {form.mode}, {form.coordinates}) resizes axes of sizes {unknown}; PyTorch "
            "needs them and the scales fixed in this mode: fix them with Model.fix"
        )
    aligned = None if form.mode == "nearest" else align
    if ctx.has(3):
        sizes = dict(zip(axes, ctx.sizes(3)))
        wanted: list[Any] = [sizes.get(axis, ctx.size(0, axis)) for axis in spatial]
        return _interpolate(x, wanted, None, name, aligned, form.antialias)
    factors = [scales.get(axis, 1.0) for axis in spatial]
    return _interpolate(x, None, factors, name, aligned, form.antialias)


def _repeats(count: int) -> np.ndarray:
    return np.repeat(np.eye(_PROBE), count, axis=0)
