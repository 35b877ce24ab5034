"""Operators on images: blocks of pixels as channels, and sampling at computed positions."""

from __future__ import annotations

import torch
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


@lowering("DepthToSpace")
def depth_to_space(ctx: NodeContext) -> torch.Tensor:
    x, block = ctx.tensor(0), ctx.integer("blocksize", 1)
    if ctx.text("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(x, block)
    batch, channels, height, width = (ctx.size(0, axis) for axis in range(4))
    parts = x.reshape([batch, block, block, channels // (block * block), height, width])
    moved = parts.permute(0, 3, 4, 1, 5, 2)
    return moved.reshape([batch, channels // (block * block), height * block, width * block])


@lowering("SpaceToDepth")
def space_to_depth(ctx: NodeContext) -> torch.Tensor:
    x, block = ctx.tensor(0), ctx.integer("blocksize", 1)
    batch, channels, height, width = (ctx.size(0, axis) for axis in range(4))
    parts = x.reshape([batch, channels, height // block, block, width // block, block])
    moved = parts.permute(0, 3, 5, 1, 2, 4)
    return moved.reshape([batch, channels * block * block, height // block, width // block])


@lowering("GridSample")
def grid_sample(ctx: NodeContext) -> torch.Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(name := ctx.text("mode", "linear"), name)
    padding, align = ctx.text("padding_mode", "zeros"), bool(ctx.integer("align_corners", 0))
    return functional.grid_sample(ctx.tensor(0), ctx.tensor(1), mode, padding, align)


@lowering("AffineGrid")
def affine_grid(ctx: NodeContext) -> torch.Tensor:
    return functional.affine_grid(ctx.tensor(0), ctx.sizes(1), bool(ctx.integer("align_corners", 0)))
