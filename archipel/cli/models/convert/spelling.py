"""Which option of `archipel convert` sets which argument of Python's `convert`, and so how errors spell it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from archipel.cli.input_output.spelling import Rule, argument_rules, rule
from archipel.cli.input_output.strategy_options import STRATEGY_RULES
from archipel.cli.models.convert.policy_options import policy_settings
from archipel.cli.models.convert.training_options import SCHEDULES, SHORT, TRANSFORMS
from archipel.cli.models.option_groups import DATA_RULES
from archipel.training.by_name import LOSSES, OPTIMIZERS

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "Request": {
        "source": "SOURCE",
        "path": "--output",
        "signing": "--key",
        "training": "--loss",
        "analysis": "--analysis",
        "compression": "--recipe",
        "name": "--name",
        "card": "--card",
        "privacy": "--policy",
        "self_test": "--self-test",
        "min_agreement": "--min-agreement",
        "min_snr": "--min-snr",
        "batch_size": "--batch-size",
    },
    "Training": {
        "loss": "--loss",
        "optimizer": "--optimizer",
        "trainable": "--trainable",
        "strategy": "--strategy",
        "strategy_options": "--strategy-option",
        "epochs": "--epochs",
        "batch_size": "--batch-size",
        "loss_range": "--loss-range",
        "loss_output": "--loss-output",
    },
    "StepOptions": {
        "transforms": "--transform",
        "accumulate": "--accumulate",
        "batch_norm": "--batch-norm",
        "dropout": "--dropout",
        "per_example": "--per-example",
        "precision": "--precision",
        "recompute": "--recompute",
        "kernels": "--kernels",
    },
    "Compression": {
        "recipe": "--recipe",
        "data": "--data",
        "calibration": "--calibration",
        "validation": "--validation",
        "seed": "--seed",
        "engine": "--engine",
        "folder": "--work",
    },
    "Signing": {
        "key": "--key",
        "sequence": "--sequence",
        "not_after": "--valid-days",
        "populations": "--population",
        "parent": "--parent",
    },
    "Analysis": {"statistics": "--analysis", "max_examples": "--analysis"},
}
"""For each group of arguments: the option of each."""

PYTHON_ONLY: Mapping[str, Mapping[str, str]] = {
    "Request": {"example": "the source is a file, which has its examples or needs none"},
    "Training": {"step_options": "each of them has an option of its own"},
    "StepOptions": {"steps": "devices hand one batch at a time to the train program"},
    "Compression": {"on_progress": "the command shows the progress itself"},
    "Signing": {"lineage": "the command makes it of --parent, the recipe and the measurements"},
    "Analysis": {},
}
"""The arguments without an option, and why."""

_MAKERS = "|".join([*LOSSES, *OPTIMIZERS, *SCHEDULES, *TRANSFORMS, "per_example"])


def _of_maker(match: re.Match[str]) -> str:
    """An argument of a loss, optimizer, schedule or transform."""
    maker, argument, rest = match["maker"], match["argument"], match["rest"]
    if maker in OPTIMIZERS:
        return SHORT.get(argument, f"--optimizer-option {argument}") + rest
    option = "--loss-option" if maker in LOSSES else "--per-example" if maker == "per_example" else ""
    if option:
        return f"{option} {argument}{rest}"
    return f"--{'schedule' if maker in SCHEDULES else 'transform'} {maker}: {argument}{rest}"


_ARGUMENTS = {
    argument: option
    for group in OPTIONS.values()
    for argument, option in group.items()
    if argument != "max_examples"  # in the file of --analysis it has this name, too
}

_FIXED = {"...": "NUMBER", "0.0": "0"}

RULES: list[Rule] = [
    *STRATEGY_RULES,
    rule(r"\bdropout=False", "--no-dropout"),
    rule(r"\bpass loss_output='([^']*)'", r"give --loss-output \1"),
    rule(r" out of step_options$", " out"),
    rule(r"Model\.fix\(\{'([^']*)': (\.\.\.|0\.0)\}\)", lambda match: f"--fix {match[1]}={_FIXED[match[2]]}"),
    rule(r"^fix: ", "--fix: "),
    rule(r"\bModel\.limit_loops\b", "--limit-loops"),
    *DATA_RULES,
    rule(r"^analysis with training: ", "--analysis with --loss: "),
    rule(r"or change privacy$", "or change --policy-option weighting"),
    rule(rf"^privacy: (?={'|'.join(policy_settings())})", "--policy-option "),
    rule(rf"^(?P<maker>{_MAKERS}): (?P<argument>\w+)(?P<rest>(\[\d+\])? (must|needs))", _of_maker),
    *argument_rules(
        {**_ARGUMENTS, "momentum": "--momentum"},
        ["convert", "training", "compression", "signing", "analysis", "step_options", "step_graph", "strategy_options"],
    ),
    # What is left of these are the names of functions that nobody has called here.
    rule(r"^(step_options|step_graph|strategy_options): ", ""),
]
"""How errors of `convert` are spelled."""
