"""A decoder of the GPT-2 family (Radford et al. 2019, section 2.3), which predicts the next token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from archipel.models.decoder_layer import decoder_layer
from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def gpt(
    seed: int,
    vocabulary: int = 50257,
    length: int = 1024,
    width: int = 768,
    heads: int = 12,
    layers: int = 12,
    dropout: float = 0.1,
) -> nn.Module:
    """A new network: tokens int64 [batch, time <= length] -> logits float32 [batch, time, vocabulary].

    With the arguments as they are it is GPT-2 small, of 124,439,808 parameters. The logits at position t predict token
    t + 1. It has learned positions, normalization before each part of a layer, causal attention, feed-forward layers of
    4 * width, and one matrix for the embedding of tokens and the output.

    Arguments:
        seed: determines the first parameters.
        vocabulary: the number of different tokens.
        length: the most tokens in a sequence.
        width: the size of a token's representation, a multiple of `heads`.
        heads: attention heads in each layer.
        layers: the number of layers.
        dropout: the share of values that training sets to 0: of embeddings, attention, and what a layer adds.

    Raises MissingExtraError without PyTorch, ValueError where `heads` does not divide `width`.

    Example:
        network = gpt(0, vocabulary=65, length=128, width=128, heads=4, layers=4)
        model = Model.from_torch(network, torch.zeros(2, 128, dtype=torch.int64))
    """
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, is {width} with {heads} heads")
    with seeded(seed):
        import torch
        from torch import nn
        from torch.nn import functional

        class GPT(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens = nn.Embedding(vocabulary, width)
                self.positions = nn.Parameter(torch.empty(length, width))
                self.dropout = nn.Dropout(dropout)
                self.layers = nn.Sequential(
                    *(decoder_layer(width, heads, dropout, gelu="tanh", hide=True) for _ in range(layers))
                )
                self.norm = nn.LayerNorm(width)
                # GPT (Radford et al. 2018, section 4.1): normal with 0.02, no bias at first. GPT-2 makes what is added
                # to the residual stream smaller, by the root of how often that happens.
                for name, parameter in self.named_parameters():
                    if parameter.dim() > 1:
                        added = name.endswith(("project.weight", "narrow.weight"))
                        nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if added else 0.02)
                    elif name.endswith("bias"):
                        nn.init.zeros_(parameter)

            def forward(self, tokens: Any) -> Any:
                x = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
                return functional.linear(self.norm(self.layers(x)), self.tokens.weight)

        network: nn.Module = GPT()
    return network
