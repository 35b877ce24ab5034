"""Options of the form NAME=VALUE: what a function takes or a dataclass has, read from text and listed as text.

The names, types and defaults are those of the function itself, so that neither the check nor the list can be out of
date.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any

from archipel.errors import CommandError

NEEDED = inspect.Parameter.empty
"""The default of a setting that has none."""
NOTHING = "none"
"""The text for Python's None."""

_SINGLE: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """An argument of a function, or a field of a dataclass: its type and its default, NEEDED where it has none."""

    name: str
    hint: Any
    default: Any = NEEDED

    @property
    def needed(self) -> bool:
        """Whether there is no default."""
        return self.default is NEEDED

    @property
    def allowed(self) -> str:
        """The type in the words of the command line: `number`, `a | b`, `list of text`, `whole number or none`."""
        kinds = dict.fromkeys(_kind(hint) for hint in _alternatives(self.hint))
        return " or ".join(sorted(kinds, key=lambda kind: kind == NOTHING))

    @property
    def shown(self) -> str:
        """The default as text that `read` takes."""
        if self.needed:
            return "(needed)"
        if isinstance(self.default, bool):
            return "true" if self.default else "false"
        if isinstance(self.default, Sequence) and not isinstance(self.default, str):
            return ",".join(map(_plain, self.default)) or '""'
        return NOTHING if self.default is None else _plain(self.default)

    def read(self, text: str) -> Any:
        """The value that the text means. Raises ValueError that says what was expected."""
        for hint in _alternatives(self.hint):
            try:
                return _read(text, hint)
            except ValueError:
                continue
        raise ValueError(f"expected {self.allowed}, got {text!r}")


def settings_of(maker: Callable[..., Any], but: Collection[str] = ()) -> dict[str, Setting]:
    """The arguments of a function, or the fields of a dataclass or struct, by name, without those of `but`."""
    hints = typing.get_type_hints(maker)
    parameters = inspect.signature(maker).parameters.values()
    return {p.name: Setting(p.name, hints[p.name], p.default) for p in parameters if p.name not in but}


def read_settings(
    option: str, texts: Iterable[str], known: Mapping[str, Setting], of: str, but: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The values of NAME=VALUE texts by name. Raises CommandError that names `option` and lists the names of `of`.

    `but` are names that an option of their own sets, with that option.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        setting = known.get(name.strip())
        if setting is None and name in (but or {}):
            raise CommandError(f"{option} {text}: give {(but or {})[name]} instead")
        if setting is None or not equals:
            raise CommandError(f"{option} {text}: {_unknown(name.strip(), equals, known, of)}")
        if setting.name in values:
            raise CommandError(f"{option} {text}: {setting.name} is given twice")
        try:
            values[setting.name] = setting.read(value.strip())
        except ValueError as error:
            raise CommandError(f"{option} {text}: {error}") from None
    return values


def read_call(option: str, text: str, makers: Mapping[str, Callable[..., Any]], first: object = NEEDED) -> Any:
    """What the function makes that the text calls: NAME, or NAME:ARGUMENT=VALUE,ARGUMENT=VALUE.

    `first` is the function's first argument, where the caller has it. Raises CommandError that names `option`.
    """
    name, _, arguments = text.partition(":")
    make = makers.get(name)
    if make is None:
        raise CommandError(f"{option} {text}: there is no {name!r}; there are {', '.join(sorted(makers))}")
    known = settings_of(make)
    given = () if first is NEEDED else (first,)
    for taken in list(known)[: len(given)]:
        del known[taken]
    values = read_settings(option, filter(None, arguments.split(",")), known, name)
    missing = [each.name for each in known.values() if each.needed and each.name not in values]
    if missing:
        raise CommandError(f"{option} {text}: {missing[0]} is missing; write {name}:{missing[0]}=VALUE")
    return make(*given, **values)


def rows(settings: Iterable[Setting], meanings: Mapping[str, str] | None = None) -> list[str]:
    """A line for each: name, default, type. What `meanings` says of it follows in lines of its own."""
    cells = [(setting.name, setting.shown, setting.allowed) for setting in settings]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(2)]
    lines = []
    for name, default, allowed in cells:
        lines.append(f"    {name:<{widths[0]}}  {default:<{widths[1]}}  {allowed}")
        if meanings and name in meanings:
            lines += wrapped(meanings[name], indent=8)
    return lines


def wrapped(text: str, indent: int) -> list[str]:
    """The text in lines of at most 110 characters, without the marks of Python."""
    plain = re.sub(r"\bNone\b", NOTHING, re.sub(r"`([^`]+)`", r"\1", text))
    margin = " " * indent
    return textwrap.wrap(plain, 110, initial_indent=margin, subsequent_indent=margin)


def meanings(documented: Any) -> dict[str, str]:
    """What its documentation says of each argument under "Arguments:", in entries `name: text` and `a, b: text`."""
    if isinstance(documented, type):  # with what its bases say of the fields that it inherits
        bases = [_documented(base.__doc__) for base in reversed(documented.__mro__)]
        return {name: text for found in bases for name, text in found.items()}
    return _documented(documented.__doc__)


def _documented(documentation: str | None) -> dict[str, str]:
    _, _, section = inspect.cleandoc(documentation or "").partition("Arguments:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        entry = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            found.update(dict.fromkeys(names, entry[2]))
        elif line.startswith("        "):
            found.update({name: f"{found[name]} {line.strip()}" for name in names})
        elif line.strip():
            break  # the section's end
    return found


def _alternatives(hint: Any) -> list[Any]:
    """The types of a union that text can mean, None first and str last, since every text is a str."""
    union = typing.get_origin(hint) in (typing.Union, UnionType)
    each = list(typing.get_args(hint)) if union else [hint]
    # A list of texts takes a single one, too.
    if str in each and any(_is_list(other) for other in each):
        each.remove(str)
    known = [h for h in each if h in (type(None), *_SINGLE) or typing.get_origin(h) is typing.Literal or _is_list(h)]
    return sorted(known, key=lambda h: (h is str, h is not type(None)))


def _is_list(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _kind(hint: Any) -> str:
    if hint is type(None):
        return NOTHING
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if _is_list(hint):
        each = (_kind(kind).removeprefix("a ") for kind in _alternatives(typing.get_args(hint)[0]))
        return f"list of {' or '.join(each)}"
    return _SINGLE[hint]


def _read(text: str, hint: Any) -> Any:
    if hint is type(None):
        if text.lower() != NOTHING:
            raise ValueError(text)
        return None
    if typing.get_origin(hint) is typing.Literal:
        if text not in typing.get_args(hint):
            raise ValueError(text)
        return text
    if _is_list(hint):
        return tuple(_read(each.strip(), typing.get_args(hint)[0]) for each in text.split(",") if each.strip())
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return hint(text)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return (value or '""') if isinstance(value, str) else json.dumps(value)


def _unknown(name: str, equals: str, known: Mapping[str, Setting], of: str) -> str:
    there = "; ".join(
        f"{s.name} ({s.allowed}, {'needed' if s.needed else f'default {s.shown}'})" for s in known.values()
    )
    if name in known and not equals:
        return f"expected {name}=VALUE, where VALUE is {known[name].allowed}"
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}{of} has no option {name!r}; " + (f"there are {there}" if known else "it has no options")
