"""What the lowering of a node with a body says of the body, and gets of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class Number(Enum):
    """The mark of a body's input that counts iterations: an integer, and no tensor."""

    NUMBER = 0


NUMBER = Number.NUMBER

Given = torch.Tensor | Number
"""What an input of a body is, if it is no tensor that comes anew in each call."""


@dataclass(frozen=True)
class Body:
    """A body of a node as a module.

    The module takes the body's inputs that are not constant, one item of each sequence, and what is captured; it
    returns a tuple of the body's outputs.

    Attributes:
        module: the module, as a Proxy.
        sequences: tensors of which iteration i reads item i along an axis, and no more: (tensor, axis).
        captured: what the body captures otherwise.
    """

    module: Any
    sequences: list[tuple[Any, int]]
    captured: list[Any]
