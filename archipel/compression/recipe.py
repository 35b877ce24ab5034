"""Recipes as TOML files, and the list of all parts.

[[part]]
kind = "prune_channels"
flops = 0.5

[part.fine_tune]
epochs = 2

[[part]]
kind = "static_int8"
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import tomli_w

from archipel.compression.distil import Distil
from archipel.compression.fine_tune import FineTune
from archipel.compression.low_rank import LowRank
from archipel.compression.masks import PruneNM, PruneWeights
from archipel.compression.part import Need, Part
from archipel.compression.prune.structured import PruneChannels
from archipel.compression.quantize.aware import QuantizationAware
from archipel.compression.quantize.dynamic import DynamicInt8
from archipel.compression.quantize.half import Float16
from archipel.compression.quantize.static import StaticInt8
from archipel.compression.quantize.weight_only import WeightOnly
from archipel.errors import CompressionError
from archipel.library_errors import one_line

PARTS: tuple[type[Any], ...] = (
    PruneChannels, LowRank, Distil, FineTune, PruneWeights, PruneNM,
    StaticInt8, QuantizationAware, DynamicInt8, WeightOnly, Float16,
)  # fmt: skip
"""Every kind of part. In files `StaticInt8` is called `static_int8`."""

_REMEDIES: Mapping[Need, str] = {
    "data": "training data; pass data=(inputs, labels)",
    "calibration": "calibration data; pass calibration=inputs",
    "validation": "validation data; pass validation=(inputs, labels)",
}


def kind_of(part: type[Any]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part.__name__).lower()


def load_recipe(path: str | os.PathLike[str]) -> list[Part]:
    """Read a recipe from a TOML file. Raises CompressionError that names the file, the part and the field.

    Example:
        parts = load_recipe("recipe.toml")
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CompressionError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CompressionError(f"{path}: cannot be read: {error}") from None
    try:
        return parse_recipe(text)
    except CompressionError as error:
        raise CompressionError(f"{path}: {error}") from None


def parse_recipe(text: str) -> list[Part]:
    """As `load_recipe`, from the text of a file. Raises CompressionError, which names part and field.

    Example:
        parts = parse_recipe('part = [{kind = "static_int8"}]')
    """
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CompressionError(f"not TOML: {one_line(error)}") from None
    parts = content.pop("part", None)
    if content or not isinstance(parts, list) or not parts:
        extra = f"; unknown: {', '.join(map(repr, content))}" if content else ""
        raise CompressionError(f"a recipe is a list of [[part]] tables, each with a kind{extra}")
    return [_part(number, dict(part)) for number, part in enumerate(parts, start=1)]


def write_recipe(parts: Sequence[Part]) -> str:
    """The recipe as TOML, without fields that are defaults. Raises CompressionError for objects that are no parts.

    Example:
        text = write_recipe([StaticInt8(), FineTune(steps=40, lr=1e-4)])
        assert parse_recipe(text)[0] == StaticInt8()
    """
    return tomli_w.dumps({"part": [_fields(part) for part in check_parts(parts)]})


def check_parts(parts: Sequence[Part]) -> list[Part]:
    """The parts as a list. Raises CompressionError for anything that is no part."""
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        raise CompressionError(
            f"recipe: expected a list of parts, got {type(parts).__name__}; load_recipe reads a file"
        )
    for part in parts:
        if not isinstance(part, PARTS):
            known = ", ".join(kind.__name__ for kind in PARTS)
            raise CompressionError(f"recipe: {part!r} is no part; there are {known}")
    return list(parts)


def check_sets(parts: Sequence[Part], given: Mapping[Need, object]) -> None:
    """Raise CompressionError, naming the part, if it needs examples that `given` lacks (None), or a missing teacher.

    Reads nothing, so that callers can check before any work.
    """
    there = {need for need, examples in given.items() if examples is not None}
    if "data" in there:
        # Training data stand in (`Work.need_calibration`).
        there.add("calibration")
    for number, part in enumerate(parts, start=1):
        name = type(part).__name__
        for need in part.needs:
            if need not in there:
                raise CompressionError(f"part {number} of the recipe, {name}: {name} needs {_REMEDIES[need]}")
        if isinstance(part, Distil) and part.teacher is not None and not Path(part.teacher).is_file():
            raise CompressionError(f"part {number} of the recipe, Distil: teacher {part.teacher}: no such file")


def _part(number: int, fields: dict[str, Any]) -> Part:
    kinds = {kind_of(kind): kind for kind in PARTS}
    kind = kinds.get(str(fields.pop("kind", "")))
    if kind is None:
        raise CompressionError(f"part {number}: kind is one of {', '.join(kinds)}")
    return cast(Part, _build(kind, fields, f"part {number} ({kind_of(kind)})"))


def _build(kind: type[Any], fields: dict[str, Any], where: str) -> Any:
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name in fields:
        if name not in known:
            raise CompressionError(f"{where}: no field {name!r}; there are {', '.join(known)}")
    # A table inside a part is always a FineTune: no part has another dataclass as a field.
    nested = {name: FineTune for name, value in fields.items() if isinstance(value, dict)}
    values = {name: _build(nested[name], value, f"{where}.{name}") if name in nested else value
              for name, value in fields.items()}  # fmt: skip
    plain = {name: value for name, value in values.items() if name not in nested}
    try:
        types = {name: hint for name, hint in _hints(kind).items() if name in plain}
        # TOML has lists where parts have tuples; this also checks the types.
        plain = {name: msgspec.convert(value, types[name]) for name, value in plain.items()}
        return kind(**{**values, **plain})
    except msgspec.ValidationError as error:
        raise CompressionError(f"{where}: {error}") from None


def _hints(kind: type[Any]) -> dict[str, Any]:
    import typing

    return typing.get_type_hints(kind)


def _fields(part: Any) -> dict[str, Any]:
    return {"kind": kind_of(type(part)), **_changed_fields(part)}


def _changed_fields(part: Any) -> dict[str, Any]:
    """The fields that are not defaults. None has no form in TOML, and is always a default."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if value is None or value == field.default:
            continue
        fields[field.name] = _changed_fields(value) if dataclasses.is_dataclass(value) else value
    return fields
