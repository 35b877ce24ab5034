"""Central differential privacy in simulations: noise on the model, account, budget, and what goes with it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel import strategies
from archipel.bundle import Bundle
from archipel.errors import PolicyError, SimulationError
from archipel.privacy import Gaussian, Repeated, spent_epsilon
from archipel.protocol.uploads import clip_input, upload_program
from archipel.simulation import DifferentialPrivacy, Pacing, System, load_federation, simulate
from tests.simulation.test_engines import NEEDED, fields
from tests.simulation.test_robust import SMALL
from tests.support import simulation as reference

Make = Callable[..., Bundle]
CLIP, BITS = 50.0, 16
NOISE = DifferentialPrivacy(mechanism="central", noise_multiplier=0.01, delta=1e-5)


def bundle_of(make: Make, strategy: str = "fedavg", **options: Any) -> Bundle:
    given = {"clip": CLIP, "bits": BITS, "weighting": "uniform", **NEEDED.get(strategy, {}), **options}
    return make(strategy, reference.dense, strategy_options=given)


def difference(found: Any, expected: Any) -> np.ndarray:
    names = sorted(expected.parameters)
    return np.concatenate([(found.parameters[name] - expected.parameters[name]).reshape(-1) for name in names])


@pytest.mark.parametrize("run", [{"client_axis": "off"}, {"client_axis": "on"}, {"masks": True}])
@pytest.mark.sampled(every=8)
def test_the_model_moves_by_the_mean_and_noise_of_the_stated_size(make: Make, run: dict[str, Any]) -> None:
    bundle = bundle_of(make)
    exact = simulate(bundle, fields(), rounds=1, **run)
    noise = np.concatenate(
        [
            difference(simulate(bundle, fields(), rounds=1, differential_privacy=NOISE, **run), exact)
            for _ in range(1 if "masks" in run else 4)
        ]
    )
    # Of four devices each weighs 1, so the mean has a quarter of the sum's noise, in whole steps of the encoding.
    step = CLIP / 32767
    size = noise.size // (1 if "masks" in run else 4)
    deviation = 0.01 * (CLIP * 1.001 + step * np.sqrt(size) / 2)
    steps = noise * 4 / step
    np.testing.assert_allclose(steps, np.rint(steps), atol=0.02)
    assert abs(noise.mean()) < 5 * deviation / 4 / np.sqrt(noise.size)
    assert noise.std() == pytest.approx(deviation / 4, rel=5 / np.sqrt(2 * noise.size))
    assert exact.history[0].epsilon is None


@pytest.mark.sampled(every=3)
def test_the_account_of_a_run(make: Make) -> None:
    noise = DifferentialPrivacy(mechanism="central", noise_multiplier=3.0, delta=1e-5)
    found = simulate(bundle_of(make), fields(), rounds=3, cohort=3, differential_privacy=noise)
    assert [row.releases for row in found.history] == [1, 2, 3]
    for row in found.history:
        # Without amplification by sampling, although three of four devices are drawn.
        event = Repeated(event=Gaussian(noise_multiplier=3.0), count=row.number)
        assert row.epsilon == spent_epsilon([event], 1e-5)
        # Devices' metrics and counts have no noise, so nobody gets them.
        assert (row.failed, row.metrics, row.clipped) == ("", {}, None)
    assert found.table()["epsilon"].tolist() == [row.epsilon for row in found.history]
    assert found.ended == ""


@pytest.mark.sampled(every=3)
def test_a_target_for_all_rounds(make: Make) -> None:
    noise = DifferentialPrivacy(mechanism="central", epsilon=8.0, delta=1e-5)
    found = simulate(bundle_of(make), fields(), rounds=3, differential_privacy=noise)
    assert len(found.history) == 3
    assert 7.99 < (found.history[-1].epsilon or 0) <= 8.0


@pytest.mark.sampled(every=4)
def test_the_run_ends_before_the_round_that_would_cost_too_much(make: Make, tmp_path: Path) -> None:
    event = Gaussian(noise_multiplier=2.0)
    two, three = (spent_epsilon([Repeated(event=event, count=count)], 1e-5) for count in (2, 3))
    noise = DifferentialPrivacy(mechanism="central", noise_multiplier=2.0, epsilon=(two + three) / 2, delta=1e-5)
    bundle = bundle_of(make)

    def run(rounds: int) -> Any:
        return simulate(bundle, fields(), rounds=rounds, differential_privacy=noise, folder=tmp_path / "run")

    assert run(1).ended == ""
    # A run that goes on remembers what is spent.
    found = run(9)
    assert [row.epsilon for row in found.history][1:] == [two]
    assert found.ended == f"another round would cost epsilon {three:.4g} in all, and {noise.epsilon:g} is allowed"
    again = run(9)
    assert len(again.history) == 2
    assert again.ended == found.ended


@pytest.mark.sampled(every=3)
def test_a_round_that_fails_once_its_sum_is_known_is_paid_for(make: Make) -> None:
    bundle, beyond = bundle_of(make), {"server_lr": 1e6}
    found = simulate(bundle, fields(), rounds=2, differential_privacy=NOISE, hyperparameters=beyond)
    assert [row.releases for row in found.history] == [1, 2]
    assert all("server_lr" in row.failed for row in found.history)
    # One in which no update came has released nothing.
    empty = simulate(bundle, fields(), rounds=2, differential_privacy=NOISE, dropout=0.9999)
    assert [(row.devices, row.releases, row.epsilon) for row in empty.history] == [(0, 0, None)] * 2


WEIGHS = "devices have weights of their own"
REFUSED = {
    "fednova": WEIGHS,
    "scaffold": "devices send .* beside their clipped changes",
    "qfedavg": WEIGHS,
    "ifca": "devices send .* beside their clipped changes",
    "fedexp": "devices send .* beside their clipped changes",
    "feddistill": WEIGHS,
}
NOT_SECURE = "fedasync"


@pytest.mark.parametrize("mechanism", ["central", "distributed"])
@pytest.mark.parametrize("strategy", sorted(set(strategies.STRATEGIES) - {NOT_SECURE}))
@pytest.mark.sampled(every=6)
def test_every_strategy_gets_noise_or_is_refused_by_name(make: Make, strategy: str, mechanism: str) -> None:
    noise = DifferentialPrivacy(mechanism=mechanism, noise_multiplier=0.01, delta=1e-5)
    options = {} if REFUSED.get(strategy) == WEIGHS else {"weighting": "uniform"}
    given = {"clip": CLIP, "bits": BITS, **NEEDED.get(strategy, {}), **options}
    if strategy == "feddistill":
        del given["clip"]
    # BatchNormalization's statistics stay on the device in fedbn alone.
    bundle = make(strategy, reference.normalized if strategy == "fedbn" else reference.dense, strategy_options=given)
    if strategy in REFUSED:
        with pytest.raises(PolicyError, match=f"strategy '{strategy}': {REFUSED[strategy]}"):
            simulate(bundle, fields(), rounds=1, differential_privacy=noise)
        return
    found = simulate(bundle, fields(), rounds=2, differential_privacy=noise)
    assert [(row.failed, row.releases) for row in found.history] == [("", 1), ("", 2)]


@pytest.mark.parametrize("mechanism", ["central", "distributed"])
@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"weighting": "examples"}, {}, "weighting = 'uniform'"),
        ({"clip": None}, {}, "hyperparameters.update_clip = 1.0, say"),
        ({"compress": "rotation", "bits": 8}, {}, "updates are packed"),
        ({"module": reference.normalized}, {}, "use strategy 'fedbn', or another normalization"),
        ({}, {"privacy": "plain"}, "set privacy to 'secure'"),
        ({}, {"secure_groups": 2}, "leave aggregation and secure_groups away"),
        ({}, {"mode": Pacing(mode="asynchronous"), "system": System()}, "several times"),
    ],
)
@pytest.mark.sampled(every=6)
def test_what_it_does_not_go_with(
    make: Make, options: dict[str, Any], settings: dict[str, Any], message: str, mechanism: str
) -> None:
    noise = DifferentialPrivacy(mechanism=mechanism, noise_multiplier=0.01, delta=1e-5)
    given = {"clip": CLIP, "bits": BITS, "weighting": "uniform", **options}
    bundle = make("fedavg", given.pop("module", reference.dense), strategy_options=given, privacy=SMALL)
    with pytest.raises((PolicyError, SimulationError), match=message):
        simulate(bundle, fields(), rounds=1, cohort=4, differential_privacy=noise, **settings)


@pytest.mark.sampled(every=3)
def test_an_adapted_clip_that_the_task_fixes(make: Make) -> None:
    bundle = bundle_of(make, clip=None)
    found = simulate(
        bundle, fields(), rounds=2, differential_privacy=NOISE, hyperparameters={"update_clip": 0.5}, seed=1
    )
    assert [(row.failed, row.clip) for row in found.history] == [("", 0.5)] * 2
    # The noise is that of the smaller clip.
    exact = simulate(bundle, fields(), rounds=2, hyperparameters={"update_clip": 0.5}, seed=1)
    assert 1e-4 < difference(found, exact).std() < 0.01 * 0.5


def test_in_the_file_of_a_federation(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(
        'rounds = 2\n[model]\nzoo = "mlp"\n[model.arguments]\nfeatures = 4\nhidden = 3\nclasses = 2\n[data]\n'
        'train = "train.npz"\n[partition]\nhow = "iid"\nclients = 4\n[strategy]\nname = "fedavg"\n'
        'weighting = "uniform"\nclip = 1.0\n'
        '[differential_privacy]\nmechanism = "central"\nepsilon = 6.0\ndelta = 1e-5\n'
    )
    found = load_federation(tmp_path / "federation.toml").settings.differential_privacy
    assert found == DifferentialPrivacy(mechanism="central", epsilon=6.0, delta=1e-5)
    task = ["task.name=digits", "task.population=pupils", "task.min_cohort=3", "cohort=4"]
    request = load_federation(tmp_path / "federation.toml", task).task_request("0" * 64)
    assert request.differential_privacy == found
    with pytest.raises(SimulationError, match=r"differential_privacy\.epsilon"):
        load_federation(tmp_path / "federation.toml", ["differential_privacy.epsilon=-1"])
    with pytest.raises(SimulationError, match="needs one of them"):
        load_federation(tmp_path / "federation.toml", replaced={"differential_privacy": {"mechanism": "central"}})


@pytest.mark.sampled(every=3)
def test_a_clip_that_follows_a_noisy_count(make: Make) -> None:
    """Andrew et al. 2021: the clip moves by the share of clipped updates, which is a secure count with noise."""
    bundle = bundle_of(make, clip=None)
    noise = DifferentialPrivacy(mechanism="central", noise_multiplier=0.01, clip_noise=2.0, delta=1e-5)
    found = simulate(bundle, fields(), rounds=12, differential_privacy=noise)
    exact = simulate(bundle, fields(), rounds=1)
    rows, port = found.history, clip_input(upload_program(bundle.manifest, "training"))
    assert port is not None
    assert [row.failed for row in rows] == [""] * 12
    assert rows[0].clip == exact.history[0].clip
    for before, after in pairwise(rows):
        assert before.clip is not None
        assert before.clipped is not None
        # The published update, c exp(rate (share - target)), with a rate of 1 and a target of a tenth.
        moved = before.clip * math.exp(before.clipped / 4 - 0.1)
        assert after.clip == pytest.approx(min(max(moved, port.minimum), port.maximum), rel=1e-6)
    counts = [row.clipped for row in rows]
    # No count but from 0 to 4, and different ones, although the devices clip alike.
    assert set(counts) <= {0, 1, 2, 3, 4}
    assert len(set(counts)) > 1
    for row in rows:
        events = [Repeated(event=Gaussian(noise_multiplier=multiplier), count=row.number) for multiplier in (0.01, 2.0)]
        assert row.epsilon == pytest.approx(spent_epsilon(events, 1e-5), rel=1e-9)
        # Metrics of devices have no noise, so nobody gets them.
        assert row.metrics == {}


@pytest.mark.sampled(every=3)
def test_a_target_includes_the_counts(make: Make) -> None:
    noise = DifferentialPrivacy(mechanism="central", epsilon=8.0, clip_noise=3.0, delta=1e-5)
    found = simulate(bundle_of(make, clip=None), fields(), rounds=3, differential_privacy=noise)
    assert len(found.history) == 3
    assert 7.99 < (found.history[-1].epsilon or 0) <= 8.0
    with pytest.raises(PolicyError, match="clip_noise is for a clip that the server adapts"):
        simulate(bundle_of(make), fields(), rounds=1, differential_privacy=noise)


def test_noise_that_drowns_the_updates_is_told_before_the_rounds(make: Make) -> None:
    """And the hint has the noise that then comes."""
    bundle, begun = bundle_of(make), []
    settings = {"rounds": 1, "client_axis": "off"}
    exact = simulate(bundle, fields(), on_begin=begun.append, **settings)
    assert (exact.hints, len(begun)) == ([], 1)
    assert simulate(bundle, fields(), differential_privacy=NOISE, **settings).hints == []
    noise = DifferentialPrivacy(mechanism="central", noise_multiplier=2.0, delta=1e-5)
    rows: list[int] = []
    found = simulate(
        bundle, fields(), differential_privacy=noise, on_begin=lambda result: rows.append(len(result.history)),
        **settings,
    )  # fmt: skip
    assert rows == [0]
    [hint] = found.hints
    told = re.search(r"on the mean of 4 devices .* a norm of ([\d.]+), ([\d.]+) times the clip of 50,", hint)
    assert told is not None, hint
    drawn = 2.0 * CLIP * np.sqrt(difference(found, exact).size) / 4
    assert float(told[1]) == pytest.approx(drawn, rel=0.02)
    assert float(told[2]) == pytest.approx(drawn / CLIP, rel=0.05)
