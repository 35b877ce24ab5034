"""How fast a device computes each kind of operator in training: both passes of a few operators, in about a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_IMAGES = (24, 40, 28, 28)  # examples, channels, height, width
_ROWS, _FEATURES = 1500, 640
# A product of large factors, and of a few rows with a matrix that caches do not hold. Powers of two fall on each other
# there.
_SQUARE, _WIDE, _FEW = 448, 3600, 12

Timer = Callable[[Callable[[], object]], float]


def operator_speeds(device: torch.device, seconds: Timer, layout: torch.memory_format) -> dict[str, Any]:
    """Fields of a cluster: speeds of products, convolutions, and of operators that are slower than memory.

    Arguments:
        seconds: the time that one call takes.
        layout: of pictures: torch.contiguous_format or torch.channels_last.
    """
    large, skinny = _product(_SQUARE, _SQUARE, device), _product(_FEW, _WIDE, device)
    # Time is FLOPs / rate + bytes / speed of copying: two products, two unknowns.
    (work, moved, taken), (few_work, few_moved, few_taken) = large(seconds), skinny(seconds)
    scale = work / few_work
    copying = max(few_taken * scale - taken, 0.0) / (few_moved * scale - moved)
    copying = min(copying, few_taken / few_moved)
    rate = work / max(taken - moved * copying, taken / 2)
    found: dict[str, Any] = {"flops_per_second": {"float32": rate}}
    by_kind = {"MatMul": 1 / copying} if copying > 0 else {}
    convolution = _convolution(48, 40, 1, 20, device, seconds, layout)
    found["convolution_flops_per_second"] = {"float32": convolution}
    found["convolution_share"] = {
        "narrow": min(_convolution(3, 24, 1, 28, device, seconds, layout) / convolution, 1.0),
        "depthwise": min(_convolution(40, 40, 40, 28, device, seconds, layout) / convolution, 1.0),
    }
    images = torch.randn(_IMAGES, device=device).contiguous(memory_format=layout)
    rows = torch.randn(_ROWS, _FEATURES, device=device)
    weight, bias = torch.ones(_FEATURES, device=device), torch.zeros(_FEATURES, device=device)
    scales, shifts = (torch.ones(_IMAGES[1], device=device, requires_grad=True) for _ in range(2))
    operators: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
        "MaxPool": (images, lambda x: functional.max_pool2d(x, 2)),
        "AveragePool": (images, lambda x: functional.avg_pool2d(x, 2)),
        "BatchNormalization": (images, lambda x: functional.batch_norm(x, None, None, scales, shifts, training=True)),
        "LayerNormalization": (rows, lambda x: functional.layer_norm(x, (_FEATURES,), weight, bias)),
        "Gelu": (rows, functional.gelu),
        "Tanh": (rows, torch.tanh),
        "Softmax": (rows, lambda x: functional.softmax(x, -1)),
        "Dropout": (rows, lambda x: functional.dropout(x, 0.1)),
    }
    for name, (x, call) in operators.items():
        by_kind[name] = _speed(x, call, seconds)
    found["operator_bytes_per_second"] = by_kind
    return found


def launch(device: torch.device, seconds: Timer) -> float:
    """Seconds of an operator that computes next to nothing, one pass."""
    few, count = torch.zeros(8, device=device, requires_grad=True), 16

    def chain() -> None:
        value = few
        for _ in range(count):
            value = torch.relu(value)
        value.backward(few)  # type: ignore[no-untyped-call]
        few.grad = None

    return seconds(chain) / count / 3  # the planner counts a backward pass as two forward ones


def _product(rows: int, width: int, device: torch.device) -> Callable[[Timer], tuple[float, float, float]]:
    """FLOPs, bytes and seconds of both passes of the product of [rows, width] and [width, width]: three products."""
    x, weight = torch.randn(rows, width, device=device), torch.randn(width, width, device=device)
    out, back = torch.empty_like(x), torch.empty_like(weight)

    def three() -> None:
        torch.mm(x, weight.t(), out=out)
        torch.mm(x, weight, out=out)
        torch.mm(x.t(), out, out=back)

    flops, nbytes = 6.0 * rows * width * width, 3.0 * (2 * x.nbytes + weight.nbytes)
    return lambda seconds: (flops, nbytes, seconds(three))


def _convolution(
    before: int, after: int, groups: int, size: int, device: torch.device, seconds: Timer, layout: torch.memory_format
) -> float:
    """FLOPs a second of both passes. The first layer's inputs, of three channels, have no gradient."""
    images = torch.randn(_IMAGES[0], before, size, size, device=device).contiguous(memory_format=layout)
    kernel = torch.randn(after, before // groups, 3, 3, device=device).contiguous(memory_format=layout)
    kernel.requires_grad_()
    images.requires_grad_(before > 3)
    gradient = torch.ones(_IMAGES[0], after, size, size, device=device).contiguous(memory_format=layout)

    def both() -> None:
        torch.autograd.backward(torch.conv2d(images, kernel, padding=1, groups=groups), gradient)
        images.grad = kernel.grad = None

    products = 3 if before > 3 else 2
    flops = 2.0 * gradient.numel() * (before // groups) * 9
    return products * flops / seconds(both)


def _speed(x: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor], seconds: Timer) -> float:
    """Bytes a second, where each pass of the three that the planner counts reads x and writes the result."""
    x = x.clone().requires_grad_()
    gradient = torch.ones_like(call(x))

    def both() -> None:
        torch.autograd.backward(call(x), gradient)
        x.grad = None

    return 3 * (x.nbytes + gradient.nbytes) / seconds(both)
