"""The options of `archipel convert` for what is settled of the model before anything else: fixed inputs, loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from archipel.cli.input_output.option_group import option_group
from archipel.converter.sources import read_model
from archipel.errors import CommandError
from archipel.graph import Model


@dataclass(frozen=True)
class ModelOptions:
    """`fixed`: NAME=NUMBER texts of inputs and free sizes; `limit_loops`: the most iterations of loops without a
    bound."""

    fixed: tuple[str, ...]
    limit_loops: int | None

    def settle(self, source: Path | Model) -> Path | Model:
        """The source as it is if nothing is given, else its model with all of this. Raises ArchipelError."""
        if not self.fixed and self.limit_loops is None:
            return source
        model = source if isinstance(source, Model) else read_model(source, None)
        names = {port.name for port in model.inputs}
        given = dict(map(_number, self.fixed))
        values = {name: number for name, number in given.items() if name in names}
        sizes = {name: _whole(name, number) for name, number in given.items() if name not in names}
        if given:
            model = model.fix(values, sizes)
        return model if self.limit_loops is None else model.limit_loops(self.limit_loops)


def _number(text: str) -> tuple[str, int | float]:
    name, equals, value = text.rpartition("=")
    convert: Callable[[str], int | float]
    for convert in (int, float) if equals and name else ():
        try:
            return name, convert(value)
        except ValueError:
            continue
    raise CommandError(f"--fix {text}: give NAME=NUMBER, an input or a free size of the model and its value")


def _whole(name: str, number: float) -> int:
    if not isinstance(number, int):
        raise CommandError(f"--fix {name}={number}: no input has this name, and a size is a whole number")
    return number


model_options = option_group(
    "model_settings",
    ModelOptions,
    click.option("--fix", "fixed", multiple=True, metavar="NAME=NUMBER",
                 help="Give an input one value for good, such as a sampling rate or a state of zeros, or a free size a "
                 "number; may be given several times. Branches that this decides go."),
    click.option("--limit-loops", type=click.IntRange(1), metavar="N",
                 help="Stop loops that only their condition ends after N iterations."),
)  # fmt: skip
