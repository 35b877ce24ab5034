"""The settings of a program: one TOML file, each setting overridable by an environment variable.

A struct says which settings there are; a field that is a struct itself is a table of the file. What is wrong is said in
one line: in which file or variable, which setting, what was expected, what came.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from archipel.errors import ArchipelError
from archipel.protocol import written

T = TypeVar("T", bound=msgspec.Struct)
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a setting is written: `table` is empty at the top of the file. `kind` is its type with its bounds."""

    table: str
    name: str
    kind: Any
    listed: bool

    @property
    def dotted(self) -> str:
        return f"{self.table}.{self.name}" if self.table else self.name

    def variable(self, prefix: str) -> str:
        return prefix + (f"{self.table}_{self.name}" if self.table else self.name).upper()


def load(
    path: Path,
    kind: type[T],
    *,
    prefix: str,
    environment: Mapping[str, str],
    remedy: str,
    given: Mapping[str, object] | None = None,
    only_given: Mapping[str, str] | None = None,
) -> T:
    """Read the settings in the file `path`, then those in the environment, then what is `given` by the caller.

    Paths start in the file's folder. The variable PREFIX + NAME sets NAME, PREFIX + TABLE_NAME one in a table; lists
    are separated by commas, and mappings are in the file only. `remedy`: what to do where there is no file.
    `only_given`: settings that neither the file nor the environment can set, each with the reason. Raises ValueError,
    one line, also for the ArchipelErrors that the structs raise of their own.
    """
    hook = partial(_read_path, path.parent)
    values = _read(path, remedy)
    for name, reason in (only_given or {}).items():
        if name in values:
            raise ValueError(f"{path}: {name!r} {reason}")
    sources: dict[str, str] = {}
    for place, variable, value in _from_environment(environment, prefix, kind, only_given or {}, hook):
        table = values.setdefault(place.table, {}) if place.table else values
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {place.table}: expected a table, [{place.table}]")
        table[place.name] = value
        sources[place.dotted] = f"environment variable {variable}"
    hints = written.type_hints(kind)
    for name, value in (given or {}).items():
        values[name] = written.convert_one(name, value, hints[name], hook) if name in hints else value
    try:
        return written.convert(values, kind, hook)
    except (ValueError, ArchipelError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{_source(said, sources) or path}: {said}") from None


def _read(path: Path, remedy: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path}: more than {MAX_BYTES} bytes, so not a file of settings")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{path}: no TOML, which is text in UTF-8") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply for a file of settings") from None
    except ValueError as error:
        # Of TOML, or of Python for a number with thousands of digits.
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def _from_environment(
    environment: Mapping[str, str], prefix: str, kind: type[T], besides: Mapping[str, str], hook: written.Hook
) -> Iterator[tuple[Place, str, Any]]:
    known = {place.variable(prefix): place for place in _places(kind) if place.dotted not in besides}
    for variable, text in environment.items():
        if not variable.startswith(prefix):
            continue
        if variable not in known:
            hint = written.near(variable, sorted(known))
            raise ValueError(f"environment variable {variable}: no such setting; {hint}")
        place = known[variable]
        raw: object = [each for each in text.split(",") if each] if place.listed else text
        name = f"environment variable {variable}"
        yield place, variable, written.convert_one(name, raw, place.kind, hook, strict=False)


def _places(kind: type[msgspec.Struct], table: str = "") -> Iterator[Place]:
    """Where a variable can set something: everywhere but in mappings."""
    hints = written.type_hints(kind)
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        types = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        structs = [each.cls for each in types if isinstance(each, inspect.StructType)]
        if structs:
            yield from _places(structs[0], field.name)
        elif not any(isinstance(each, inspect.DictType) for each in types):
            listed = any(isinstance(each, inspect.VarTupleType | inspect.ListType) for each in types)
            yield Place(table, field.name, hints[field.name], listed)


def _source(said: str, sources: Mapping[str, str]) -> str:
    """The variable that set what an error is about, which begins with the setting's name; empty if none did."""
    about = said.split(" ", 1)[0].rstrip(":")
    # What a table's own struct says of a setting begins with its name alone.
    return next((source for name, source in sources.items() if about in (name, name.rpartition(".")[2])), "")


def _read_path(folder: Path, kind: type, value: Any) -> Any:
    return folder / written.read_path(kind, value)
