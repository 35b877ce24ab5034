"""A federation's file: what it says is what runs, and every mistake in it is told with file, key and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import archipel
from archipel import datasets
from archipel.bundle import Bundle, development_key
from archipel.errors import ClientError, RuntimeInputError, SimulationError
from archipel.simulation import ListedClients, SplitClients
from archipel.simulation.federation import Federation, load_federation
from archipel.simulation.federation_parts.example import EXAMPLE
from archipel.training import losses, optimizers
from tests.support.development import place_development_key
from tests.support.fixtures.federation_files import *  # noqa: F403
from tests.support.fixtures.federation_files import DATA, FILE, Write, loaded
from tests.support.simulation import dense, imported


@pytest.mark.sampled(every=4)
def test_the_file_runs_what_the_call_runs(write: Write, tmp_path: Path) -> None:
    found = load_federation(write(DATA + 'strategy = { name = "fedprox", mu = 0.3 }\nprivacy = "plain"')).run()
    data = loaded(tmp_path)
    expected = archipel.simulate(
        imported(dense),
        SplitClients({"input": data["x"], "label": data["y"]}, datasets.split_iid(len(data["y"]), 4, seed=5)),
        "fedprox", strategy_options={"mu": 0.3}, rounds=3, cohort=2, seed=5, epochs=2, batch_size=4, privacy="plain",
        client_axis="off",
        loss=losses.cross_entropy(), optimizer=optimizers.sgd(lr=0.2), test=(data["x"][:10], data["y"][:10]),
    )  # fmt: skip
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)
    assert [(row.metrics, row.tested) for row in found.history] == [
        (row.metrics, row.tested) for row in expected.history
    ]


@pytest.mark.sampled(every=6)
def test_masks_are_asked_for_in_the_file(write: Write) -> None:
    with pytest.raises(SimulationError, match="masks: a round with privacy 'plain' has none"):
        load_federation(write(), ["privacy=plain", "run.masks=true", "rounds=1"]).run()


def test_settings_go_before_the_file_s(write: Write) -> None:
    federation = load_federation(write(), ["rounds=1", "training.optimizer=adam", "strategy=fedbn", "run.workers=2"])
    assert federation.settings.rounds == 1
    assert federation.settings.run.workers == 2
    training = federation._training()
    assert training is not None
    assert training.strategy == "fedbn"
    assert type(training.optimizer) is type(optimizers.adam())


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ('{ how = "dirichlet", clients = 5, alpha = 0.5 }',
         lambda data: datasets.split_dirichlet(data["y"], 5, alpha=0.5, seed=5)),
        ('{ how = "by", clients = 3, field = "person", seed = 9 }',
         lambda data: datasets.split_by(data["person"], 3, seed=9)),
        ('{ how = "by", field = "person" }',
         lambda data: [np.flatnonzero(data["person"] == person) for person in sorted(set(data["person"].tolist()))]),
        ('{ how = "shards", clients = 4, shards = 3 }',
         lambda data: datasets.split_shards(data["y"], 4, shards=3, seed=5)),
        ('{ how = "sorted", clients = 3, field = "person" }',
         lambda data: datasets.split_sorted(data["person"], 3, seed=5)),
        ('{ how = "sizes", clients = 3, alpha = 2.0 }',
         lambda data: datasets.split_sizes(len(data["y"]), 3, alpha=2.0, seed=5)),
    ],
)  # fmt: skip
def test_partitions_are_those_of_datasets(
    write: Write, tmp_path: Path, partition: str, expected: Callable[[Any], list[np.ndarray]]
) -> None:
    prepared = load_federation(write(f'data = {{ train = "data.npz" }}\npartition = {partition}')).prepare()
    data = loaded(tmp_path)
    parts = expected(data)
    assert len(prepared.clients) == len(parts)
    for number, rows in enumerate(parts):
        taken = prepared.clients.take(number)
        assert set(taken) == {"input", "label"}  # devices do not get the column that divides them
        np.testing.assert_array_equal(taken["input"], data["x"][rows])
        assert taken["input"].dtype == np.float32


def test_only_groups_say_by_themselves_how_many_devices_there_are(write: Write) -> None:
    with pytest.raises(SimulationError, match=r"partition\.clients: is missing: how many devices there are"):
        load_federation(write('data = { train = "data.npz" }\npartition = { how = "iid" }')).prepare()


def test_held_out_examples_are_on_no_device(write: Write, tmp_path: Path) -> None:
    more = 'data = { train = "data.npz", hold_out = 0.25 }\npartition = { how = "iid", clients = 4 }'
    prepared = load_federation(write(more)).prepare()
    assert isinstance(prepared.test, dict)
    trained = np.concatenate([prepared.clients.take(number)["input"] for number in range(4)])
    everything = np.concatenate([trained, prepared.test["input"]])
    assert len(prepared.test["label"]) == round(0.25 * len(everything))
    key = lambda rows: sorted(map(tuple, rows.tolist()))  # noqa: E731
    assert key(everything) == key(loaded(tmp_path)["x"])


@pytest.mark.sampled(every=3)
def test_functions_of_one_s_own(write: Write, tmp_path: Path) -> None:
    """A module as the model; arrays of another type, and devices that are divided already."""
    more = 'data = { python = "own.py:arrays" }\npartition = { how = "by", field = "person", clients = 4 }'
    file = write(more, FILE.replace('onnx = "network.onnx"', 'python = "own.py:network", arguments = {{ hidden = 4 }}'))
    federation = load_federation(file)
    result = federation.run()
    assert result.parameters["0.weight"].shape == (4, 6)
    data, w = loaded(tmp_path), result.parameters
    logits = np.tanh(data["x"][:8] @ w["0.weight"].T + w["0.bias"]) @ w["2.weight"].T + w["2.bias"]
    assert result.history[-1].tested["accuracy"] == (logits.argmax(1) == data["y"][:8]).mean()
    prepared = load_federation(write('data = { python = "own.py:divided" }')).prepare()
    assert isinstance(prepared.clients, ListedClients)
    assert prepared.clients.count(1) == 13
    assert prepared.clients.take(1)["input"].dtype == np.float32


@pytest.mark.sampled(every=3)
def test_a_bundle_trains_as_it_says(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Bundle]
) -> None:
    place_development_key(tmp_path / "config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    bundle = make("scaffold", key=development_key()[0])
    text = f'rounds = 2\nmodel = {{{{ bundle = "{bundle.folder}" }}}}\n{{more}}'
    result = load_federation(write(DATA, text)).run()
    assert result.bundle.manifest.strategy == "scaffold"
    assert result.bundle.digest == bundle.digest
    with pytest.raises(SimulationError, match="strategy: the bundle decides it"):
        load_federation(write(DATA + 'strategy = "fedavg"', text))
    with pytest.raises(SimulationError, match=r"model\.arguments: are for zoo and python"):
        load_federation(write(DATA, text), ["model.arguments.classes=3"]).prepare()


def test_the_example_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(EXAMPLE)
    federation = load_federation(tmp_path / "federation.toml")
    assert federation.folder == tmp_path / "simulation"
    request = federation.task_request("0" * 64)
    assert (request.rounds, request.cohort, request.privacy) == (20, 10, "secure")
    assert (request.population, request.min_cohort, request.hyperparameters) == ("pupils", 8, {"server_lr": 1.0})


@pytest.mark.sampled(every=3)
def test_a_virtual_clock_times_the_rounds_as_the_task_says(write: Write, tmp_path: Path) -> None:
    """Whoever is slow comes too late for a round's goal; the trace's file lies beside the federation's."""
    (tmp_path / "trace.csv").write_text("seconds_per_step,down,up\n" + "0.5,,\n" * 3 + "80,,\n")
    more = DATA + 'cohort = 4\nprivacy = "plain"\nsystem = {{ devices = "trace.csv" }}\ntask = {{ goal = 3 }}'
    text = FILE.replace("cohort = 2", "").replace("rounds = 3", "rounds = 2")
    result = load_federation(write(more.replace("{{", "{").replace("}}", "}"), text)).run()
    # 13 examples a device in batches of 4, twice: 8 steps.
    assert [row.devices for row in result.history] == [3, 3]
    assert result.history[0].time == pytest.approx(8 * 0.5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["roundz=3"], "unknown field 'roundz'; did you mean 'rounds'?"),
        (["rounds=0"], "rounds: expected `int` >= 1, got 0"),
        (["dropout=1.0"], "dropout: expected `float` < 1.0, got 1.0"),
        (["hyperparameters.lr=nan"], "hyperparameters.lr: expected a finite number, got nan"),
        (["model.zoo=lenet"], "model: give one of zoo, onnx, bundle, python, got ['zoo', 'onnx']"),
        (["model.onnx=none.onnx"], "none.onnx"),
        (["training.loss=hinge"], "training.loss: no 'hinge'; there are cross_entropy"),
        (["training.optimizer.rate=1"], "training.optimizer.rate: sgd has no such argument; it has momentum"),
        (["strategy=fedavk"], "no strategy 'fedavk'"),
        (["strategy.mu=0.1"], "strategy.name: is missing"),
        (["data.python=own.py:arrays"], "data: give train, a file, or python, a function"),
        (["data.arguments.swap=true"], "data.arguments: are for python; files have data.options"),
        (["data.train=none.npz"], "none.npz"),
        (["data.hold_out=0.1"], "data.hold_out: there is a file `test` as well; leave one of them out"),
        (["partition.how=shard"], "partition.how: no 'shard'; there are iid, dirichlet, by"),
        (["partition.clients=0"], "partition.clients: expected how many devices there are, 1 or more, got 0"),
        (["partition.clients=10000"], "partition: 52 examples are too few for 10000 devices; choose fewer devices"),
        (["partition.alpha=1"], "partition.alpha: 'iid' has no such setting; it has seed"),
        (["partition.how=dirichlet"], "partition.alpha: is missing; 'dirichlet' needs it"),
        (["partition.how=by", "partition.field=site"], "partition: no field 'site'; beside inputs and"),
        (["cohort=5"], "cohort: 5 is not from 1 to 4, the number of clients"),
        (["task.kohort=5"], "task.kohort: no such field of a task; did you mean 'cohort'?"),
        (["task.cohort=5"], "task.cohort: write it outside of [task], as `cohort`"),
        (["system.period=-1"], "system: period: -1.0 is not a number above 0"),
        (["system.speed=3"], "system: unknown field 'speed'"),
        (["system.up=3", "task.goal=0"], "task.goal: 0 is not a whole number of 1 or more"),
        (["evaluation.hold_out=1.5"], "evaluation.hold_out: 1.5 is not above 0 and below 1"),
        (["evaluation.bins.loss.low=2", "evaluation.bins.loss.high=1"], "low 2.0 and high 1.0 must be numbers"),
        (["evaluation.bins.f1.low=0", "evaluation.bins.f1.high=1"], "evaluation.bins.f1: the model measures accuracy"),
        (["rounds"], "--set rounds: expected KEY=VALUE, such as rounds=5 or strategy.mu=0.1"),
    ],
)  # fmt: skip
@pytest.mark.sampled(every=6)
def test_mistakes_are_told(write: Write, settings: list[str], text: str) -> None:
    file = write()
    with pytest.raises(SimulationError) as told:
        load_federation(file, ["rounds=1", *settings]).run()
    assert str(told.value).startswith(f"{file}: ")
    assert text in str(told.value)
    assert "\n" not in str(told.value)


