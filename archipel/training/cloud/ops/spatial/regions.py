"""Regions of interest, as detectors read them out of feature maps."""

from __future__ import annotations

import torch

from archipel.errors import TrainingError
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


@lowering("RoiAlign")
def roi_align(ctx: NodeContext) -> torch.Tensor:
    """ONNX RoiAlign-16 (He et al. 2017, section 3): the mean or maximum of bilinear samples of each cell."""
    ratio, mode = ctx.integer("sampling_ratio", 0), ctx.text("mode", "avg")
    if ratio < 1:
        raise TrainingError(
            f"RoiAlign {ctx.node.name!r} takes as many samples as a region is large; PyTorch needs a fixed number: "
            "export the model with a sampling_ratio of 1 or more"
        )
    shift = 0.5 if ctx.text("coordinate_transformation_mode", "half_pixel") == "half_pixel" else 0.0
    cells = ctx.integer("output_height", 1), ctx.integer("output_width", 1)
    scale = ctx.number("spatial_scale", 1.0)
    return ctx.call(_align, *ctx.tensors(), *cells, ratio, scale, shift, mode == "max")  # type: ignore[no-any-return]


def _align(
    x: torch.Tensor,
    rois: torch.Tensor,
    batch: torch.Tensor,
    height: int,
    width: int,
    ratio: int,
    scale: float,
    shift: float,
    largest: bool,
) -> torch.Tensor:
    """x [batch, channels, rows, columns], rois [regions, 4] -> [regions, channels, height, width]."""
    left, top, right, bottom = (rois * scale - shift).unbind(1)
    if not shift:  # the older form has no region smaller than one element
        right, bottom = torch.maximum(right, left + 1), torch.maximum(bottom, top + 1)
    rows = _weights(top, bottom, height * ratio, x.size(2), x.dtype)
    columns = _weights(left, right, width * ratio, x.size(3), x.dtype)
    cells = [rois.size(0), x.size(1), height, ratio, width, ratio]
    maps = x.index_select(0, batch.to(torch.int64))
    if not largest:
        samples = rows @ maps @ columns.transpose(2, 3)
        return samples.reshape(cells).mean((3, 5))
    # ONNX takes the maximum of the four weighted corners of all samples, not of their sums.
    near, far = _corners(top, bottom, height * ratio, x.size(2), x.dtype)
    parts = []
    for row_at, row_weight in (near, far):
        taken = maps.gather(2, row_at[:, None, :, None].expand(-1, x.size(1), -1, x.size(3)))
        for at, weight in _corners(left, right, width * ratio, x.size(3), x.dtype):
            corner = taken.gather(3, at[:, None, None, :].expand(-1, x.size(1), row_at.size(1), -1))
            parts.append(corner * row_weight[:, None, :, None] * weight[:, None, None, :])
    samples = torch.stack(parts).amax(0)
    return samples.reshape(cells).amax((3, 5))


_Corner = tuple[torch.Tensor, torch.Tensor]


def _corners(
    start: torch.Tensor, end: torch.Tensor, count: int, size: int, dtype: torch.dtype
) -> tuple[_Corner, _Corner]:
    """The elements on both sides of each of `count` samples of a region, int64 [regions, count], with their weights."""
    steps = (torch.arange(count, device=start.device, dtype=dtype) + 0.5) / count
    position = start[:, None] + (end - start)[:, None] * steps
    inside = (position >= -1.0) & (position <= size)
    position = position.clamp(0, size - 1)
    below = position.detach().floor()
    fraction = position - below
    first = below.to(torch.int64)
    second = (first + 1).clamp(max=size - 1)
    return (first, torch.where(inside, 1 - fraction, 0.0)), (second, torch.where(inside, fraction, 0.0))


def _weights(start: torch.Tensor, end: torch.Tensor, count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """How much each element counts in each sample, [regions, 1, count, size]."""
    (first, near), (second, far) = _corners(start, end, count, size, dtype)
    found = torch.zeros(*first.shape, size, dtype=dtype, device=start.device)
    found = found.scatter_add(2, first[:, :, None], near[:, :, None])
    return found.scatter_add(2, second[:, :, None], far[:, :, None])[:, None]
