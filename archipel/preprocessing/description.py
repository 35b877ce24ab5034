"""What a model's file says of the transforms in front of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import onnx
import onnx_ir as ir

from archipel.errors import ModelImportError
from archipel.graph.model import Model
from archipel.preprocessing.transform import Transform

KEY = "archipel.preprocessing"
_SHORT = 4  # numbers that a line shows
_LONGEST = 2000  # characters of a line; the file may be anybody's


def to_settings(transforms: Sequence[Transform]) -> list[dict[str, Any]]:
    """The tables that `from_settings` reads, without fields that are defaults.

    Example:
        tables = to_settings([Raw("int16", ("batch", 16000)), Scale(32768.0), LogMel()])
        assert to_settings(from_settings(tables)) == tables
    """
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

    Example:
        prepared = put_before(model, [Raw("int16", ("batch", 4)), Scale(32768.0)])
        print(describe(prepared))
    """
    return _tables(model.ir.metadata_props.get(KEY))


def describe_file(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """As `describe`, of an ONNX file, without reading its weights. Raises ModelImportError that names the file."""
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as error:  # the file may be anybody's: protobuf raises exceptions of its own
        raise ModelImportError(f"{os.fspath(path)}: not a valid ONNX file ({type(error).__name__})") from error
    return _tables({entry.key: entry.value for entry in proto.metadata_props}.get(KEY))


def text_of(tables: Sequence[Mapping[str, Any]]) -> str:
    """The transforms of `describe` in one line: "raw uint8 [batch, 32, 32, 3] -> scale -> normalize mean=3 numbers"."""
    text = " -> ".join(" ".join([str(table.get("kind")), *_field_texts(table)]) for table in tables)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _field_texts(table: Mapping[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, list):
            value = f"{len(value)} numbers" if len(value) > _SHORT else f"[{', '.join(map(str, value))}]"
        if name != "kind":
            yield str(value) if table.get("kind") == "raw" and name in ("dtype", "shape") else f"{name}={value}"


def _tables(text: str | None) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(text or "[]", type=list[dict[str, Any]])
    except msgspec.MsgspecError:
        return []
