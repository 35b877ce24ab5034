"""The settings of a device that `archipel device` runs: one TOML file, each overridable by an environment variable."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from archipel.client.conditions.conditions import Conditions, ConditionSettings
from archipel.client.config import AgentConfig, Attribute
from archipel.errors import ClientError
from archipel.protocol import written

ENVIRONMENT_PREFIX = "ARCHIPEL_DEVICE_"
_MAX_BYTES = 1 << 20


class ExampleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the local examples are: in a file of the owner's, or in the device's encrypted store."""

    file: str = ""
    """.npz or .safetensors, an array for each field of the bundle; read whenever a round needs it."""
    store: bool = False
    """FOLDER/examples, under the device's data key; `archipel device examples add` and apps fill it."""
    max_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    """Of the store: the oldest examples go when it is full."""
    max_age: Annotated[float, Meta(gt=0)] = 30 * 86400.0
    """Of the store: older examples go. Seconds."""

    def __post_init__(self) -> None:
        if bool(self.file) == self.store:
            raise ValueError('set one of file = "data.npz" and store = true')


@dataclass(frozen=True)
class DeviceSettings:
    """What a settings file says. Paths in it start in its folder."""

    file: Path
    config: AgentConfig
    conditions: ConditionSettings
    report: tuple[str, ...] = ()
    examples: ExampleSettings | None = None

    def prepared(self) -> tuple[AgentConfig, Conditions]:
        """What an Agent is made of. Its attributes are the file's, and what the probes in `report` measure when told.

        Raises ClientError where `report` names a probe that is not among the conditions.
        """
        conditions = self.conditions.conditions(self.config.folder)
        there = [probe.name for probe in conditions.probes]
        for name in self.report:
            if name not in there:
                raise ClientError(
                    f"{self.file}: report: {name!r} is not measured; [conditions] has: {', '.join(there) or 'nothing'}"
                )
        if not self.report:
            return self.config, conditions
        told = _Told(self.config.attributes, conditions, self.report)
        return replace(self.config, attributes=told), conditions


class _Told(Mapping[str, Attribute]):
    """Attributes, some of them measured whenever somebody begins to read all."""

    def __init__(self, fixed: Mapping[str, Attribute], conditions: Conditions, report: tuple[str, ...]) -> None:
        self._fixed, self._conditions, self._report = fixed, conditions, report
        self._last: Mapping[str, Attribute] = fixed

    def __iter__(self) -> Iterator[str]:
        measured = self._conditions.values()
        self._last = {**self._fixed, **{name: measured[name] for name in self._report if name in measured}}
        return iter(self._last)

    def __getitem__(self, name: str) -> Attribute:
        return self._last[name]

    def __len__(self) -> int:
        return len(self._last)


def load_device_settings(path: Path | str, *, environment: Mapping[str, str] | None = None) -> DeviceSettings:
    """Read `path`, then the environment. Raises ClientError, one line that names file or variable and the setting."""
    path = Path(path).absolute()
    values = _read(path)
    told = _from_environment(os.environ if environment is None else environment)
    for table, name in told:
        if table and not isinstance(values.setdefault(table, {}), dict):
            raise ClientError(f"{path}: {table}: expected a table, [{table}]")
        (values[table] if table else values)[name] = told[table, name][1]
    try:
        found: Any = written.convert(values, _FILE)
    except ValueError as error:
        raise ClientError(f"{path}: {error}") from None
    here = path.parent
    try:
        config = AgentConfig(**_given(found, values, _AGENT, here))
        conditions = ConditionSettings(**_given(found.conditions, values.get("conditions", {}), _CONDITIONS, here))
    except ClientError as error:
        # AgentConfig's and ConditionSettings' own bounds, which begin with the setting's name.
        name = str(error).split(" ", 1)[0].rstrip(":")
        source = next((variable for (_, each), (variable, _) in told.items() if each == name), None)
        raise ClientError(f"{f'environment variable {source}' if source else path}: {error}") from None
    examples = found.examples
    if examples is not None and examples.file:
        examples = msgspec.structs.replace(examples, file=str(here / examples.file))
    return DeviceSettings(path, config, conditions, found.report, examples)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ClientError(f"{path}: cannot be read ({error.strerror}); `archipel device init` writes one") from None
    if len(data) > _MAX_BYTES:
        raise ClientError(f"{path}: more than {_MAX_BYTES} bytes, so not a file of settings")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError:
        raise ClientError(f"{path}: no TOML, which is text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ClientError(f"{path}: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> dict[tuple[str, str], tuple[str, Any]]:
    """Variable and value by table ("" is the top) and setting."""
    known = {ENVIRONMENT_PREFIX + f"{table}_{name}".lstrip("_").upper(): (table, name) for table, name in _PLACES}
    found = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        place = known.get(variable)
        if place is None:
            near = get_close_matches(variable, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(known))}"
            raise ClientError(f"environment variable {variable}: no such setting; {hint}")
        kind = _PLACES[place]
        raw: object = [each for each in text.split(",") if each] if kind in _LISTS else text
        try:
            value = msgspec.convert(raw, kind, strict=False)
        except msgspec.ValidationError as error:
            raise ClientError(written.explain(error, kind, f"environment variable {variable}")) from None
        found[place] = (variable, list(value) if kind in _LISTS else value)
    return found


def _given(found: Any, values: Mapping[str, Any], kinds: Mapping[str, Any], here: Path) -> dict[str, Any]:
    """Of the settings `kinds` those that are there; the others keep their own defaults."""
    given = {name: getattr(found, name) for name in kinds if name in values}
    for name in _PATHS & given.keys():
        given[name] = here / given[name]
    return given


def _kind(hint: Any) -> Any:
    """How TOML writes a value of this type."""
    if hint in (Path, Path | None):
        return Annotated[str, Meta(min_length=1)]
    if getattr(hint, "__origin__", None) in _SEQUENCES:
        return tuple[hint.__args__[0], ...]
    return dict[str, Attribute] if getattr(hint, "__origin__", None) is Mapping else hint


_SEQUENCES = (list, tuple, Sequence)
_HINTS = get_type_hints(AgentConfig)
_AGENT = {field.name: _kind(_HINTS[field.name]) for field in fields(AgentConfig)}
_CONDITIONS = {name: _kind(hint) for name, hint in get_type_hints(ConditionSettings).items()}
_PATHS = {name for name, hint in _HINTS.items() if hint in (Path, Path | None)}
_REQUIRED = [field.name for field in fields(AgentConfig) if field.default is field.default_factory is MISSING]
_STRICT: dict[str, Any] = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}

# Made of the classes themselves: a setting that these get is one of the file's, too. Defaults stay theirs.
_TABLE = msgspec.defstruct("Conditions", [(name, kind, None) for name, kind in _CONDITIONS.items()], **_STRICT)
_FILE = msgspec.defstruct(
    "Device",
    [
        *((name, kind) if name in _REQUIRED else (name, kind, None) for name, kind in _AGENT.items()),
        ("report", tuple[str, ...], ()),
        ("conditions", _TABLE, _TABLE()),
        ("examples", ExampleSettings | None, None),
    ],
    **_STRICT,
)
_PLACES: dict[tuple[str, str], Any] = {
    **{("", name): kind for name, kind in _AGENT.items() if name != "attributes"},
    ("", "report"): tuple[str, ...],
    **{("conditions", name): kind for name, kind in _CONDITIONS.items()},
    **{("examples", name): kind for name, kind in get_type_hints(ExampleSettings, include_extras=True).items()},
}
_LISTS = {kind for kind in _PLACES.values() if getattr(kind, "__origin__", None) is tuple}
