"""GatherElements whose indices are the same along axes, as Expand gives them, against PyTorch's gather."""

from __future__ import annotations

import pytest
import torch

from archipel.training.cloud.ops.gather import _gather_elements


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("apart", [(0,), (), (0, 1)])
def test_indices_that_are_the_same_along_axes(axis: int, apart: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(axis)
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    wide = [7 if i == axis else size for i, size in enumerate(x.shape)]
    narrow = [size if i == axis or i in apart else 1 for i, size in enumerate(wide)]
    indices = torch.randint(-x.size(axis), x.size(axis), narrow, generator=generator).expand(wide)
    found = _gather_elements(x, indices, axis)
    expected = x.gather(axis, indices % x.size(axis))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    weights = torch.randn(wide, dtype=torch.float64, generator=generator)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