def test_several_mistakes_are_told_at_once(write: Write) -> None:
    """Fields, what other parts check in the tables, and what does not go together."""
    file = write()
    for settings, expected in (
        (
            ["roundz=3", "dropout=2.0", "training.batch_size=0", "training.loss=hinge", "strategy=fedprx"],
            ["unknown field 'roundz'", "training.batch_size: ", "dropout: ", "training.loss: ", "strategy: "],
        ),
        (
            ["data.arguments.swap=true", "task.cohort=3", "aggregation.rule=median", "training.optimizer=sdg",
             "differential_privacy.mechanism=central", "differential_privacy.noise_multiplier=1.0", "privacy=plain",
             "partition.clients=0", "partition.alpha=1"],
            ["data.arguments: ", "task.cohort: ", "differential_privacy: ", "differential_privacy: ",
             "training.optimizer: ", "partition.clients: ", "partition.alpha: "],
        ),
    ):  # fmt: skip
        with pytest.raises(SimulationError) as told:
            load_federation(file, settings)
        first, *texts = str(told.value).splitlines()
        assert first == f"{file}: {len(expected)} mistakes"
        assert len(texts) == len(expected)
        for start in expected:
            assert any(text.startswith(f"  {start}") for text in texts), (start, texts)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": np.zeros((9, 6)), "z": np.zeros(9)}, "no labels 'label'; name them `label`, or `y` (it has x, z)"),
        ({"image": np.zeros((9, 6)), "y": np.zeros(9, int)}, "no examples for the model's input 'input'"),
        ({"x": np.zeros((9, 6)), "y": np.zeros(8, int)}, "the fields have different numbers of examples (x 9, y 8)"),
        ({"x": np.full((9, 6), np.inf), "y": np.zeros(9, int)}, "data.train: x: is not finite in row 0"),
        ({"x": np.zeros((9, 5)), "y": np.zeros(9, int)}, "x: has the shape [9, 5], the model takes [batch, 6]"),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_are_told(write: Write, tmp_path: Path, arrays: dict[str, Any], text: str) -> None:
    file = write()
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(SimulationError) as told:
        load_federation(file, ["partition.clients=2"]).run()
    assert str(told.value).startswith(f"{file}: ")
    assert text in str(told.value)


