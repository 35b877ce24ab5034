"""Layers that PyTorch computes by operators of its own are imported as what they consist of, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from archipel import Model
from archipel.training.cloud import TorchModule


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.sampled(every=4)
def test_attention_without_heads(masked: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = nn.Linear(4, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.given(x).chunk(3, -1)
            mask = x[:, :, None, 0] < x[:, None, :, 1] + 9 if masked else None
            return nn.functional.scaled_dot_product_attention(query, key, value, mask)

    torch.manual_seed(0)
    module, x = Attention(), torch.randn(3, 5, 4)
    own = TorchModule(Model.from_torch(module, x[:2])).double()
    module.double()
    torch.testing.assert_close(own(x.double()), module(x.double()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.sampled(every=4)
def test_bags_of_one_size(mode: str) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.last = nn.EmbeddingBag(20, 6, mode=mode), nn.Linear(6, 3)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.last(self.bags(words))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module, words = Bags(), torch.randint(0, 20, (5, 7))
    own = TorchModule(Model.from_torch(module, words[:2])).double()
    module.double()
    torch.testing.assert_close(own(words), module(words), rtol=1e-12, atol=1e-12)
    for each in (own, module):
        each(words).square().sum().backward()
    expected = {name: each.grad for name, each in module.named_parameters()}
    assert expected.keys() == dict(own.named_parameters()).keys()
    for name, each in own.named_parameters():
        torch.testing.assert_close(each.grad, expected[name], rtol=1e-9, atol=1e-9)
