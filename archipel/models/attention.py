"""Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) whose Dropout survives the export as a graph."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def attend(
    q: Tensor, k: Tensor, v: Tensor, dropout: nn.Dropout, *, added: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Mix `v` by how well `q` fits `k`; all are [batch, heads, time, size], as is the result.

    Arguments:
        q: queries.
        k: keys.
        v: values.
        dropout: of the shares with which values are mixed.
        added: to the scores before the softmax, broadcast to [batch, heads, time, time]; or `causal`, not both.
        causal: no position sees a later one.
    """
    import torch
    from torch.nn import functional

    # PyTorch's own function, which GPUs have fast kernels for, cannot keep its Dropout in a graph that is exported.
    if not dropout.p:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=added, is_causal=causal)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if added is not None:
        scores = scores + added
    if causal:
        time = q.shape[-2]
        seen = torch.ones(time, time, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    mixed: Tensor = dropout(scores.softmax(-1)) @ v
    return mixed
