"""The effect of masks for the report: sparsity of each weight, and bytes after deflate."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from archipel.compression.layer_weights import layer_weights
from archipel.graph import Model

_LEVEL = 6  # the default of zip


def facts(before: Model, after: Model) -> dict[str, Any]:
    """Notes for the report: `sparsity` of the layers' weights, over all and each, and bytes of parameters.

    `deflated`: bytes in a zip, where zeros cost little; plain files do not shrink.
    """
    weights = layer_weights(after)
    masks = {weight.name: weight.kept for weight in weights}
    size = sum(mask.size for mask in masks.values())
    return {
        "sparsity": round(1.0 - sum(int(mask.sum()) for mask in masks.values()) / max(size, 1), 4),
        "layers": {name: round(1.0 - float(mask.mean()), 4) for name, mask in masks.items()},
        "bytes": {
            "parameters": sum(content.nbytes for content in after.parameters.values()),
            "deflated before": deflated_bytes(before.parameters),
            "deflated": deflated_bytes(after.parameters, masks),
        },
    }


def deflated_bytes(parameters: Mapping[str, np.ndarray], kept: Mapping[str, np.ndarray] | None = None) -> int:
    """Bytes of the tensors after deflate (RFC 1951), each by itself, with zeros where `kept` is false."""
    total = 0
    for name, content in parameters.items():
        mask = (kept or {}).get(name)
        masked = content if mask is None else np.where(mask, content, 0).astype(content.dtype)
        total += len(zlib.compress(np.ascontiguousarray(masked).tobytes(), _LEVEL))
    return total
