"""A training step runs no more kernels than PyTorch's own module: on a GPU each is a pass over the memory.

Counted are operators of PyTorch that compute, forward and backward, in bfloat16 where autocast says so. Views are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from archipel import Model, models
from archipel.training.cloud import TorchModule

GPT = {"vocabulary": 50, "length": 8, "width": 16, "heads": 2, "layers": 2, "dropout": 0.0}


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(each.alias_info for each in function._schema.returns):
            self.operators[str(function)] += 1
        return function(*args, **(kwargs or {}))


def kernels(module: nn.Module, x: torch.Tensor) -> Counter[str]:
    module.train()
    with Count() as count:
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        torch.autograd.backward(
            functional.cross_entropy(y.flatten(0, -2).float(), torch.zeros(y[..., 0].numel()).long())
        )
    return count.operators


@pytest.mark.parametrize(
    ("make", "x", "more"),
    [
        (lambda: models.resnet8(0), torch.zeros(2, 3, 32, 32), 0),
        (lambda: models.mobilenet_v2(0, width=0.25), torch.zeros(2, 3, 32, 32), 0),
        # ONNX counts a token below 0 from the table's end: three operators on the tokens.
        (lambda: models.gpt(0, **GPT), torch.zeros(2, 8, dtype=torch.int64), 3),
    ],
    ids=["ResNet-8", "MobileNetV2", "GPT"],
)
@pytest.mark.sampled(every=4)
def test_as_many_as_pytorch(make: Callable[[], nn.Module], x: torch.Tensor, more: int) -> None:
    native, ours = kernels(make(), x), kernels(TorchModule(Model.from_torch(make(), x)), x)
    assert ours.total() <= native.total() + more, (ours - native, native - ours)
