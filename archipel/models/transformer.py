"""A small transformer encoder over tokens (Vaswani et al. 2017, section 3; normalization first, Xiong et al. 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archipel.models.decoder_layer import decoder_layer
from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def transformer(
    seed: int,
    vocabulary: int = 80,
    length: int = 64,
    width: int = 128,
    heads: int = 4,
    layers: int = 2,
    dropout: float = 0.0,
) -> nn.Module:
    """A new network: tokens int64 [batch, time <= length] -> logits float32 [batch, time, vocabulary].

    Has learned positions, causal attention, and feed-forward layers of 4 * width with Gelu.

    Arguments:
        seed: determines the first parameters.
        vocabulary: the number of different tokens.
        length: the most tokens in a sequence.
        width: the size of a token's representation, a multiple of `heads`.
        heads: attention heads in each layer.
        layers: the number of layers.
        dropout: the share of values that training sets to 0, from 0 to 1.

    Raises MissingExtraError without PyTorch.

    Example:
        network = transformer(0, vocabulary=65, length=32)
        model = Model.from_torch(network, torch.zeros(2, 32, dtype=torch.int64))
    """
    with seeded(seed):
        import torch
        from torch import nn

        class Transformer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens = nn.Embedding(vocabulary, width)
                self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
                self.layers = nn.Sequential(*(decoder_layer(width, heads, dropout) for _ in range(layers)))
                self.norm = nn.LayerNorm(width)
                self.decoder = nn.Linear(width, vocabulary)

            def forward(self, tokens: Any) -> Any:
                x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
                return self.decoder(self.norm(self.layers(x)))

        network: nn.Module = Transformer()
    return network
