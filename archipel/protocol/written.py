"""Values that people write into files: what is wrong with them, by the name of the field and with a way out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")
_PLACE = re.compile(r"(.*?)(?: - at (?:`(?P<key>key)` in )?`\$(?P<path>.*)`)?", re.S)
_PATTERNS = {
    "[A-Za-z0-9]": "letters, digits, '.', '_' and '-', the first a letter or digit",
    "[0-9a-f]{64}": "64 hexadecimal digits",
    "[0-9a-f]{32}": "32 hexadecimal digits",
}


def convert(values: Mapping[str, Any], kind: type[T]) -> T:
    """`values` as a `kind`, strictly. Raises ValueError that names the field, and what may be there."""
    for name, value in _numbers(values, ""):
        if not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(explain(error, kind)) from None


def explain(error: msgspec.ValidationError, kind: Any, name: str = "") -> str:
    """What `error` says, in words for people. `name`: what the value itself is called, if it is a single one."""
    found = _PLACE.fullmatch(str(error))
    assert found is not None
    said, path = found[1], found["path"] or ""
    place = path.lstrip(".") or name
    where = f"{place}: " if place else ""
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", said):
        return f"{where}unknown field {_instead(unknown[1], _fields(kind, path))}"
    if missing := re.fullmatch("Object missing required field `(.*)`", said):
        return f"{where}the field {missing[1]!r} is missing"
    if wrong := re.fullmatch("Invalid enum value '(.*)'", said):
        return f"{where}unknown value {_instead(wrong[1], _values(kind, path, bool(found['key'])))}"
    for pattern, text in _PATTERNS.items():
        if f"regex '^{pattern}" in said:
            return f"{where}expected {text}"
    return f"{where}{said[0].lower()}{said[1:]}" if where else said


def _instead(given: str, allowed: list[str]) -> str:
    near = get_close_matches(given, allowed, n=1)
    if near:
        return f"{given!r}; did you mean {near[0]!r}?"
    return f"{given!r}; there are: {', '.join(allowed)}"


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _numbers(each, f"{name}[{number}]")


def _types(kind: Any, path: str) -> list[inspect.Type]:
    """What may be at `path`, such as .stages[0] or .deadlines[...]."""
    there = _each(inspect.type_info(kind))
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        below: list[inspect.Type] = []
        for each in there:
            if isinstance(each, inspect.StructType) and name:
                below += [field.type for field in each.fields if field.encode_name == name]
            elif isinstance(each, inspect.DictType):
                below.append(each.value_type)
            elif isinstance(each, inspect.ListType | inspect.VarTupleType) and index:
                below.append(each.item_type)
        there = [one for each in below for one in _each(each)]
    return there


def _each(found: inspect.Type) -> list[inspect.Type]:
    return list(found.types) if isinstance(found, inspect.UnionType) else [found]


def _fields(kind: Any, path: str) -> list[str]:
    structs = (each for each in _types(kind, path) if isinstance(each, inspect.StructType))
    return [field.encode_name for struct in structs for field in struct.fields]


def _values(kind: Any, path: str, key: bool) -> list[str]:
    there = _types(kind, path)
    if key:
        there = [each.key_type for each in there if isinstance(each, inspect.DictType)]
    return [str(value) for each in there if isinstance(each, inspect.LiteralType) for value in each.values]
