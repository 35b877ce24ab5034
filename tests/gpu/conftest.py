"""Tests that need a GPU of CUDA: `pytest -m gpu tests/gpu`. Without one they are skipped, in CI too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """float32 products as exact as the CPU's, not in TF32."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU of CUDA")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
