"""Options of the form NAME=VALUE: what is listed can be typed, and means the default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest

from archipel.cli.input_output.settings import Setting, meanings, read_call, read_settings, settings_of
from archipel.cli.input_output.strategy_options import strategy_settings
from archipel.cli.models.convert.policy_options import policy_settings
from archipel.cli.models.convert.training_options import SCHEDULES, TRANSFORMS
from archipel.errors import CommandError
from archipel.strategies import registry
from archipel.strategies.device import UPLOAD_OPTIONS, describe
from archipel.training import schedules
from archipel.training.by_name import LOSSES, OPTIMIZERS
from tests.support.commands import Command


def listed() -> Iterator[tuple[str, Setting]]:
    for name in registry.STRATEGIES:
        yield from ((name, setting) for setting in strategy_settings(name).values())
    yield from (("policy", setting) for setting in policy_settings().values())
    for makers in (LOSSES, OPTIMIZERS, SCHEDULES, TRANSFORMS):
        for name, make in makers.items():
            yield from ((name, setting) for setting in settings_of(make).values())


def test_every_default_that_is_listed_can_be_typed() -> None:
    for owner, setting in listed():
        if setting.needed:
            continue
        read = setting.read(setting.shown.strip('"'))
        # One glob is a list of one; a third is listed with six digits.
        same = read in (setting.default, (setting.default,)) or read == pytest.approx(setting.default, rel=1e-5)
        assert same, (owner, setting)


def test_a_strategys_options_are_those_that_its_device_half_takes() -> None:
    for name, strategy in registry.STRATEGIES.items():
        given = {s.name: s.default for s in strategy_settings(name).values() if not s.needed}
        needed = {s.name: "*" for s in strategy_settings(name).values() if s.needed}
        describe(name, strategy.device, {**given, **needed})  # refuses an option that there is not


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (float, "1e-3", 0.001),
        (int, "7", 7),
        (bool, "TRUE", True),
        (str, "a=b", "a=b"),
        (float | None, "none", None),
        (str | Sequence[str], "a.*, b", ("a.*", "b")),
        (str | Sequence[str], "", ()),
        (tuple[float, float], "0.8,0.9", (0.8, 0.9)),
        (float | Sequence[float], "2", 2.0),
        (float | Sequence[float], "2,3", (2.0, 3.0)),
        (Literal["examples", "uniform"], "uniform", "uniform"),
        (float | schedules.Schedule, "0.5", 0.5),
    ],
)
def test_values(hint: Any, text: str, value: object) -> None:
    found = Setting("name", hint).read(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("hint", "text", "expected"),
    [
        (float, "far", "a number"),
        (int, "0.5", "a whole number"),
        (bool, "yes", "true or false"),
        (float | None, "nothing", "a number or none"),
        (tuple[float, float], "0.8,x", "list of number"),
        (Literal["a", "b"], "c", "a | b"),
    ],
)
def test_wrong_values(hint: Any, text: str, expected: str) -> None:
    with pytest.raises(ValueError) as raised:
        Setting("name", hint).read(text)
    assert str(raised.value) == f"expected {expected}, got {text!r}"


def test_names() -> None:
    known = {"mu": Setting("mu", float, 0.1), "clip": Setting("clip", float | None, None)}
    assert read_settings("--o", ["mu=2", "clip=none"], known, "it") == {"mu": 2.0, "clip": None}
    for texts, words in (
        (
            ["clap=1"],
            "--o clap=1: did you mean clip? it has no option 'clap'; there are mu (a number, default 0.1); clip",
        ),
        (["mu"], "--o mu: expected mu=VALUE, where VALUE is a number"),
        (["mu=1", "mu=2"], "--o mu=2: mu is given twice"),
    ):
        with pytest.raises(CommandError) as raised:
            read_settings("--o", texts, known, "it")
        assert words in str(raised.value)


def test_calls() -> None:
    cosine = read_call("--schedule", "cosine:steps=50,end=0.1", SCHEDULES, 0.2)
    assert cosine == schedules.cosine(0.2, steps=50, end=0.1)
    with pytest.raises(CommandError, match="steps is missing; write cosine:steps=VALUE"):
        read_call("--schedule", "cosine", SCHEDULES, 0.2)


def test_what_documentation_says_of_arguments() -> None:
    def documented(low: float, high: float, name: str) -> None:
        """Do it.

        Arguments:
            low, high: the two ends,
                in meters.
            name: of it.

        Raises ValueError.
        """

    assert meanings(documented) == {
        "low": "the two ends, in meters.",
        "high": "the two ends, in meters.",
        "name": "of it.",
    }


def test_the_list_has_everything(archipel: Command) -> None:
    out, _ = archipel("convert", "--list")
    lines = out.splitlines()
    for owner, setting in listed():
        assert owner in lines or owner == "policy"
        if setting.name not in ("lr", "schedule"):  # of schedules: their first argument is --lr
            assert any(line.split()[:1] == [setting.name] for line in lines if line.startswith("    ")), setting
    strategies, _ = archipel("convert", "--list", "strategies")
    assert "Losses" not in strategies
    assert all(f"    {option} " in strategies for option in UPLOAD_OPTIONS)
    for strategy in registry.STRATEGIES.values():
        assert all(f"{name}={value:g}" in strategies for name, value in strategy.server_hyperparameters.items())