def test_a_row_that_is_not_finite_has_its_number_in_the_data(write: Write, tmp_path: Path) -> None:
    file = write('data = { train = "data.npz", hold_out = 0.3 }\npartition = { how = "iid", clients = 4 }\n')
    whole = loaded(tmp_path)
    kept = datasets.hold_out(whole, 0.3, seed=5)[0].rows
    row = int(kept[-1])
    assert row > len(kept)
    whole["x"][row, 0] = np.nan
    np.savez(tmp_path / "data.npz", **whole)
    for more in ([], ["root.share=0.1", "privacy=plain", "aggregation.rule=fltrust"]):
        with pytest.raises(SimulationError, match=f"data.train: x: is not finite in row {row};"):
            load_federation(file, more).prepare()


def test_files_whose_labels_mean_something_else_are_refused(write: Write, tmp_path: Path) -> None:
    head = ",".join("abcdef") + ",label\n"
    for name, labels in (("train", ("low", "high")), ("test", ("high", "middle"))):
        (tmp_path / f"{name}.csv").write_text(head + "".join(f"{'1,' * 6}{label}\n" for label in labels))
    file = write(DATA.replace(".npz", ".csv").replace("data.csv", "train.csv"))
    with pytest.raises(
        SimulationError, match=r"data\.test: test\.csv: field 'label' has other classes than train\.csv"
    ):
        load_federation(file).prepare()


