"""Checks values that people write into files or code; errors name the field and what may be there instead."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote

import msgspec
from msgspec import inspect

from archipel.errors import ArchipelError
from archipel.protocol.mistakes import split, tell

T = TypeVar("T")
Hook = Callable[[type, Any], Any]
_PLACE = re.compile(r"(.*?)(?: - at (?:`(?P<key>key)` in )?`\$(?P<path>.*)`)?", re.S)
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_NAMES = "letters, digits, '.', '_' and '-', the first a letter or digit"
_DIGITS = re.compile(r"regex '\^\[0-9a-f\]\{(\d+)\}")
_LONGEST = 100


def read_path(kind: type, value: Any) -> Any:
    """msgspec's hook for types that it does not know: a path is written as a text. Raises ValueError for others."""
    if kind is not Path or not isinstance(value, str | os.PathLike):
        raise ValueError(f"expected a {kind.__name__.lower()}, got {value!r:.100}")
    # Path("") is the working directory, which nobody means by an empty text.
    if value == "":
        raise ValueError("expected a path, got ''")
    return Path(value)


def convert(values: Mapping[str, Any], kind: type[T], hook: Hook = read_path) -> T:
    """`values` as a `kind`, strictly. Raises ValueError that names the field, what was expected, and what came: of all
    fields that are wrong (`mistakes.tell`)."""
    # TOML has inf and nan, which no setting means; a bound such as ge=0 would let both pass.
    mistakes = {name: _not_finite(name, value) for name, value in _numbers(values, "") if not math.isfinite(value)}
    try:
        converted = msgspec.convert(values, kind, dec_hook=hook)
    except msgspec.ValidationError as error:
        found = list(_mistakes(values, kind, "", hook)) or [explain(error, kind, value=values)]
    except ArchipelError as error:  # of the struct itself, which did not get to the fields after it
        found = list(_mistakes(values, kind, "", hook))
        if not mistakes and len(found) < 2:
            raise
        found = found or [str(error)]
    else:
        found = []
    # What is not finite is not told twice.
    found = [text for text in found if text.partition(":")[0] not in mistakes]
    if mistakes or found:
        raise ValueError(tell([*mistakes.values(), *found]))
    return converted


