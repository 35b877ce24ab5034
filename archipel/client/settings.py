"""The settings of `archipel device`: one TOML file; an environment variable overrides each setting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from archipel.client.conditions.conditions import Conditions, ConditionSettings
from archipel.client.config import AgentConfig, Attribute
from archipel.errors import ClientError
from archipel.protocol import settings_file

ENVIRONMENT_PREFIX = "ARCHIPEL_DEVICE_"


class ExampleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the local examples are: in a file, a folder or a database of the owner, or in the device's encrypted store.

    They are read whenever a round needs them.
    """

    file: str = ""
    """A .npz or .safetensors file with an array for each field of the bundle, or a file or folder of tables, pictures
    or sounds (archipel.datasets.open_file)."""
    database: str = ""
    """The URL of a database (SQLAlchemy), whose answer to `query` has the examples, one a row."""
    query: str = ""
    fields: dict[str, list[str]] = {}
    """By field of the bundle the columns of the file or query that it is made of; by default each column is a field."""
    classes: dict[str, list[str]] = {}
    """By column the names of the classes 0, 1, ..., the same at every site."""
    store: bool = False
    """Use the encrypted store FOLDER/examples, which `archipel device examples add` and apps fill."""
    max_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    """The size of the store, in bytes; when it is full, the oldest examples go."""
    max_age: Annotated[float, Meta(gt=0)] = 30 * 86400.0
    """How long the store keeps an example, in seconds."""

    def __post_init__(self) -> None:
        if (bool(self.file), bool(self.database), self.store).count(True) != 1:
            raise ValueError('set one of file = "data.npz", database = "URL" and store = true')
        if bool(self.query) != bool(self.database):
            raise ValueError("database and query belong together: the URL, and a SELECT")
        if self.store and (self.fields or self.classes):
            raise ValueError("fields and classes are of the columns of a file or query, which a store does not have")
        for name, columns in self.fields.items():
            if not columns:
                raise ValueError(f"fields.{name}: expected the names of columns, got none")


class _DeviceFile(AgentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that a file may have: every setting of the agent, and these."""

    report: tuple[str, ...] = ()
    """Conditions whose present values the device reports as attributes."""
    conditions: ConditionSettings = ConditionSettings()
    examples: ExampleSettings | None = None


@dataclass(frozen=True)
class DeviceSettings:
    """The settings in a file. Relative paths in it start in its folder."""

    file: Path
    config: AgentConfig
    conditions: ConditionSettings
    report: tuple[str, ...] = ()
    examples: ExampleSettings | None = None

    def prepare(self) -> tuple[AgentConfig, Conditions]:
        """Make the arguments `config` and `conditions` of an Agent.

        The config's attributes are those of the file, and the values of the probes in `report`, measured at each
        check-in. Raises ClientError if `report` names a probe that is not among the conditions.
        """
        conditions = self.conditions.conditions(self.config.folder)
        names = [probe.name for probe in conditions.probes]
        for name in self.report:
            if name not in names:
                raise ClientError(
                    f"{self.file}: report: {name!r} is not measured; [conditions] has: {', '.join(names) or 'nothing'}"
                )
        if not self.report:
            return self.config, conditions
        attributes = _ReportedAttributes(self.config.attributes, conditions, self.report)
        return msgspec.structs.replace(self.config, attributes=attributes), conditions


class _ReportedAttributes(Mapping[str, Attribute]):
    """Attributes, some of which are measured anew whenever an iteration begins.

    A look-up by name gives the value of the last iteration, so that one copy of the mapping, as `dict` makes it, is of
    one moment. A probe that cannot measure is left out.
    """

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
    """Read a file of settings, and override them by the environment.

    Arguments:
        path: a TOML file, as `archipel device init` writes it.
        environment: the variables, such as ARCHIPEL_DEVICE_FOLDER; None: those of this process.

    Returns:
        The settings; `prepare` makes the arguments of an Agent from them.

    Raises:
        ClientError: one line that names the file or variable and the setting that is wrong.

    Example:
        config, conditions = load_device_settings("device.toml").prepare()
        agent = Agent(config, examples=read_examples, conditions=conditions)
    """
    path = Path(path).absolute()
    try:
        loaded = settings_file.load(
            path,
            _DeviceFile,
            prefix=ENVIRONMENT_PREFIX,
            environment=os.environ if environment is None else environment,
            remedy="`archipel device init` writes one",
        )
    except ValueError as error:
        raise ClientError(str(error)) from None
    examples = loaded.examples
    if examples is not None and examples.file:
        examples = msgspec.structs.replace(examples, file=str(path.parent / examples.file))
    config = AgentConfig(**{name: getattr(loaded, name) for name in AgentConfig.__struct_fields__})
    return DeviceSettings(path, config, loaded.conditions, loaded.report, examples)
