"""Simulated devices that add noise themselves: noise on the model, account, budget, and rounds with too few."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import Bundle, PrivacyPolicy
from archipel.errors import PolicyError
from archipel.privacy import Gaussian, spent_epsilon
from archipel.simulation import DifferentialPrivacy, simulate
from tests.simulation.test_central_noise import BITS, CLIP, difference
from tests.simulation.test_engines import fields
from tests.support import simulation as reference

Make = Callable[..., Bundle]
POLICY = PrivacyPolicy(
    modes=("secure",), min_cohort=2, threshold=0.6, max_clip=CLIP, max_bits=BITS, colluders=0.25,
)  # fmt: skip
DELTA = 1e-5


def bundle_of(make: Make, **policy: Any) -> Bundle:
    """Of four devices three have to stay, and one may work with the server."""
    changed = {**{name: getattr(POLICY, name) for name in POLICY.__struct_fields__}, **policy}
    options = {"clip": CLIP, "bits": BITS, "weighting": "uniform"}
    return make("fedavg", reference.dense, strategy_options=options, privacy=PrivacyPolicy(**changed))


def distributed(multiplier: float | None = 1.0, **more: Any) -> DifferentialPrivacy:
    return DifferentialPrivacy(mechanism="distributed", noise_multiplier=multiplier, delta=DELTA, **more)


@pytest.mark.parametrize(
    "run",
    [
        {"client_axis": "off"},
        {"client_axis": "on"},
        {"masks": True},
        pytest.param({"workers": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.sampled(every=4)
def test_the_model_moves_by_the_mean_and_the_noise_of_all_devices(make: Make, run: dict[str, Any]) -> None:
    bundle = bundle_of(make)
    exact = simulate(bundle, fields(), rounds=1, **run)
    times = 1 if {"masks", "workers"} & set(run) else 4
    runs = [simulate(bundle, fields(), rounds=1, differential_privacy=distributed(0.01), **run) for _ in range(times)]
    noise = np.concatenate([difference(each, exact) for each in runs])
    # Planned for three devices less one, whose norm is just above the clip; four add noise, and the mean has a fourth.
    deviation = 0.01 * CLIP / math.sqrt(2) * math.sqrt(4) / 4
    assert noise.std() == pytest.approx(deviation, rel=0.05 + 5 / math.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 5 * deviation / math.sqrt(noise.size)
    assert {row.failed for each in runs for row in each.history} == {""}
    assert {row.multiplier for each in runs for row in each.history} == {runs[0].history[0].multiplier}
    # Three others' noise besides one that may be taken out.
    assert runs[0].history[0].multiplier == pytest.approx(0.01 * math.sqrt(3 / 2), rel=0.05)


@pytest.mark.sampled(every=3)
def test_the_account_counts_the_noise_of_those_that_stayed(make: Make) -> None:
    found = simulate(bundle_of(make), fields(), rounds=8, differential_privacy=distributed(2.0), dropout=0.2, seed=3)
    multipliers: list[float] = []
    for row in found.history:
        if row.devices < 3:
            assert row.failed == f"{row.devices} devices are fewer than the 3 that their noise is planned for"
            assert row.multiplier is None
        else:
            assert row.failed == ""
            assert row.multiplier == pytest.approx(2.0 * math.sqrt((row.devices - 1) / 2), rel=0.05)
            multipliers.append(row.multiplier)
        assert row.releases == len(multipliers)
        expected = spent_epsilon([Gaussian(noise_multiplier=each) for each in multipliers], DELTA)
        assert (row.epsilon or 0.0) == pytest.approx(expected, rel=1e-12)
        assert (row.metrics, row.clipped) == ({}, None)
    assert {row.devices for row in found.history} >= {3, 4}


@pytest.mark.sampled(every=3)
def test_a_target_holds_with_the_fewest_devices_and_a_run_ends_before_it_is_passed(make: Make, tmp_path: Path) -> None:
    bundle = bundle_of(make)
    found = simulate(bundle, fields(), rounds=3, differential_privacy=distributed(None, epsilon=8.0))
    assert len(found.history) == 3
    # All four stayed, so three rounds cost less than planned.
    assert 5.5 < (found.history[-1].epsilon or 0) < 7
    two = spent_epsilon([Gaussian(noise_multiplier=2.0 * math.sqrt(3 / 2))] * 2, DELTA)

    def run(rounds: int) -> Any:
        noise = distributed(2.0, epsilon=1.2 * two)
        return simulate(bundle, fields(), rounds=rounds, differential_privacy=noise, folder=tmp_path / "run")

    assert run(1).ended == ""
    again = run(9)
    assert len(again.history) == 2
    assert again.history[-1].epsilon == pytest.approx(two, rel=0.05)
    assert again.ended.startswith("another round would cost epsilon")


def test_noise_that_whole_numbers_do_not_hold_is_refused(make: Make) -> None:
    with pytest.raises(PolicyError, match="take a multiplier nearer to 1"):
        simulate(bundle_of(make), fields(), rounds=1, differential_privacy=distributed(1e6))


@pytest.mark.sampled(every=3)
def test_more_colluders_take_more_noise(make: Make) -> None:
    few, many = (
        simulate(bundle_of(make, colluders=share), fields(), rounds=1, differential_privacy=distributed(0.01))
        for share in (0.0, 0.5)
    )
    # Planned for three of three, and for two of four, as all of these have to stay; four were there.
    assert few.history[0].multiplier == pytest.approx(0.01 * math.sqrt(4 / 3), rel=0.05)
    assert many.history[0].multiplier == pytest.approx(0.01 * math.sqrt(2 / 2), rel=0.05)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("run", [{"client_axis": "off"}, {"client_axis": "on"}, {"aggregation": "median"}], ids=str)
def test_devices_of_plain_rounds_add_all_of_the_noise(make: Make, run: dict[str, Any]) -> None:
    """Each shortens its noisy update to the clip, so the mean of four is half as long as that, or shorter."""
    bundle = bundle_of(make, modes=("secure", "plain"))
    noise = DifferentialPrivacy(mechanism="local", noise_multiplier=2.0, delta=DELTA)
    found = simulate(bundle, fields(), rounds=2, differential_privacy=noise, privacy="plain", **run)
    assert [(row.failed, row.releases) for row in found.history] == [("", 1), ("", 2)]
    for row in found.history:
        assert row.multiplier == pytest.approx(2.0, rel=0.05)
        assert row.epsilon == pytest.approx(
            spent_epsilon([Gaussian(noise_multiplier=row.multiplier)] * row.number, DELTA), rel=1e-9
        )
        assert row.metrics == {}
    assert 0.3 * CLIP < found.history[0].step < 0.8 * CLIP
    exact = simulate(bundle, fields(), rounds=1, privacy="plain", **run)
    assert exact.history[0].step < 0.1 * CLIP


def test_local_noise_is_for_plain_rounds(make: Make) -> None:
    noise = DifferentialPrivacy(mechanism="local", noise_multiplier=2.0, delta=DELTA)
    with pytest.raises(PolicyError, match="take 'distributed', or set privacy to 'plain'"):
        simulate(bundle_of(make), fields(), rounds=1, differential_privacy=noise)