@pytest.mark.sampled(every=4)
def test_tables_and_curves_have_what_happened(write: Write, tmp_path: Path) -> None:
    federation: Federation = load_federation(write(), ["run.test_every=2", "dropout=0.3"])
    result = federation.run()
    result.to_parquet(tmp_path / "rounds.parquet")
    rounds = pq.read_table(tmp_path / "rounds.parquet").to_pydict()
    assert rounds["round"] == [1, 2, 3]
    assert rounds["training loss"] == pytest.approx(
        [row.metrics.get("training loss", np.nan) for row in result.history], nan_ok=True
    )
    assert np.isnan(rounds["test accuracy"]).tolist() == [True, False, False]
    devices = pq.read_table(tmp_path / "rounds-clients.parquet").to_pydict()
    assert sum(devices["drawn"]) == 3 * 2
    assert sum(devices["counted"]) == sum(row.devices for row in result.history)
    assert devices["client"] == sorted(result.clients)
    result.plot(tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    for name in ("training loss", "test accuracy"):
        assert f"<!-- {name} -->" in drawn
    with pytest.raises(ClientError, match="must end in one of"):
        result.plot(tmp_path / "curves.gif")


@pytest.mark.sampled(every=3)
def test_a_run_ends_where_its_follower_says_and_goes_on(write: Write) -> None:
    federation = load_federation(write(), ["run.folder=run"])
    stopped = federation.run(lambda row: row.number < 2)
    assert len(stopped.history) == 2
    seen: list[int] = []
    found = federation.run(lambda row: seen.append(row.number))
    assert seen == [3]
    whole = load_federation(write()).run()
    for name, value in whole.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)


@pytest.mark.sampled(every=3)
def test_a_robust_rule_and_an_attack_are_tables(write: Write) -> None:
    rule = 'privacy = "plain"\naggregation = { rule = "median", tolerated = 1 }\n'
    rule += 'attack = { name = "ipm", share = 0.3 }\n'
    federation = load_federation(write(DATA + rule), ["cohort=4", "rounds=1"])
    prepared = federation.prepare()
    found = federation.run_prepared(prepared)
    expected = archipel.simulate(
        prepared.model, prepared.clients, training=prepared.training, rounds=1, seed=5, privacy="plain",
        aggregation="median", tolerated=1, attack="ipm", attackers=0.3, client_axis="off",
    )  # fmt: skip
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)
    assert found.history[0].failed == ""
    with pytest.raises(
        SimulationError, match=r"federation\.toml: .*rule: there is no 'medoid'; there are: mean, centered"
    ):
        load_federation(write(DATA + rule.replace("median", "medoid")))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("labels", "remedy"),
    [
        (lambda y: y.astype(np.float32), "convert it with .astype('int64')"),
        (lambda y: np.eye(3, dtype=np.float32)[y], "give the number of the class, .argmax(axis=-1)"),
    ],
)
def test_labels_of_another_form_are_told_with_what_to_do(
    write: Write, tmp_path: Path, labels: Callable[[np.ndarray], np.ndarray], remedy: str
) -> None:
    file, data = write(), loaded(tmp_path)
    data["y"] = labels(data["y"])
    np.savez(tmp_path / "data.npz", **data)
    with pytest.raises(RuntimeInputError, match=re.escape(remedy)):
        load_federation(file, ["run.client_axis=on", "rounds=1"]).run()
