"""The settings of a device that `archipel device` runs: one TOML file, each overridable by an environment variable."""

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


class _DeviceFile(AgentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a settings file may say: every setting of the agent, and these."""

    report: tuple[str, ...] = ()
    """Conditions whose present values are told as attributes."""
    conditions: ConditionSettings = ConditionSettings()
    examples: ExampleSettings | None = None


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
        attributes = _Told(self.config.attributes, conditions, self.report)
        return msgspec.structs.replace(self.config, attributes=attributes), conditions


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
