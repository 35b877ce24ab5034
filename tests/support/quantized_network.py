"""One small network with everything that quantization meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from archipel.compression import CompressedModel
from archipel.graph import Model

Arrays = dict[str, np.ndarray]
Apply = Callable[..., tuple[CompressedModel, dict[str, Any]]]
"""(model, part, examples) -> the changed model and what the part noted."""
Run = Callable[..., np.ndarray]
"""The first output of a model, as it is written with `optimized=False`."""
Stored = Callable[[Model], Arrays]
"""The initializers of a model, by name."""


class Network(nn.Module):
    """A convolution, a depthwise and a pointwise one with Relu6, a residual addition, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm1 = nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.pointwise, self.norm3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.dense = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv(x)))
        y = nn.functional.relu6(self.norm2(self.depthwise(x)))
        x = nn.functional.max_pool2d(x + self.norm3(self.pointwise(y)), 2)
        logits: torch.Tensor = self.dense(x.flatten(1))
        return logits
