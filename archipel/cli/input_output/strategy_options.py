"""The option --strategy-option, and how errors about the options of a strategy are spelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from archipel.cli.input_output.settings import Setting, read_settings, settings_of
from archipel.cli.input_output.spelling import rule
from archipel.strategies.device import UPLOAD_OPTIONS, Upload
from archipel.strategies.registry import STRATEGIES

OPTION = "--strategy-option"
STRATEGY_RULES = [
    rule(r"needs the option '(\w+)'; pass strategy_options=\{\.\.\.\}", rf"needs {OPTION} \1=VALUE"),
    rule(r"strategy_options=\{'(\w+)': \.\.\.\}", rf"{OPTION} \1=VALUE"),
    rule(r"^(strategy '[^']*'): (\w+)(?= must)", rf"\1: {OPTION} \2"),
]

strategy_option = click.option(
    OPTION,
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the strategy, such as mu=0.1 (fedprox) or clip=1; may be given several times. "
    "`archipel convert --list strategies` lists all.",
)


def strategy_settings(name: str) -> dict[str, Setting]:
    """The options of a strategy's device half by name: its own, then those that every strategy has."""
    upload = settings_of(Upload)
    common = {option: upload[option] for option in UPLOAD_OPTIONS}
    return {**settings_of(STRATEGIES[name].device, but=("upload",)), **common}


def read_strategy_options(strategy: str, texts: Sequence[str]) -> dict[str, Any]:
    """The options in NAME=VALUE texts. Raises CommandError that lists the strategy's options."""
    return read_settings(OPTION, texts, strategy_settings(strategy), strategy)
