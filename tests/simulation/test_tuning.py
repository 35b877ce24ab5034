"""Tuning: a problem whose best rate is known, trials ended by successive halving, and runs that were killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

import archipel
from archipel.bundle import Bundle
from archipel.converter import Training
from archipel.errors import SimulationError
from archipel.graph import Model
from archipel.simulation import Range, RoundRow, TuneSettings, Tuning, load_federation, tune
from archipel.simulation.simulate import as_bundle
from archipel.simulation.tuning import Trial, read_tuning, write_best
from archipel.simulation.tuning.file import FederationRuns
from archipel.simulation.tuning.result import mark_log
from archipel.simulation.tuning.study import Study
from archipel.training import losses, optimizers
from tests.strategies.test_feddistill import wide
from tests.support.fixtures.federation_files import *  # noqa: F403
from tests.support.fixtures.federation_files import DATA, FILE, Write
from tests.support.simulation import imported

ROUNDS = 9
X = np.tile(np.float32([[2.0], [-2.0]]), (4, 1))
CLIENTS = [{"input": X, "label": 3 * X}] * 2
# The mean of (w x - 3 x)^2 with x = 2 or -2 is 4 (w - 3)^2; one step of rate 1/8 is at its minimum.
BEST = 1 / 8
LR = {"lr": Range(low=0.01, high=0.4, log=True)}


class KilledError(Exception):
    """Stands for SIGKILL: nothing after it runs."""


@pytest.fixture(scope="module")
def quadratic(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    network = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(network.weight)
    training = Training(
        losses.mse(), optimizers.sgd(lr=0.1), batch_size=8, strategy_options={"clip": 100.0, "bits": 24}
    )
    return as_bundle(Model.from_torch(network, torch.zeros(2, 1)), training, tmp_path_factory.mktemp("quadratic"))


@pytest.fixture
def run(quadratic: Bundle) -> Callable[..., archipel.simulation.Result]:
    def simulate(values: Mapping[str, Any], folder: Path | None, on_round: Callable[[RoundRow], object]) -> Any:
        return archipel.simulate(
            quadratic, CLIENTS, rounds=ROUNDS, hyperparameters=values, test=(X, 3 * X), folder=folder,
            on_round=on_round, client_axis="off",
        )  # fmt: skip

    return simulate


def asked(**changes: Any) -> TuneSettings:
    return TuneSettings(**{"ranges": LR, "trials": 14, "metric": "test loss", **changes})


def halved(found: Tuning, losses_of: Callable[[float, int], float]) -> Iterator[int]:
    """The rounds of each trial by asynchronous successive halving (Li et al. 2020, algorithm 2): a trial goes on from a
    rung if it is among the best third of those that came there so far, or the best of fewer than three."""
    rungs: dict[int, list[float]] = {1: [], 3: []}
    for trial in found.trials:
        for rung, before in rungs.items():
            loss = losses_of(float(trial.values["lr"]), rung)
            before.append(loss)
            if sorted(before).index(loss) >= max(1, len(before) // 3):
                yield rung
                break
        else:
            yield ROUNDS


@pytest.mark.sampled(every=4)
def test_the_best_rate_is_found_and_worse_ones_are_ended_as_successive_halving_says(run: Any, tmp_path: Path) -> None:
    told = []
    found = tune(run, asked(), rounds=ROUNDS, seed=1, on_trial=told.append)
    assert told == found.trials
    assert found.best.values["lr"] == pytest.approx(BEST, rel=0.2)
    assert found.rounds < 14 * ROUNDS / 2

    def loss(rate: float, rounds: int) -> float:
        return float(4 * 9 * (1 - 8 * rate) ** (2 * rounds))

    for trial in found.trials:
        assert trial.value == pytest.approx(loss(float(trial.values["lr"]), trial.rounds), rel=0.02, abs=1e-2)
    # But where two are as near to 0 as the fixed point of updates allows.
    assert [trial.rounds for trial in found.trials] == list(halved(found, loss))
    again = tune(run, asked(trials=3), rounds=ROUNDS, seed=1)
    assert again.trials == found.trials[:3]
    assert tune(run, asked(trials=2), rounds=ROUNDS, seed=2).trials != found.trials[:2]
    found.plot(tmp_path / "tuning.svg")
    text = (tmp_path / "tuning.svg").read_text()
    assert "best so far" in text
    assert text.count("test loss") == 2


def test_a_picture_has_choices_in_their_own_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the trials met first; and whole numbers have whole ticks."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **named: drawn.append(self))
    settings = TuneSettings(ranges={"mu": [0.1, 0.0, 1.0], "cohort": Range(low=1, high=4)}, metric="loss")
    values = ((1.0, 2), (0.1, 3), (1.0, 1))
    trials = [
        Trial(number, {"mu": mu, "cohort": cohort}, 9, 0.5 - number, "complete" if number else "pruned")
        for number, (mu, cohort) in enumerate(values)
    ]
    Tuning(settings, "loss", True, trials).plot(tmp_path / "a.png")
    _, mu, cohort = drawn[0].axes
    assert [text.get_text() for text in mu.get_xticklabels()] == ["0.1", "0.0", "1.0"]
    places = np.concatenate([each.get_offsets() for each in mu.collections])
    assert sorted(map(tuple, places)) == [(0.0, -0.5), (2.0, -1.5), (2.0, 0.5)]
    assert all(float(tick).is_integer() for tick in cohort.get_xticks())
    assert {text.get_text() for text in drawn[0].legends[0].get_texts()} == {
        "ran to the end", "ended early", "best so far",
    }  # fmt: skip


@pytest.mark.sampled(every=4)
def test_a_tuning_that_was_stopped_and_killed_goes_on_to_the_same_trials(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, folder = asked(trials=3), tmp_path / "tuning"
    expected = tune(run, few, rounds=ROUNDS, seed=1).trials
    stopped = tune(run, few, rounds=ROUNDS, seed=1, folder=folder, on_round=lambda trial, row: row.number < 4)
    assert [(trial.number, trial.rounds, trial.state) for trial in stopped.trials] == [(0, 4, "running")]
    real, calls = Study.report, 0

    def die(study: Study, *given: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KilledError
        return real(study, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Study, "report", die)
        with pytest.raises(KilledError):
            tune(run, few, rounds=ROUNDS, seed=1, folder=folder)
    # With more trials it goes on as well; whatever else is asked for stays.
    found = tune(run, asked(trials=4), rounds=ROUNDS, seed=1, folder=folder)
    assert (len(found.trials), found.trials[:3]) == (4, expected)
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "trials.db"]
    with pytest.raises(SimulationError, match=r"trials\.db: has a tuning of other settings; give another folder"):
        tune(run, few, rounds=ROUNDS, seed=2, folder=folder)
    (folder / "trials.db").write_text("no database")
    with pytest.raises(SimulationError, match="not the trials of a tuning"):
        tune(run, few, rounds=ROUNDS, seed=1, folder=folder)


@pytest.mark.sampled(every=4)
def test_rounds_are_the_budget_and_rates_that_diverge_are_ended(run: Any) -> None:
    found = tune(run, asked(trials=50, budget=30, pruner="none"), rounds=ROUNDS, seed=1)
    assert [trial.rounds for trial in found.trials] == [9, 9, 9, 9]
    found = tune(run, asked(trials=9, pruner="hyperband", least_rounds=1), rounds=ROUNDS, seed=1)
    # Its second bracket begins with rungs of three rounds, the third one has none.
    assert {trial.rounds for trial in found.trials} == {1, 3, 9}
    # At 100 no device's loss is finite after a step, so the model stays as it was.
    found = tune(run, TuneSettings(ranges={"lr": [100.0, 0.1]}, trials=3, metric="test loss"), rounds=3)
    assert found.best.values == {"lr": 0.1}
    with pytest.raises(SimulationError, match=r"hyperparameter 'lr' must be from 0 to 100, got 100[01]"):
        tune(run, TuneSettings(ranges={"lr": [1000.0, 1001.0]}, metric="test loss"), rounds=3)


@pytest.mark.sampled(every=8)
def test_a_file_says_what_is_tuned_and_the_best_is_a_file_that_runs(
    write: Write,
    tmp_path: Path,
) -> None:
    file = write(
        DATA + 'strategy = { name = "fedprox", mu = 0.3 }\nevaluation = { hold_out = 0.3 }\n'
        "[tune]\ntrials = 2\nstrategy.mu = [0.0, 0.5]\nlr = { low = 0.05, high = 0.5, log = true }\n"
        'cohort = { low = 2, high = 4 }\nmetric = "accuracy worst 10%"\n'
    )
    found = tune(file, folder=tmp_path / "tuning")
    assert (found.metric, found.lower, len(found.trials)) == ("accuracy worst 10%", False, 2)
    for trial in found.trials:
        assert set(trial.values) == {"strategy.mu", "lr", "cohort"}
        assert isinstance(trial.values["cohort"], int)
    write_best(found, file, tmp_path / "best.toml")
    best = load_federation(tmp_path / "best.toml")
    assert best.settings.cohort == found.best.values["cohort"]
    assert best.settings.hyperparameters == {"lr": found.best.values["lr"]}
    assert best.settings.strategy == {"name": "fedprox", "mu": found.best.values["strategy.mu"]}
    assert best.settings.tune == {}
    assert best.run().history[-1].spread["accuracy"].worst.value == found.best.value
    assert FederationRuns(file, ["run.folder=own"]).trial({"lr": 0.1}).folder is None
    with pytest.raises(SimulationError, match="must lie beside"):
        write_best(found, file, tmp_path / "tuning" / "best.toml")
    with pytest.raises(SimulationError, match="is the file that is tuned"):
        write_best(found, file, file)


@pytest.mark.sampled(every=8)
def test_a_file_with_several_models_is_tuned(write: Write, tmp_path: Path) -> None:
    """By what the first of them reaches on the test data, and the best is written with all of them."""
    imported(wide).save(tmp_path / "wide.onnx")
    more = (
        'strategy = "feddistill"\n[[models]]\nonnx = "network.onnx"\n[[models]]\nonnx = "wide.onnx"\nclients = [2]\n'
        "[tune]\ntrials = 2\nlr = [0.1, 0.2]\n"
    )
    file = write(DATA + more, FILE.replace('model = {{ onnx = "network.onnx" }}\n', ""))
    found = tune(file, folder=tmp_path / "tuning")
    assert (found.metric, len(found.trials)) == ("test accuracy", 2)
    write_best(found, file, tmp_path / "best.toml")
    best = load_federation(tmp_path / "best.toml")
    assert [(each.onnx, each.clients) for each in best.settings.models] == [
        ("network.onnx", None), ("wide.onnx", (2,)),
    ]  # fmt: skip
    assert best.run().history[-1].tested["accuracy"] == found.best.value


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({}, "tune: has no range; give lr"),
        ({"lr": 0.1}, "tune.lr: expected a range such as"),
        ({"lr": {"low": 1.0}}, "tune.lr: the field 'high' is missing"),
        ({"lr": {"low": 1.0, "high": 0.5}}, "tune.lr: low 1.0 and high 0.5 must be numbers with low below high"),
        ({"lr": {"low": 0.0, "high": 0.5, "log": True}}, "tune.lr: low 0.0 of a range with log = true must be above 0"),
        ({"lr": [0.1]}, "tune.lr: give two or more different values"),
        ({"lr": [0.1, {}]}, "tune.lr: expected numbers or texts"),
        ({"lr": [0.1, 0.2], "trials": 0}, "tune.trials: 0 is not a whole number of 1 or more"),
        ({"lr": [0.1, 0.2], "pruner": "median"}, "tune.pruner"),
        ({"rounds": [5, 10]}, "tune.rounds: decides how a trial runs, and cannot be tuned"),
        ({"strategy": {"mu": "all"}}, "tune.strategy.mu: expected a range"),
    ],
)
def test_mistakes_name_the_setting(table: dict[str, Any], text: str) -> None:
    with pytest.raises(SimulationError) as told:
        read_tuning(table)
    assert text in str(told.value)


def test_all_mistakes_of_a_table_are_told_at_once() -> None:
    table = {
        "trials": 0, "pruner": "median", "lr": {"low": 1.0, "hihg": 0.5}, "rounds": [5, 10], "strategy": {"mu": [0.1]},
    }  # fmt: skip
    with pytest.raises(SimulationError) as told:
        read_tuning(table)
    lines = str(told.value).split("\n  ")
    names = [line.partition(":")[0] for line in lines[1:]]
    # A value that msgspec does not take keeps it from what the struct itself checks.
    assert (lines[0], names) == (f"{len(names)} mistakes", ["tune.lr", "tune.lr", "tune.rounds", "tune.pruner"])
    with pytest.raises(SimulationError) as told:
        read_tuning({**table, "pruner": "none"})
    assert [line.partition(":")[0] for line in str(told.value).split("\n  ")[1:]] == [
        "tune.lr", "tune.lr", "tune.rounds", "tune.trials", "tune.strategy.mu",
    ]  # fmt: skip


def test_what_cannot_be_tuned_is_told(run: Any, write: Write) -> None:
    with pytest.raises(SimulationError, match=r"tune\.metric: no 'test f1'; there are test loss"):
        tune(run, asked(metric="test f1"), rounds=ROUNDS)
    with pytest.raises(SimulationError, match="tune: is missing; give a table"):
        tune(write())
    ended = [Trial(0, {"lr": 0.1}, 3, 0.5, "pruned"), Trial(1, {"lr": 0.2}, 9, None, "pruned")]
    with pytest.raises(SimulationError, match="no trial ran to its end with a finite test loss"):
        _ = Tuning(asked(), "test loss", True, ended).best


@pytest.mark.parametrize(
    ("low", "high"), [(0.01, 1.0), (0.0173, 0.4915), (0.1, 0.4), (1e-5, 10.0), (0.31, 0.39), (0.02, 0.9)]
)
@pytest.mark.sampled(every=6)
def test_numbers_on_a_logarithmic_axis_stand_side_by_side(low: float, high: float) -> None:
    figure = Figure(figsize=(3.6, 3.1), layout="constrained")
    panel = figure.subplots()
    mark_log(panel, low, high)
    FigureCanvasAgg(figure).draw()
    texts = [text for text in panel.get_xticklabels(which="both") if text.get_text()]
    shown = [text for text in texts if panel.get_xlim()[0] <= text.get_position()[0] <= panel.get_xlim()[1]]
    boxes = sorted((text.get_window_extent().x0, text.get_window_extent().x1) for text in shown)
    assert len(boxes) >= 2
    assert all(left[1] < right[0] for left, right in pairwise(boxes))
