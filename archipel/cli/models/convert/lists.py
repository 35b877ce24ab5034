"""The text of `archipel convert --list`: strategies, losses and the other choices, with their options."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from archipel.bundle import PrivacyPolicy
from archipel.cli.input_output.settings import meanings, rows, settings_of, wrapped
from archipel.cli.input_output.strategy_options import strategy_settings
from archipel.cli.models.convert.analysis_options import KINDS
from archipel.cli.models.convert.policy_options import policy_settings
from archipel.cli.models.convert.training_options import SCHEDULES, TRANSFORMS
from archipel.preprocessing import TRANSFORMS as INPUT_TRANSFORMS
from archipel.preprocessing.transform import kind_of
from archipel.strategies.device import UPLOAD_OPTIONS, Upload
from archipel.strategies.registry import STRATEGIES
from archipel.training.by_name import LOSSES, OPTIMIZERS


def strategies_text() -> str:
    """Every strategy with its own options, then the options of all."""
    blocks = []
    for name, strategy in sorted(STRATEGIES.items()):
        own = [setting for option, setting in strategy_settings(name).items() if option not in UPLOAD_OPTIONS]
        about = sys.modules[strategy.device.__module__].__doc__
        meaning = _paragraph(strategy.device.__doc__, indent=8) if own else []
        server = ", ".join(f"{key}={value:g}" for key, value in strategy.server_hyperparameters.items())
        of_tasks = wrapped(f"hyperparameters of a task for the server's half: {server}", 2)
        blocks.append("\n".join([name, *_paragraph(about, indent=2), *of_tasks, *rows(own), *meaning]))
    every = settings_of(Upload)
    common = rows((every[option] for option in UPLOAD_OPTIONS), meanings(Upload))
    return "\n\n".join(["Strategies, with the options that --strategy-option NAME=VALUE sets", *blocks,
                        "\n".join(["every strategy", *common])])  # fmt: skip


def _makers_text(title: str, makers: Mapping[str, Callable[..., Any]], but: tuple[str, ...] = ()) -> str:
    blocks = [title]
    for name, make in makers.items():
        own = [setting for option, setting in settings_of(make).items() if option not in but]
        blocks.append("\n".join([name, *_paragraph(make.__doc__, indent=2), *rows(own, meanings(make))]))
    return "\n\n".join(blocks)


def policy_text() -> str:
    """Every field of the privacy policy, with the default of `convert`."""
    about = "The privacy policy, for --policy FILE and --policy-option NAME=VALUE: bounds that devices insist on"
    return "\n".join([about, "", *rows(policy_settings().values(), meanings(PrivacyPolicy))])


LISTS: Mapping[str, Callable[[], str]] = {
    "strategies": strategies_text,
    "losses": lambda: _makers_text("Losses, with the options that --loss-option NAME=VALUE sets", LOSSES),
    "optimizers": lambda: _makers_text("Optimizers, with the options that --optimizer-option NAME=VALUE sets; lr, "
                                       "momentum and weight_decay have options of their own", OPTIMIZERS),
    "schedules": lambda: _makers_text("Schedules of --lr over the steps of a round, for --schedule "
                                      "NAME:ARGUMENT=VALUE,...", SCHEDULES, but=("lr", "schedule")),
    "transforms": lambda: _makers_text("Changes of gradients, for --transform NAME:ARGUMENT=VALUE,...", TRANSFORMS),
    "preprocess": lambda: _makers_text("Transforms of raw inputs, for the [[preprocess]] tables of --preprocess, each "
                                       "with a kind", {kind_of(kind.__name__): kind for kind in INPUT_TRANSFORMS}),
    "policy": policy_text,
    "statistics": lambda: _makers_text("Statistics of outputs, for the [[statistic]] tables of --analysis, each with "
                                       "a kind", KINDS),
}  # fmt: skip
"""What --list can list, by name."""
ALL = "all"


def list_text(what: str) -> str:
    """One of LISTS, or all of them."""
    names = LISTS if what == ALL else (what,)
    return "\n\n\n".join(LISTS[name]() for name in names)


def _paragraph(documentation: str | None, indent: int) -> list[str]:
    """The first paragraph as lines."""
    return wrapped(" ".join(inspect.cleandoc(documentation or "").partition("\n\n")[0].split()), indent)
