"""Cohorts, dropouts, and a run that goes on after it was killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import archipel
from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.simulation import DrawnClients, running, saved
from archipel.simulation.draws import device_seed, draw_cohort, drawn_uniform
from tests.simulation.test_engines import bundle_of, fields

Make = Callable[..., Bundle]


class KilledError(Exception):
    """Stands for SIGKILL: nothing after it runs."""


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


def test_devices_that_drop_out_are_not_in_the_sum(make: Make) -> None:
    found = archipel.simulate(bundle_of(make, "fedavg"), fields(), rounds=20, dropout=0.4, client_axis="off")
    assert all(row.drawn == 4 for row in found.history)
    assert sum(row.devices for row in found.history) == sum(row.counted for row in found.clients.values())
    assert 0.4 < sum(row.devices for row in found.history) / 80 < 0.8
    empty = [row for row in found.history if row.devices == 0]
    assert all(row.failed == "no device's update came" for row in empty)


@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
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


def test_a_folder_with_another_run_is_refused(make: Make, tmp_path: Path) -> None:
    bundle = bundle_of(make, "fedavg")
    archipel.simulate(bundle, fields(), rounds=1, folder=tmp_path)
    with pytest.raises(SimulationError, match="has a run with another settings"):
        archipel.simulate(bundle, fields(), rounds=2, folder=tmp_path, seed=1)
    with pytest.raises(SimulationError, match="has a run with another population"):
        archipel.simulate(bundle, fields()[:3], rounds=2, folder=tmp_path, cohort=3)
    others = [{**each, "input": each["input"] + 1} for each in fields()]
    with pytest.raises(SimulationError, match="has a run with another examples"):
        archipel.simulate(bundle, others, rounds=2, folder=tmp_path)
    (tmp_path / saved.HISTORY).write_text("{")
    with pytest.raises(SimulationError, match="its run cannot be read"):
        archipel.simulate(bundle, fields(), rounds=2, folder=tmp_path)


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
