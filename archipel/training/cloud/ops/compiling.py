"""Functions that torch.compile leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, at which torch.compile ends one graph and after which it begins another."""
    # Not where the function is defined: this loads PyTorch's compiler.
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]
