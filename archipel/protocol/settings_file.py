"""The settings of a program: one TOML file, each setting overridable by an environment variable.

A struct defines the settings; a field that is a struct itself is a table of the file. An error is one line: in which
file or variable, which setting, what was expected, what came.
"""

from __future__ import annotations

import json
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
from archipel.protocol.mistakes import split

T = TypeVar("T", bound=msgspec.Struct)
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a setting is written: `table` is empty at the top of the file. `kind` is its type with its bounds.

    `listed`: an environment variable has the setting as a list, separated by commas or in JSON.
    """

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
    """The settings in the file `path`, overridden by those in the environment, and these by `given`.

    Arguments:
        path: a TOML file. Relative paths in it, and in the environment, start in its folder.
        kind: the struct of the settings.
        prefix: the variable PREFIX + NAME sets NAME, PREFIX + TABLE_NAME a setting in a table; a list is separated by
            commas, or in JSON if it begins with `[`, and a mapping can only be in the file.
        environment: variables by name, such as `os.environ`.
        remedy: advice for the error where the file cannot be read.
        given: settings by name that the caller overrides.
        only_given: settings that neither the file nor the environment may set, each with the reason.

    Raises ValueError with one line that tells all mistakes, also for ArchipelErrors that the structs themselves raise.
    """
    hook = partial(_read_path, path.parent)
    values = _read(path, remedy)
    for name, reason in (only_given or {}).items():
        if name in values:
            raise ValueError(f"{path}: {name!r} {reason}")
    # By setting, which variable set it: only there can an error that `convert` finds later be mended.
    sources: dict[str, str] = {}
    named: list[str] = []
    for place, variable, value in _from_environment(environment, prefix, kind, only_given or {}, hook, named):
        table = values.setdefault(place.table, {}) if place.table else values
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {place.table}: expected a table, [{place.table}]")
        table[place.name] = value
        sources[place.dotted] = f"environment variable {variable}"
    hints = written.type_hints(kind)
    for name, value in (given or {}).items():
        values[name] = written.convert_one(name, value, hints[name], hook) if name in hints else value
    try:
        settings = written.convert(values, kind, hook)
    except (ValueError, ArchipelError) as error:
        unnamed = True
        for text in (" ".join(each.split()) for each in split(str(error))):
            # The file's name once, and before what comes from elsewhere the name of that.
            source = _source(text, sources) or (str(path) if unnamed else "")
            unnamed = unnamed and source != str(path)
            named.append(f"{source}: {text}" if source else text)
    if named:
        raise ValueError("; ".join(named))
    return settings


def _read(path: Path, remedy: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            # One byte more shows that the file is larger, without reading all of it.
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
        # tomllib's own error, or Python's for a number with thousands of digits.
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def _from_environment(
    environment: Mapping[str, str],
    prefix: str,
    kind: type[T],
    besides: Mapping[str, str],
    hook: written.Hook,
    wrong: list[str],
) -> Iterator[tuple[Place, str, Any]]:
    """What variables set; what is wrong with others goes to `wrong`."""
    known = {place.variable(prefix): place for place in _places(kind) if place.dotted not in besides}
    for variable, text in environment.items():
        if not variable.startswith(prefix):
            continue
        if variable not in known:
            hint = written.suggest(variable, sorted(known))
            wrong.append(f"environment variable {variable}: no such setting; {hint}")
            continue
        place, name = known[variable], f"environment variable {variable}"
        try:
            raw: object = _items(text, name) if place.listed else text
            # Not strict: the text of a number or a boolean counts as one.
            value = written.convert_one(name, raw, place.kind, hook, strict=False)
        except ValueError as error:
            wrong.append(str(error))
        else:
            yield place, variable, value


def _items(text: str, name: str) -> list[Any]:
    if not text.startswith("["):
        # Without empty parts, so that an empty variable is an empty list.
        return [each for each in text.split(",") if each]
    try:
        found: list[Any] = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(
            f'{name}: what begins with [ is a list in JSON, such as ["a", "b,c"]; this is none, so quote its texts'
        ) from None
    return found


def _places(kind: type[msgspec.Struct], table: str = "") -> Iterator[Place]:
    """The settings that a variable can set: all but those in mappings."""
    hints = written.type_hints(kind)
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        types = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        # A table may be optional, which is a union of a struct and None.
        structs = [each.cls for each in types if isinstance(each, inspect.StructType)]
        if structs:
            yield from _places(structs[0], field.name)
        elif not any(isinstance(each, inspect.DictType) for each in types):
            listed = any(isinstance(each, inspect.VarTupleType | inspect.ListType) for each in types)
            yield Place(table, field.name, hints[field.name], listed)


def _source(text: str, sources: Mapping[str, str]) -> str:
    """The variable that set the setting with whose name the error `text` begins; empty where no variable did."""
    setting = text.split(" ", 1)[0].rstrip(":")
    # An error that a table's own struct raises begins with the name alone, without the table's.
    return next((source for name, source in sources.items() if setting in (name, name.rpartition(".")[2])), "")


def _read_path(folder: Path, kind: type, value: Any) -> Any:
    return folder / written.read_path(kind, value)
