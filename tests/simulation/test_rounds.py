"""Cohorts, dropouts, and a run that goes on after it was killed."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import archipel
from archipel.bundle import Bundle, read_weights, write_weights
from archipel.errors import SimulationError
from archipel.simulation import DrawnClients, running, saved
from archipel.simulation.draws import device_seed, draw_cohort, drawn_uniform
from tests.simulation.test_engines import bundle_of, fields

Make = Callable[..., Bundle]


class KilledError(Exception):
    """Stands for SIGKILL: nothing after it runs."""


@pytest.mark.sampled(every=3)
def test_cohorts_are_drawn_without_replacement_and_evenly() -> None:
    counts = np.zeros(50, np.int64)
    for number in range(2000):
        drawn = draw_cohort(50, 5, 7, number)
        assert len(set(drawn.tolist())) == 5
        assert (np.diff(drawn) > 0).all()
        counts[drawn] += 1
    # Each is expected in 200 of 2,000 rounds, with a standard deviation of 13.4.
    assert counts.min() > 200 - 6 * 13.4
    assert counts.max() < 200 + 6 * 13.4
    assert draw_cohort(10**12 % 2**40, 1000, 0, 3).max() < 10**12


def test_draws_depend_on_what_they_are_for() -> None:
    values = [drawn_uniform(purpose, 0, 1, client) for purpose in ("dropout", "speed") for client in range(500)]
    assert len(set(values)) == 1000
    assert 0.45 < float(np.mean(values)) < 0.55
    seeds = [device_seed(seed, number, client) for seed in (0, 1) for number in (1, 2) for client in range(50)]
    assert len(set(seeds)) == 200


@pytest.mark.sampled(every=3)
def test_devices_that_drop_out_are_not_in_the_sum(make: Make) -> None:
    found = archipel.simulate(bundle_of(make, "fedavg"), fields(), rounds=20, dropout=0.4, client_axis="off")
    assert all(row.drawn == 4 for row in found.history)
    assert sum(row.devices for row in found.history) == sum(row.counted for row in found.clients.values())
    assert 0.4 < sum(row.devices for row in found.history) / 80 < 0.8
    empty = [row for row in found.history if row.devices == 0]
    assert all(row.failed == "no device's update came" for row in empty)


@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
@pytest.mark.sampled(every=4)
def test_a_run_killed_at_any_write_ends_at_the_same_model(
    make: Make, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(make, strategy)

    def run(folder: Path) -> archipel.simulation.Result:
        return archipel.simulate(bundle, fields(), rounds=3, cohort=3, folder=folder, client_axis="off")

    monkeypatch.setattr(running, "SAVE_SECONDS", 0.0)
    expected = run(tmp_path / "whole")
    writes, real_replace, real_unlink = 0, os.replace, Path.unlink

    def count_or_die(limit: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **named: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == limit:
                raise KilledError
            return call(*given, **named)

        return step

    for limit in range(1, 100):
        writes = 0
        folder = tmp_path / f"killed-{limit}"
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", count_or_die(limit, real_replace))
            patched.setattr(Path, "unlink", count_or_die(limit, real_unlink))
            try:
                run(folder)
            except KilledError:
                killed = True
            else:
                killed = False
        found = run(folder)
        for name, value in expected.parameters.items():
            np.testing.assert_array_equal(found.parameters[name], value, err_msg=f"killed at write {limit}")
        assert [row.metrics for row in found.history] == [row.metrics for row in expected.history]
        assert found.clients == expected.clients
        if not killed:
            break
    assert limit > 6, "each round is saved, so there are several writes"


@pytest.mark.sampled(every=3)
def test_a_kill_costs_no_more_than_the_rounds_since_the_first_or_the_last_save(make: Make, tmp_path: Path) -> None:
    bundle = bundle_of(make, "fedavg")

    def die(row: Any) -> None:
        if row.number == 3:
            raise KilledError

    with pytest.raises(KilledError):
        archipel.simulate(bundle, fields(), rounds=4, folder=tmp_path, client_axis="off", on_round=die)
    again: list[int] = []
    archipel.simulate(
        bundle, fields(), rounds=4, folder=tmp_path, client_axis="off", on_round=lambda row: again.append(row.number)
    )
    assert again == [2, 3, 4]


@pytest.mark.sampled(every=3)
def test_what_devices_keep_is_on_the_disk_before_a_round_counts(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves a history whose devices have empty files."""
    synced: set[str] = set()
    counted: list[set[str]] = []
    real_replace = os.replace

    def files() -> set[str]:
        return {path.name for path in (tmp_path / saved.STATES).rglob("*.state")}

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == saved.HISTORY:
            counted.append(files() - synced)
        real_replace(source, target)

    monkeypatch.setattr(running, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(os, "sync", lambda: synced.update(files()))
    monkeypatch.setattr(os, "replace", replace)
    archipel.simulate(bundle_of(make, "scaffold"), fields(), rounds=3, folder=tmp_path, client_axis="off")
    assert len(synced) >= 8
    assert counted == [set()] * 3


@pytest.mark.sampled(every=3)
def test_a_folder_is_one_run_s_at_a_time(make: Make, tmp_path: Path) -> None:
    bundle, refused = bundle_of(make, "fedavg"), []

    def another(row: Any) -> None:
        with pytest.raises(SimulationError, match="another run uses it now; wait for its end, or give another folder"):
            archipel.simulate(bundle, fields(), rounds=2, folder=tmp_path)
        refused.append(row.number)

    archipel.simulate(bundle, fields(), rounds=2, folder=tmp_path, on_round=another)
    assert refused == [1, 2]
    archipel.simulate(bundle, fields(), rounds=3, folder=tmp_path)


@pytest.mark.parametrize("damage", ["another shape", "a name less", "cut", "rounds"])
@pytest.mark.sampled(every=6)
def test_a_damaged_folder_is_refused(make: Make, damage: str, tmp_path: Path) -> None:
    bundle = bundle_of(make, "fedavg")
    archipel.simulate(bundle, fields(), rounds=1, folder=tmp_path, client_axis="off")
    file = tmp_path / "round-1.safetensors"
    tensors = dict(read_weights(file.read_bytes()))
    name = next(name for name in tensors if name.startswith("parameter/"))
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    elif damage == "rounds":
        text = (tmp_path / saved.HISTORY).read_text()
        assert '"number": 1' in text
        (tmp_path / saved.HISTORY).write_text(text.replace('"number": 1', '"number": 7'))
    else:
        array = tensors.pop(name)
        if damage == "another shape":
            # Broadcasting would take it as it is.
            tensors[name] = np.ascontiguousarray(array[:1])
        file.write_bytes(write_weights(tensors))
    with pytest.raises(SimulationError, match=r"its run cannot be read .*; remove the folder to begin anew"):
        archipel.simulate(bundle, fields(), rounds=2, folder=tmp_path)


@pytest.mark.sampled(every=3)
def test_a_folder_with_another_run_is_refused(make: Make, tmp_path: Path) -> None:
    bundle = bundle_of(make, "fedavg")
    archipel.simulate(bundle, fields(), rounds=1, folder=tmp_path)
    with pytest.raises(SimulationError, match="has a run with other settings of its rounds"):
        archipel.simulate(bundle, fields(), rounds=2, folder=tmp_path, seed=1)
    with pytest.raises(SimulationError, match="has a run with another number of devices"):
        archipel.simulate(bundle, fields()[:3], rounds=2, folder=tmp_path, cohort=3)
    others = [{**each, "input": each["input"] + 1} for each in fields()]
    with pytest.raises(SimulationError, match="has a run with other examples"):
        archipel.simulate(bundle, others, rounds=2, folder=tmp_path)
    (tmp_path / saved.HISTORY).write_text("{")
    with pytest.raises(SimulationError, match="its run cannot be read"):
        archipel.simulate(bundle, fields(), rounds=2, folder=tmp_path)


@pytest.mark.sampled(every=4)
def test_a_module_is_simulated_and_resumed_without_a_bundle(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    clients = [(each["input"], each["label"]) for each in fields()]
    test = (np.concatenate([x for x, _ in clients]), np.concatenate([y for _, y in clients]))
    first = archipel.simulate(network, clients, rounds=4, test=test, folder=tmp_path, epochs=2)
    assert first.history[-1].tested["loss"] < first.history[0].tested["loss"]
    more = archipel.simulate(network, clients, rounds=6, test=test, folder=tmp_path, epochs=2)
    assert [row.number for row in more.history] == [1, 2, 3, 4, 5, 6]
    whole = archipel.simulate(network, clients, rounds=6, test=test, epochs=2, client_axis="off")
    for name, value in whole.parameters.items():
        np.testing.assert_allclose(more.parameters[name], value, atol=1e-5)
    # What a user does with it: the same bundle with the federated parameters answers.
    assert set(first.table()) >= {"round", "devices", "test accuracy", "training loss"}


@pytest.mark.sampled(every=4)
def test_no_folder_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    network, clients = nn.Linear(6, 3), [(each["input"], each["label"]) for each in fields()]
    with pytest.raises(SimulationError, match="cohort"):
        archipel.simulate(network, clients, rounds=1, cohort=99)
    gc.collect()
    assert list(tmp_path.glob("archipel-*")) == []
    result = archipel.simulate(network, clients, rounds=1)
    assert len(list(tmp_path.glob("archipel-*"))) == 1
    assert result.bundle.program("predict")
    del result
    gc.collect()
    assert list(tmp_path.glob("archipel-*")) == []


def test_a_population_of_a_million_costs_what_the_cohort_costs(make: Make) -> None:
    asked = []

    def make_examples(client: int) -> dict[str, np.ndarray]:
        asked.append(client)
        rng = np.random.default_rng(client)
        return {"input": rng.standard_normal((5, 6), np.float32), "label": rng.integers(0, 3, 5)}

    clients = DrawnClients(10**6, 5, make_examples)
    found = archipel.simulate(bundle_of(make, "fedavg"), clients, rounds=2, cohort=20, client_axis="on")
    assert [row.devices for row in found.history] == [20, 20]
    assert len(asked) == 40
    assert max(asked) > 10**5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rounds": 0}, "rounds: 0 is not a whole number of 1 or more"),
        ({"cohort": 5}, "cohort: 5 is not from 1 to 4"),
        ({"dropout": 1.0}, "dropout: 1.0 is not from 0 to below 1"),
        ({"privacy": "none"}, "privacy: 'none' is not 'secure' or 'plain'"),
        ({"workers": 0}, "workers: 0 is not a whole number of 1 or more"),
        ({"client_axis": "yes"}, "client_axis: 'yes' is not 'auto', 'on' or 'off'"),
    ],
)
def test_wrong_settings_are_named(make: Make, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        archipel.simulate(bundle_of(make, "fedavg"), fields(), **{"rounds": 1, **wrong})
