"""Correlated noise in simulations: what the model gets of it, who rests, the account, and runs that go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.privacy import Gaussian, spent_epsilon
from archipel.simulation import DifferentialPrivacy, System, load_federation, simulate
from archipel.simulation.draws import draw_cohort
from tests.simulation.test_central_noise import CLIP, bundle_of
from tests.simulation.test_engines import fields

Make = Callable[..., Bundle]
COEFFICIENTS = (64, 40, 30)


def correlated(multiplier: float | None = 0.01, **more: Any) -> DifferentialPrivacy:
    given = {"noise_multiplier": multiplier, "delta": 1e-5, "separation": 4, "coefficients": COEFFICIENTS, **more}
    return DifferentialPrivacy(mechanism="correlated", **given)


STILL: dict[str, Any] = {"cohort": 1, "hyperparameters": {"lr": 0.0}, "client_axis": "off"}
"""Devices that do not learn, so what moves the model is the noise alone."""


def flat(parameters: Any) -> np.ndarray:
    return np.concatenate([np.asarray(parameters[name], np.float64).reshape(-1) for name in sorted(parameters)])


@pytest.mark.sampled(every=3)
def test_the_model_gets_the_inverse_matrix_times_independent_noise(make: Make) -> None:
    bundle, rounds = bundle_of(make), 40
    begin = flat(bundle.parameters())
    found = simulate(bundle, fields(), rounds=rounds, differential_privacy=correlated(0.002), **STILL)
    assert [row.failed for row in found.history] == [""] * rounds
    moved = flat(found.parameters) - begin
    matrix = sum(c / 64 * np.eye(rounds, k=-lag) for lag, c in enumerate(COEFFICIENTS))
    gain = np.linalg.norm(np.linalg.inv(np.asarray(matrix)).sum(axis=0))
    deviation = 0.002 * (CLIP * 1.001 + CLIP / 32767 * math.sqrt(moved.size) / 2)
    # All rounds together move the model by half of what as many independent draws would.
    assert gain < 0.52 * math.sqrt(rounds)
    assert moved.std() == pytest.approx(gain * deviation, rel=5 / math.sqrt(2 * moved.size))


@pytest.mark.sampled(every=3)
def test_devices_rest_until_others_had_their_rounds(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cohorts = drawn_by(make, monkeypatch, rounds=9)
    assert all(len(each) == 1 for each in cohorts)
    for first in range(len(cohorts)):
        for second in range(first + 1, min(first + 4, len(cohorts))):
            assert not cohorts[first] & cohorts[second]
    on_a_clock = drawn_by(make, monkeypatch, rounds=9, system=System())
    assert all(not first & second for first, second in pairwise(on_a_clock))
    assert len(set().union(*on_a_clock[:4])) == 4


def drawn_by(make: Make, monkeypatch: pytest.MonkeyPatch, rounds: int, **more: Any) -> list[set[int]]:
    from archipel.simulation.rounds import Rounds

    cohorts: list[set[int]] = []
    run = Rounds.run

    def watched(self: Rounds, engine: Any, saved: int = 0) -> Any:
        row, reports = run(self, engine, saved)
        cohorts.append({report.client for report in reports})
        return row, reports

    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "run", watched)
        found = simulate(bundle_of(make), fields(), rounds=rounds, cohort=1, differential_privacy=correlated(), **more)
    assert [row.failed for row in found.history] == [""] * rounds
    return cohorts


def test_a_cohort_without_those_that_rest() -> None:
    everybody = draw_cohort(20, 20, 3, 5)
    assert everybody.tolist() == list(range(20))
    resting = {1, 4, 7, 19}
    seen = [draw_cohort(20, 6, 3, number, resting) for number in range(200)]
    assert all(len(set(each.tolist())) == 6 and not resting & set(each.tolist()) for each in seen)
    counts = np.bincount(np.concatenate(seen), minlength=20)
    rest = np.delete(counts, sorted(resting))
    # 200 rounds of 6 of 16 devices: 75 each.
    assert np.abs(rest - 75).max() < 5 * math.sqrt(75)
    assert draw_cohort(20, 6, 3, 5).tolist() == draw_cohort(20, 6, 3, 5, set()).tolist()


@pytest.mark.sampled(every=3)
def test_the_account_and_the_end_of_a_run(make: Make) -> None:
    bundle = bundle_of(make)
    found = simulate(bundle, fields(), rounds=6, cohort=1, differential_privacy=correlated(3.0))
    squares = [1, (40 / 64) ** 2, (30 / 64) ** 2, 0, 1, (40 / 64) ** 2]
    for number, row in enumerate(found.history, start=1):
        multiplier = 3.0 / math.sqrt(sum(squares[:number]))
        expected = spent_epsilon([Gaussian(noise_multiplier=multiplier)], 1e-5)
        assert row.releases == number
        assert row.epsilon == pytest.approx(expected, rel=1e-9)
    enough = found.history[3].epsilon or 0.0
    noise = correlated(3.0, epsilon=enough * (1 + 1e-9))
    ended = simulate(bundle, fields(), rounds=6, cohort=1, differential_privacy=noise)
    # The fourth round is free; the fifth, to which the first one's devices may come again, is not.
    assert len(ended.history) == 4
    assert "another round would cost" in ended.ended


def test_a_target_for_all_rounds(make: Make) -> None:
    noise = DifferentialPrivacy(mechanism="correlated", epsilon=8.0, delta=1e-5, separation=3)
    found = simulate(bundle_of(make), fields(), rounds=7, cohort=1, differential_privacy=noise)
    assert len(found.history) == 7
    assert 7.99 < (found.history[-1].epsilon or 0) <= 8.0


@pytest.mark.sampled(every=3)
def test_a_run_that_goes_on_takes_back_what_it_added_before(make: Make, tmp_path: Path) -> None:
    bundle = bundle_of(make)

    def run(until: int) -> Any:
        return simulate(
            bundle, fields(), rounds=until, differential_privacy=correlated(0.002, coefficients=(64, 63)),
            folder=tmp_path / "run", **STILL,
        )  # fmt: skip

    models = [flat(bundle.parameters()), *(flat(run(until).parameters) for until in range(1, 7))]
    moves = [after - before for before, after in pairwise(models)]
    # A round takes back nearly all of the noise of the one before it.
    for first, second in pairwise(moves):
        assert np.corrcoef(first, second)[0, 1] < -0.4
    with pytest.raises(SimulationError, match="other settings"):
        simulate(bundle, fields(), rounds=8, differential_privacy=correlated(0.002), folder=tmp_path / "run", **STILL)


def test_too_few_clients_for_the_separation(make: Make) -> None:
    with pytest.raises(SimulationError, match="4 rounds in a row have no client in common, which takes 8 clients"):
        simulate(bundle_of(make), fields(), rounds=2, cohort=2, differential_privacy=correlated())


def test_in_the_file_of_a_federation(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(
        'rounds = 2\n[model]\nzoo = "mlp"\n[model.arguments]\nfeatures = 4\nhidden = 3\nclasses = 2\n[data]\n'
        'train = "train.npz"\n[partition]\nhow = "iid"\nclients = 4\n[strategy]\nname = "fedavg"\n'
        'weighting = "uniform"\nclip = 1.0\n[differential_privacy]\nmechanism = "correlated"\nepsilon = 6.0\n'
        "separation = 3\ncoefficients = [10, 5, 2]\n"
    )
    found = load_federation(tmp_path / "federation.toml").settings.differential_privacy
    assert found == DifferentialPrivacy(mechanism="correlated", epsilon=6.0, separation=3, coefficients=(10, 5, 2))
    with pytest.raises(SimulationError, match=r"separation: expected .* >= 2"):
        load_federation(tmp_path / "federation.toml", ["differential_privacy.separation=1"])
