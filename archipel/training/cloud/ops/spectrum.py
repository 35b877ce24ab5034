"""Fourier transforms; ONNX keeps complex numbers as a last axis of two."""

from __future__ import annotations

import torch

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


@lowering("DFT")
def dft(ctx: NodeContext) -> torch.Tensor:
    (axis,) = ctx.fixed(2) if ctx.has(2) else (-2,)
    axis = axis % ctx.rank()
    (length,) = ctx.sizes(1) if ctx.has(1) else (None,)
    x = ctx.tensor(0)
    inverse, one_sided = bool(ctx.integer("inverse", 0)), bool(ctx.integer("onesided", 0))
    is_real = ctx.dims()[-1] == 1
    signal = x.squeeze(-1) if is_real else torch.view_as_complex(x.contiguous())
    if inverse and one_sided:
        return torch.fft.irfft(signal, length, axis).unsqueeze(-1)  # type: ignore[no-any-return]
    if inverse:
        found = torch.fft.ifft(signal, length, axis)
        return torch.view_as_real(found)
    if one_sided:
        return torch.view_as_real(torch.fft.rfft(signal if is_real else signal.real, length, axis))
    return torch.view_as_real(torch.fft.fft(signal, length, axis))


@lowering("STFT")
def stft(ctx: NodeContext) -> torch.Tensor:
    x, (step,) = ctx.tensor(0), ctx.sizes(1)
    one_sided = bool(ctx.integer("onesided", 1))
    length = ctx.size(2, 0) if ctx.has(2) else ctx.sizes(3)[0]
    signal = x.squeeze(-1) if ctx.dims()[-1] == 1 else torch.view_as_complex(x.contiguous())
    frames = signal.unfold(1, length, step)
    if ctx.has(2):
        frames = frames * ctx.tensor(2)
    return torch.view_as_real(torch.fft.rfft(frames) if one_sided else torch.fft.fft(frames))