def convert_one(name: str, value: Any, kind: Any, hook: Hook = read_path, *, strict: bool = True) -> Any:
    """`value` as a `kind`; unless `strict` it may be the text of one. Raises ValueError, which begins with `name`."""
    try:
        converted = msgspec.convert(value, kind, dec_hook=hook, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(explain(error, kind, name, value)) from None
    # After the conversion, in which the text "nan" may have become a number.
    for where, number in _numbers(converted, name):
        _check_finite(where, number)
    return converted


def conform(struct: msgspec.Struct) -> None:
    """Check and convert the fields of a struct that code made: msgspec checks only what it decodes.

    A text becomes a path, a list a tuple, and a number of NumPy a Python number, where the field's type asks for it. A
    mapping stays the caller's own object and is not checked. Raises ValueError that names the field.
    """
    for name, kind in type_hints(type(struct)).items():
        value = getattr(struct, name)
        # msgspec takes Python's own numbers only; NumPy registers its numbers with these abstract types.
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
    """The text of `error`, reworded for people. `name` is that of a single value; else the error's path names it."""
    match = _place(error)
    text, path = match[1], match["path"] or ""
    if len(several := split(text)) > 1:  # of the struct at that place
        place = path.lstrip(".") if not name else f"{name}{path}"
        return tell([f"{place}: {each}" if place else each for each in several])
    place = path.lstrip(".") if not name else f"{name}{path}"
    where = f"{place}: " if place else ""
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", text):
        return f"{where}unknown field {_quote_with_hint(unknown[1], _field_names(kind, path))}"
    if missing := re.fullmatch("Object missing required field `(.*)`", text):
        return f"{where}the field {missing[1]!r} is missing"
    if wrong := re.fullmatch("Invalid enum value '(.*)'", text):
        return f"{where}unknown value {_quote_with_hint(wrong[1], _literals(kind, path, bool(match['key'])))}"
    # The path of a wrong key is that of its mapping, which is not what was wrong.
    given = None if match["key"] else _value_at(value, path)
    if digits := _DIGITS.search(text):
        return f"{where}expected {digits[1]} hexadecimal digits{_describe_digits(given, int(digits[1]))}"
    if "regex '^[A-Za-z0-9]" in text:
        return f"{where}expected {_NAMES}" + (f", got {given[:_LONGEST]!r}" if isinstance(given, str) else "")
    if text.startswith("Expected ") and "got " not in text and "regex" not in text:
        text += _describe_given(given, "of length" in text)
    return f"{where}{text[0].lower()}{text[1:]}" if where else text


def pointer(error: msgspec.ValidationError) -> str:
    """The JSON pointer (RFC 6901, as a URI's fragment) to the field that `error` is about, such as #/stages/0/percent.

    It ends before an entry of a mapping, which the error does not name.
    """
    match = _place(error)
    path = (match["path"] or "").partition("[...]")[0]
    field = re.fullmatch("Object (?:contains unknown|missing required) field `(.*)`", match[1])
    steps = [name or index for name, index in _STEP.findall(path)] + ([field[1]] if field else [])
    return "#" + "".join(f"/{quote(step.replace('~', '~0').replace('/', '~1'), safe='~')}" for step in steps)


def suggest(given: str, allowed: list[str]) -> str:
    """A hint with the allowed name that is closest to `given`, or with all of them where none is close."""
    close = get_close_matches(given, allowed, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(allowed)}"


def _place(error: msgspec.ValidationError) -> re.Match[str]:
    # msgspec's errors have only a text: "Expected `int`, got `str` - at `$.stages[0].percent`".
    match = _PLACE.fullmatch(str(error))
    assert match is not None
    return match


def _quote_with_hint(given: str, allowed: list[str]) -> str:
    return f"{given!r}; {suggest(given, allowed)}"


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(_not_finite(name, value))


def _not_finite(name: str, value: float) -> str:
    return f"{name}: expected a finite number, got {value}"


def _mistakes(value: Any, kind: Any, name: str, hook: Hook) -> Iterator[str]:
    """What is wrong with `value`, the field `name`, as a `kind`: in the order in which it is written, and then what is
    missing. msgspec itself ends at the first mistake that it meets, so each field is converted alone."""
    try:
        msgspec.convert(value, kind, dec_hook=hook)
        return
    except msgspec.ValidationError as error:
        whole = explain(error, kind, name, value)
    except ArchipelError as error:
        whole = str(error)
    below = list(_mistakes_below(value, kind, name, hook))
    yield from below or split(whole)


def _mistakes_below(value: Any, kind: Any, name: str, hook: Hook) -> Iterator[str]:
    kinds = _without_bounds(kind)
    structs = [each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    if isinstance(value, Mapping) and len(structs) == 1 and structs[0].__struct_config__.tag is None:
        struct, hints = structs[0], type_hints(structs[0])
        fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
        for key, each in value.items():
            place = f"{name}.{key}" if name else str(key)
            if key in fields:
                yield from _mistakes(each, hints[fields[key].name], place, hook)
            elif struct.__struct_config__.forbid_unknown_fields:
                where = f"{name}: " if name else ""
                yield f"{where}unknown field {_quote_with_hint(str(key), list(fields))}"
        for key, field in fields.items():
            if field.required and key not in value:
                yield f"{name}: the field {key!r} is missing" if name else f"the field {key!r} is missing"
    elif isinstance(value, Mapping):
        for each in (get_args(each)[1] for each in kinds if get_origin(each) in (dict, Mapping)):
            for key, inner in value.items():
                yield from _mistakes(inner, each, f"{name}.{key}" if name else str(key), hook)
    elif isinstance(value, list | tuple):
        for each in kinds:
            origin: Any = get_origin(each)
            if origin is list or (origin is tuple and get_args(each)[1:] == (...,)):
                for number, inner in enumerate(value):
                    yield from _mistakes(inner, get_args(each)[0], f"{name}[{number}]", hook)


def _without_bounds(kind: Any) -> list[Any]:
    """The members of a union, without their bounds; any other type alone."""
    if get_origin(kind) is Annotated:
        return _without_bounds(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [each for member in get_args(kind) for each in _without_bounds(member)]
    return [kind]


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _numbers(each, f"{name}[{number}]")


def _value_at(value: Any, path: str) -> Any:
    """The value at `path` in `value`; None where the path does not say in which entry ("[...]")."""
    for name, index in _STEP.findall(path):
        if name and isinstance(value, Mapping):
            value = value.get(name)
        elif index.isdigit() and isinstance(value, list | tuple) and int(index) < len(value):
            value = value[int(index)]
        else:
            return None
    return value


def _describe_given(value: Any, length: bool) -> str:
    if length:
        return f", got {len(value)}" if isinstance(value, str | list | tuple | Mapping) else ""
    return f", got {value}" if isinstance(value, int | float | str) else ""


def _describe_digits(value: Any, expected: int) -> str:
    # The value is not shown: somebody may have put a secret where a digest or a public key belongs.
    if not isinstance(value, str):
        return ""
    return f", got {len(value)} characters" if len(value) != expected else ", got other characters among them"


def _types(kind: Any, path: str) -> list[inspect.Type]:
    """The types that a value at `path`, such as .stages[0] or .deadlines[...], may have."""
    types = _alternatives(inspect.type_info(kind))
    for name, index in _STEP.findall(path):
        below: list[inspect.Type] = []
        for outer in types:
            if isinstance(outer, inspect.StructType) and name:
                below += [field.type for field in outer.fields if field.encode_name == name]
            elif isinstance(outer, inspect.DictType):
                below.append(outer.value_type)
            elif isinstance(outer, inspect.ListType | inspect.VarTupleType) and index:
                below.append(outer.item_type)
        types = [alternative for inner in below for alternative in _alternatives(inner)]
    return types


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """The members of a union; any other type alone."""
    return list(kind.types) if isinstance(kind, inspect.UnionType) else [kind]


def _field_names(kind: Any, path: str) -> list[str]:
    structs = (each for each in _types(kind, path) if isinstance(each, inspect.StructType))
    return [field.encode_name for struct in structs for field in struct.fields]


def _literals(kind: Any, path: str, key: bool) -> list[str]:
    """The literals that are allowed at `path`; with `key`, as keys of the mapping there."""
    types = _types(kind, path)
    if key:
        types = [each.key_type for each in types if isinstance(each, inspect.DictType)]
    return [str(value) for each in types if isinstance(each, inspect.LiteralType) for value in each.values]
