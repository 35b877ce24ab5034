"""What a model's file says of the transforms in front of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import onnx_ir as ir

from archipel.graph.model import Model
from archipel.preprocessing.transform import Transform

KEY = "archipel.preprocessing"


def to_settings(transforms: Sequence[Transform]) -> list[dict[str, Any]]:
    """The tables that `from_settings` reads, without fields that are defaults."""
    tables = []
    for part in transforms:
        fields = msgspec.to_builtins(part)
        defaults = dict(zip(reversed(part.__struct_fields__), reversed(part.__struct_defaults__)))
        kept = {n: v for n, v in fields.items() if n not in defaults or defaults[n] != getattr(part, n)}
        tables.append(kept)
    return tables


def record(model: ir.Model, transforms: Sequence[Transform]) -> None:
    """Write the transforms into the model's metadata, before those that it has."""
    before = _tables(model.metadata_props.get(KEY))
    model.metadata_props[KEY] = json.dumps([*to_settings(transforms), *before])


def describe(model: Model) -> list[dict[str, Any]]:
    """The transforms in front of a model, in the form of settings; [] where the file says nothing that is well formed.

    The file may be anybody's, so this is for people: the graph is what is computed.
    """
    return _tables(model.ir.metadata_props.get(KEY))


def _tables(text: str | None) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(text or "[]", type=list[dict[str, Any]])
    except msgspec.MsgspecError:
        return []
