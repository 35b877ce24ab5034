"""Operators on images: blocks of pixels as channels, and sampling at computed positions."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from archipel.errors import TrainingError
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.spatial.padding import pad_constant
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


@lowering("Col2Im")
def col2im(ctx: NodeContext) -> torch.Tensor:
    image, block = ctx.fixed(1), ctx.fixed(2)
    if len(image) != 2:
        raise TrainingError(f"Col2Im {ctx.node.name!r} has {len(image)} spatial axes; PyTorch folds two")
    pads = ctx.integers("pads", [0] * 4)
    # PyTorch pads both ends alike: into an image with its padding, which is then cut off.
    whole: Any = [size + before + after for size, before, after in zip(image, pads[:2], pads[2:])]
    dilations: Any = ctx.integers("dilations", [1, 1])
    strides: Any = ctx.integers("strides", [1, 1])
    found = functional.fold(ctx.tensor(0), whole, tuple(block), dilations, 0, strides)
    return pad_constant(found, [-number for number in pads[:2]], [-number for number in pads[2:]], 0.0)
