"""The server's noise: its distribution, how much one device can change a sum, and what the two cost together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.bundle.roles import Update
from archipel.errors import BoundError, PolicyError, ProtocolError
from archipel.privacy import Gaussian, spent_epsilon
from archipel.privacy.central import draw_noise, events_of, noise_scale, release_sum, sensitivity, settle
from archipel.protocol.bounds import SLACK, groups, step
from archipel.protocol.metrics.training_metrics import count_entry
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.vector import DecodedSum, Layout

BITS = 8


def delta_port(name: str, shape: tuple[int, ...], **changes: Any) -> Update:
    fields = {
        "tensor": name, "dtype": "float32", "kind": "delta", "weighting": "uniform", "range": 1.0, "bits": BITS,
        "clip": 1.0, **changes,
    }  # fmt: skip
    return Update(name=f"{name}.update", shape=shape, **fields)


def layout(size: int = 6, **changes: Any) -> Layout:
    return Layout((delta_port("w", (size // 2, 2), **changes), delta_port("b", (size % 2 + 1,), **changes)))


def byte_source(seed: str) -> Callable[[int], bytes]:
    state = {"block": 0}

    def read(count: int) -> bytes:
        state["block"] += 1
        return hashlib.shake_256(f"{seed}/{state['block']}".encode()).digest(count)

    return read


def release(total: np.ndarray, of: Layout, cohort: int, multiplier: float, seed: str, bits: int = 16) -> DecodedSum:
    settings = DifferentialPrivacy(mechanism="central", noise_multiplier=multiplier)
    noise = draw_noise(settings, of, randomness=byte_source(seed))
    vector = total.astype(np.int64).astype(np.uint32) & np.uint32(2**bits - 1)
    return release_sum(vector, of, cohort=cohort, modulus_bits=bits, noise=noise)


def whole(found: DecodedSum, of: Layout) -> np.ndarray:
    """The sum in steps again."""
    parts = [found.deltas[port.tensor].reshape(-1) / step(port) for port in of.updates if port.kind == "delta"]
    rounded = np.rint(np.concatenate(parts))
    np.testing.assert_allclose(np.concatenate(parts), rounded, atol=1e-9)
    return rounded.astype(np.int64)


def exact_masses(scale: float, reach: int) -> dict[int, float]:
    weights = {k: math.exp(-k * k / (2 * scale**2)) for k in range(-reach, reach + 1)}
    total = math.fsum(weights.values())
    return {k: weight / total for k, weight in weights.items()}


def chi_square_limit(freedom: int) -> float:
    # Wilson-Hilferty at 4.26 standard deviations: exceeded with probability 1e-5.
    return freedom * (1 - 2 / (9 * freedom) + 4.26 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("multiplier", [0.02, 0.05])
def test_the_noise_is_discrete_gaussian_around_the_exact_sum(multiplier: float) -> None:
    of = layout(4000)
    exact = np.arange(of.length) % 5 - 2
    [group] = groups(of.updates)
    scale = noise_scale(group, multiplier)
    assert scale == math.ceil(multiplier * math.ceil(127 * (1 + SLACK) + math.sqrt(of.length) / 2)) < 20
    noise = np.concatenate(
        [whole(release(exact, of, 200, multiplier, f"{multiplier}/{n}"), of) - exact for n in range(3)]
    )
    masses, statistic, cells, rest = exact_masses(scale, 12 * scale), 0.0, 0, [float(len(noise)), len(noise)]
    for k, mass in masses.items():
        expected, seen = mass * len(noise), int((noise == k).sum())
        if expected >= 10:
            statistic += (seen - expected) ** 2 / expected
            cells, rest = cells + 1, [rest[0] - expected, rest[1] - seen]
    assert rest[0] < 200
    assert abs(rest[1] - rest[0]) < 6 * math.sqrt(rest[0])
    assert statistic < chi_square_limit(cells - 1)


@pytest.mark.sampled(every=3)
@given(st.data())
def test_no_update_changes_the_sum_by_more(data: st.DataObject) -> None:
    """Also the longest that the runtime lets through, each element of which rounding makes longer."""
    size, bits = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([4, 8, 16]))
    of = Layout((delta_port("w", (size,), bits=bits, clip=data.draw(st.sampled_from([0.1, 1.0, 2.0]))),))
    [group] = groups(of.updates)
    direction = np.array(data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), float) + 0.1
    values = direction / np.linalg.norm(direction) * group.bound * (1 + 0.9 * SLACK)
    # Half steps are what rounding makes most of.
    halves = (np.floor(values / step(of.updates[0])) + 0.5) * step(of.updates[0])
    for each in (values, halves * min(1.0, np.linalg.norm(values) / max(np.linalg.norm(halves), 1e-30))):
        vector = of.encode({"w.update": each.astype(np.float32)}, modulus_bits=24, max_cohort=2).astype(np.int64)
        vector[vector >= 1 << 23] -= 1 << 24
        assert np.linalg.norm(vector) <= sensitivity(group)


def test_what_a_release_really_costs_is_within_the_account() -> None:
    """For one element, delta of the exact probabilities at the account's epsilon is at most the account's delta."""
    of = Layout((delta_port("w", (1,)),))
    [group] = groups(of.updates)
    for multiplier, delta in ((0.5, 1e-4), (1.0, 1e-6), (3.0, 1e-5)):
        scale, shift = noise_scale(group, multiplier), sensitivity(group)
        epsilon = spent_epsilon([Gaussian(noise_multiplier=multiplier)], delta)
        at = np.arange(-40 * scale, 40 * scale + 1, dtype=float)
        log = -(at**2) / (2 * scale**2)
        log -= math.log(np.exp(log).sum())
        moved = np.interp(at - shift, at, log, left=-np.inf, right=-np.inf)
        gap = np.exp(log) - math.exp(epsilon) * np.exp(moved)
        spent = gap[gap > 0].sum()
        assert spent <= delta
        # It is not far from it either: a noise of half the scale would break the bound.
        half = -(at**2) / (2 * (scale / 2) ** 2)
        half -= math.log(np.exp(half).sum())
        moved = np.interp(at - shift, at, half, left=-np.inf, right=-np.inf)
        gap = np.exp(half) - math.exp(epsilon) * np.exp(moved)
        assert gap[gap > 0].sum() > delta


def test_noise_does_not_wrap_around_the_modulus() -> None:
    of, cohort = layout(40, clip=10.0, range=1.0, bits=4), 18  # the largest sum is 126 of at most 127
    exact = np.full(of.length, 126)
    exact[1::2] = -126
    found = release(exact, of, cohort, 0.4, "wrap", bits=8)
    noise = whole(found, of) - exact
    assert np.abs(whole(found, of)).max() > 127
    assert np.abs(noise).max() < 8 * noise_scale(groups(of.updates)[0], 0.4)


def test_a_longer_sum_than_devices_can_send_is_shortened() -> None:
    of, exact = layout(4000), np.zeros(4001, np.int64)
    found = release(exact, of, 4, 3.0, "long")
    norm = math.sqrt(sum(float((array**2).sum()) for array in found.deltas.values()))
    [group] = groups(of.updates)
    rounding = 4 * math.sqrt(4001) * step(of.updates[0]) / 2
    assert norm == pytest.approx(4 * 1.0 * (1 + SLACK) + rounding, rel=1e-6)
    of.check_sum(found, 4)
    # Shortened, not changed in direction.
    unbounded = release(exact, of, 2**14, 3.0, "long", bits=24)
    assert noise_scale(group, 3.0) / 5 < np.abs(whole(unbounded, of)).mean() < noise_scale(group, 3.0)
    one, other = (np.concatenate([array.reshape(-1) for array in each.deltas.values()]) for each in (found, unbounded))
    assert float(one @ other) == pytest.approx(norm * float(np.linalg.norm(other)), rel=1e-9)


def test_counts_and_metrics_are_not_released() -> None:
    own = layout(6)
    counted = Layout((*own.updates, count_entry("archipel/devices/update/clipped")))
    exact = np.array([0] * own.length + [3])
    found = release(exact, counted, 4, 0.01, "counts")
    assert set(found.deltas) == {"w", "b"}
    assert (found.values, found.moments, found.weight) == ({}, {}, None)


@pytest.mark.sampled(every=8)
def test_the_count_of_clipped_updates_is_released_with_noise_of_its_own() -> None:
    own = layout(6)
    counted = Layout(
        (*own.updates, count_entry("archipel/devices/update/capped"), count_entry("archipel/devices/update/clipped"))
    )
    settings = DifferentialPrivacy(mechanism="central", noise_multiplier=0.01, clip_noise=2.5)
    cohort, exact = 60, np.array([0] * own.length + [7, 30])
    found = []
    for number in range(2000):
        noise = draw_noise(settings, counted, randomness=byte_source(f"count {number}"))
        assert noise.shape == (own.length + 1,)
        made = release_sum(exact.astype(np.uint32), counted, cohort=cohort, modulus_bits=16, noise=noise)
        [(name, count)] = made.values.items()
        assert name == "archipel/devices/update/clipped"
        found.append(int(count))
    counts = np.array(found)
    # A whole deviation, so 3 in place of 2.5; three of 2000 are beyond 3.3 deviations, none beyond 6.
    assert counts.mean() == pytest.approx(30, abs=5 * 3 / math.sqrt(2000))
    assert counts.std() == pytest.approx(3, rel=5 / math.sqrt(4000))
    assert (counts != 30).mean() > 0.8
    # Never a count that there cannot be.
    few = exact.copy()
    few[-2:] = 1
    least = [
        int(
            release_sum(
                few.astype(np.uint32), counted, cohort=3, modulus_bits=16,
                noise=np.array([0] * own.length + [noise]),
            ).values["archipel/devices/update/clipped"]
        )
        for noise in (-9, 0, 9)
    ]  # fmt: skip
    assert least == [0, 1, 3]


def test_counts_are_paid_for_as_well() -> None:
    settings = DifferentialPrivacy(mechanism="central", noise_multiplier=2.0, clip_noise=4.0)
    for rounds in (1, 5):
        expected = [Gaussian(noise_multiplier=2.0)] * rounds + [Gaussian(noise_multiplier=4.0)] * rounds
        assert spent_epsilon(events_of(settings, 0, rounds), 1e-6) == pytest.approx(spent_epsilon(expected, 1e-6))
    wanted = DifferentialPrivacy(mechanism="central", epsilon=4.0, clip_noise=20.0)
    found = settle(wanted, 50)
    assert spent_epsilon(events_of(found, 0, 50), 1e-6) <= 4.0 < spent_epsilon(events_of(found, 0, 51), 1e-6)
    assert (found.noise_multiplier or 0) > (
        settle(msgspec.structs.replace(wanted, clip_noise=None), 50).noise_multiplier or 0
    )


def test_a_sum_that_no_devices_can_have_sent_is_refused_before_noise_hides_it() -> None:
    of = layout(6)
    with pytest.raises(BoundError, match="at least one of them sent something else"):
        release(np.full(of.length, 127), of, 1, 1.0, "bound")
    with pytest.raises(ProtocolError, match="is beyond"):
        release(np.full(of.length, 128), of, 1, 1.0, "mask")


@pytest.mark.parametrize(
    ("port", "message"),
    [
        (delta_port("w", (2,), weighting="examples"), "weighting = 'uniform'"),
        (delta_port("w", (2,), kind="value"), "beside their clipped changes"),
        (delta_port("w", (2,), clip=None), "beside their clipped changes"),
        (delta_port("w", (2,), noise=0.1), "add noise to their updates already"),
        (
            delta_port("w", (), kind="weight", weighting="examples", clip=None, lowest=0.1),
            "devices have weights of their own",
        ),
    ],
)
def test_what_else_devices_send_is_refused_by_name(port: Update, message: str) -> None:
    of = Layout((*layout().updates, port))
    with pytest.raises(PolicyError, match=message):
        release(np.zeros(of.length, np.int64), of, 4, 1.0, "x")


def test_two_clips_are_refused() -> None:
    of = Layout((delta_port("w", (2,)), delta_port("b", (2,), clip=0.5)))
    with pytest.raises(PolicyError, match="2 groups of changes with clips of their own"):
        release(np.zeros(4, np.int64), of, 4, 1.0, "x")


def test_settling_fills_in_the_noise() -> None:
    given = DifferentialPrivacy(mechanism="central", epsilon=4.0, delta=1e-5)
    found = settle(given, 50)
    assert found.noise_multiplier is not None
    assert found.noise_multiplier == round(found.noise_multiplier, 6)
    events = [Gaussian(noise_multiplier=found.noise_multiplier)] * 50
    assert spent_epsilon(events, 1e-5) <= 4.0 < spent_epsilon([*events, events[0]], 1e-5)
    fixed = DifferentialPrivacy(mechanism="central", noise_multiplier=2.0)
    assert settle(fixed, 50) == fixed
    assert settle(DifferentialPrivacy(), 50) == DifferentialPrivacy()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mechanism": "central"}, "needs one of them"),
        ({"noise_multiplier": 1.0}, "mechanism: "),
        ({"mechanism": "everywhere"}, "there are: none, central"),
        ({"mechanism": "central", "noise_multiplier": 0.0}, "noise_multiplier: 0.0"),
        ({"mechanism": "central", "noise_multiplier": math.nan}, "noise_multiplier: nan"),
        ({"mechanism": "central", "epsilon": -1.0}, "epsilon: -1.0"),
        ({"mechanism": "central", "epsilon": 1.0, "delta": 1.0}, "delta: 1.0"),
        ({"mechanism": "central", "epsilon": 1.0, "clip_noise": 0.5}, "clip_noise: 0.5 is not from 1"),
        ({"clip_noise": 2.0}, "the clip is not adapted"),
        ({"mechanism": "correlated", "epsilon": 1.0, "separation": 2, "clip_noise": 2.0}, "the clip is not adapted"),
    ],
)
def test_settings_that_say_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        DifferentialPrivacy(**settings)
