"""One layer of a causal transformer: normalization first (Xiong et al. 2020), attention, and a feed-forward part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archipel.models.attention import attend

if TYPE_CHECKING:
    from torch import nn


def decoder_layer(width: int, heads: int, dropout: float, *, gelu: str = "none", hide: bool = False) -> nn.Module:
    """A new layer: float32 [batch, time, width] -> the same.

    Arguments:
        width: a multiple of `heads`; the feed-forward part has 4 * width.
        heads: attention heads.
        dropout: the share of what each part adds that training sets to 0.
        gelu: "none" for the exact Gelu, "tanh" for its approximation.
        hide: also drop the shares with which attention mixes values.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(width)
            self.attention = nn.Linear(width, 3 * width)
            self.project = nn.Linear(width, width)
            self.norm2 = nn.LayerNorm(width)
            self.widen = nn.Linear(width, 4 * width)
            self.narrow = nn.Linear(4 * width, width)
            self.dropout = nn.Dropout(dropout)
            self.hidden = nn.Dropout(dropout if hide else 0.0)

        def forward(self, x: Any) -> Any:
            batch, time, _ = x.shape
            # [batch, time, 3 * width] -> q, k and v, each [batch, heads, time, width // heads].
            split = self.attention(self.norm1(x)).reshape(batch, time, 3, heads, width // heads)
            q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = attend(q, k, v, self.hidden, causal=True)
            x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, time, width)))
            wide: torch.Tensor = functional.gelu(self.widen(self.norm2(x)), approximate=gelu)
            return x + self.dropout(self.narrow(wide))

    return Layer()
