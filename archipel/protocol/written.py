"""Values that people write into files or code: what is wrong with them, by the name of the field and with a way out."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

T = TypeVar("T")
Hook = Callable[[type, Any], Any]
_PLACE = re.compile(r"(.*?)(?: - at (?:`(?P<key>key)` in )?`\$(?P<path>.*)`)?", re.S)
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_NAMES = "letters, digits, '.', '_' and '-', the first a letter or digit"
_DIGITS = re.compile(r"regex '\^\[0-9a-f\]\{(\d+)\}")
_LONGEST = 100


def read_path(kind: type, value: Any) -> Any:
    """What msgspec asks for types that it does not know: a path is written as a text."""
    if kind is not Path or not isinstance(value, str | os.PathLike):
        raise ValueError(f"expected a {kind.__name__.lower()}, got {value!r:.100}")
    if value == "":
        raise ValueError("expected a path, got ''")
    return Path(value)


def convert(values: Mapping[str, Any], kind: type[T], hook: Hook = read_path) -> T:
    """`values` as a `kind`, strictly. Raises ValueError that names the field, what may be there, and what came."""
    for name, value in _numbers(values, ""):
        _check_finite(name, value)
    try:
        return msgspec.convert(values, kind, dec_hook=hook)
    except msgspec.ValidationError as error:
        raise ValueError(explain(error, kind, value=values)) from None


def convert_one(name: str, value: Any, kind: Any, hook: Hook = read_path, *, strict: bool = True) -> Any:
    """`value` as a `kind`; unless `strict` it may be the text of one. Raises ValueError, which begins with `name`."""
    try:
        found = msgspec.convert(value, kind, dec_hook=hook, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(explain(error, kind, name, value)) from None
    for where, number in _numbers(found, name):
        _check_finite(where, number)
    return found


def conform(struct: msgspec.Struct) -> None:
    """Let the fields of a struct be what their types say, where code made it: msgspec looks at what it decodes only.

    A text becomes the path, a list the tuple, and another library's number the number that the type asks for. A mapping
    stays the caller's own object, which may change later, and nothing in it is looked at. Raises ValueError that names
    the field.
    """
    for name, kind in type_hints(type(struct)).items():
        value = getattr(struct, name)
        if isinstance(value, Real) and not isinstance(value, bool):
            value = int(value) if isinstance(value, Integral) else float(value)
        if not isinstance(value, Mapping):
            msgspec.structs.force_setattr(struct, name, convert_one(name, value, kind))


@lru_cache(maxsize=64)
def type_hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of the fields, with their bounds."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


def explain(error: msgspec.ValidationError, kind: Any, name: str = "", value: Any = None) -> str:
    """What `error` says of `value`, in words for people. `name`: what the value is called, if it is a single one."""
    found = _PLACE.fullmatch(str(error))
    assert found is not None
    said, path = found[1], found["path"] or ""
    place = path.lstrip(".") if not name else f"{name}{path}"
    where = f"{place}: " if place else ""
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", said):
        return f"{where}unknown field {_instead(unknown[1], _fields(kind, path))}"
    if missing := re.fullmatch("Object missing required field `(.*)`", said):
        return f"{where}the field {missing[1]!r} is missing"
    if wrong := re.fullmatch("Invalid enum value '(.*)'", said):
        return f"{where}unknown value {_instead(wrong[1], _values(kind, path, bool(found['key'])))}"
    given = None if found["key"] else _at(value, path)
    if digits := _DIGITS.search(said):
        return f"{where}expected {digits[1]} hexadecimal digits{_got_digits(given, int(digits[1]))}"
    if "regex '^[A-Za-z0-9]" in said:
        return f"{where}expected {_NAMES}" + (f", got {given[:_LONGEST]!r}" if isinstance(given, str) else "")
    if said.startswith("Expected ") and "got " not in said and "regex" not in said:
        said += _got(given, "of length" in said)
    return f"{where}{said[0].lower()}{said[1:]}" if where else said


def near(given: str, allowed: list[str]) -> str:
    """What may have been meant, else everything that there is."""
    found = get_close_matches(given, allowed, n=1)
    return f"did you mean {found[0]!r}?" if found else f"there are: {', '.join(allowed)}"


def _instead(given: str, allowed: list[str]) -> str:
    return f"{given!r}; {near(given, allowed)}"


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _numbers(each, f"{name}[{number}]")


def _at(value: Any, path: str) -> Any:
    """What is at `path` in `value`; None where the path does not say in which entry."""
    for name, index in _STEP.findall(path):
        if name and isinstance(value, Mapping):
            value = value.get(name)
        elif index.isdigit() and isinstance(value, list | tuple) and int(index) < len(value):
            value = value[int(index)]
        else:
            return None
    return value


def _got(value: Any, length: bool) -> str:
    if length:
        return f", got {len(value)}" if isinstance(value, str | list | tuple | Mapping) else ""
    return f", got {value}" if isinstance(value, int | float | str) else ""


def _got_digits(value: Any, expected: int) -> str:
    # What was given is not shown: somebody may have put a secret where a digest or a public key belongs.
    if not isinstance(value, str):
        return ""
    return f", got {len(value)} characters" if len(value) != expected else ", got other characters among them"


def _types(kind: Any, path: str) -> list[inspect.Type]:
    """What may be at `path`, such as .stages[0] or .deadlines[...]."""
    there = _each(inspect.type_info(kind))
    for name, index in _STEP.findall(path):
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
