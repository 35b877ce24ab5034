"""Layers of PyTorch that its exporter takes otherwise than an import needs them, or not at all."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from archipel.errors import ModelImportError

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def taken_apart() -> Iterator[None]:
    """A context in which an export takes layers as what they consist of.

    `nn.TransformerEncoderLayer` and `nn.MultiheadAttention`: in evaluation mode PyTorch computes them by a fused
    operator, which has no form in ONNX and no gradient. And it compares masks with the causal one, by their values,
    which an export does not have; any mask is applied as it is.

    `nn.EmbeddingBag` of bags of one size is a sum, mean or maximum of an Embedding; the exporter makes a loop of it.

    `scaled_dot_product_attention`: the exporter translates that of [batch, heads, length, features] alone; one without
    heads has one.
    """
    import torch
    from torch.nn import functional
    from torch.nn.modules import transformer

    before, detect = torch.backends.mha.get_fastpath_enabled(), transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    whole = functional.embedding_bag
    attention: Any = functional.scaled_dot_product_attention

    def embedding_bag(input: torch.Tensor, weight: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        given = inspect.signature(whole).bind(input, weight, *arguments, **named).arguments
        weights = given.get("per_sample_weights")
        if input.ndim != 2 or given.get("padding_idx") is not None or given.get("max_norm") is not None:
            return whole(input, weight, *arguments, **named)
        rows = functional.embedding(input, weight)
        rows = rows if weights is None else rows * weights[..., None]
        if given.get("mode", "mean") == "max":
            return rows.max(1).values
        return rows.sum(1) if given.get("mode", "mean") == "sum" else rows.mean(1)

    def one_head(query: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if query.ndim != 3:
            return attention(query, *arguments, **named)  # type: ignore[no-any-return]
        wide = [each[:, None] if isinstance(each, torch.Tensor) and each.ndim == 3 else each for each in arguments]
        named = {
            name: each[:, None] if isinstance(each, torch.Tensor) and each.ndim == 3 else each
            for name, each in named.items()
        }
        of_one: torch.Tensor = attention(query[:, None], *wide, **named)[:, 0]
        return of_one

    functional.embedding_bag = embedding_bag
    functional.scaled_dot_product_attention = one_head
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
        transformer._detect_is_causal_mask = detect
        functional.embedding_bag, functional.scaled_dot_product_attention = whole, attention


@contextlib.contextmanager
def noting_packed() -> Iterator[list[str]]:
    """A context whose list is no longer empty when a module has packed sequences of several lengths."""
    import torch

    packed: list[str] = []
    functions: Any = torch._VF
    original = functions._pack_padded_sequence

    def pack(*arguments: Any) -> Any:
        packed.append("pack_padded_sequence")
        return original(*arguments)

    functions._pack_padded_sequence = pack
    try:
        yield packed
    finally:
        functions._pack_padded_sequence = original


def check_layers(module: torch.nn.Module, name: str, packed: list[str]) -> None:
    """Raise ModelImportError for what ONNX has no form for, where the exporter's own error does not name it."""
    import torch

    if packed:
        raise ModelImportError(
            f"{name} packs sequences ({packed[0]}), and a graph has no packed tensors: give the layer the padded "
            "sequences, and pick each one's last output by its length with gather"
        )
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.LSTM) and layer.proj_size:
            where = f" {path!r}" if path else ""
            raise ModelImportError(
                f"{name}: LSTM{where} has proj_size={layer.proj_size}, and ONNX's LSTM has no projection; leave "
                "proj_size out, and put a Linear behind the layer"
            )
