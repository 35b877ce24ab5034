"""Robust rules: values computed by hand, and properties that follow from their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.optimize import minimize

from archipel.errors import PolicyError
from archipel.protocol.operator.aggregation import MIXER_NAMES, RULE_NAMES
from archipel.strategies.robust import MIXERS, RULES, Aggregation
from archipel.strategies.robust.rule import ROOT, squared_distances

BY_COORDINATE = ("median", "trimmed-mean")
WITHIN_HULL = ("krum", "multi-krum", "geometric-median")
TRANSLATED = (*BY_COORDINATE, *WITHIN_HULL, "centered-clipping")
"""The aggregate of moved updates is the moved aggregate. Norms are about 0, so not of the two others."""


def state_of(name: str, columns: int) -> dict[str, np.ndarray]:
    return {ROOT: np.ones(columns)} if name == "fltrust" else {}


def aggregate(name: str, updates: np.ndarray, tolerated: int) -> np.ndarray:
    return RULES[name](updates, tolerated, state_of(name, updates.shape[1]))[0]


def drawn(seed: int, honest: int = 7, arbitrary: int = 2, columns: int = 5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.concatenate([rng.normal(size=(honest, columns)), rng.normal(3.0, 50.0, size=(arbitrary, columns))])
    return np.asarray(rng.permutation(rows))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Of the columns (0, 1, 2, 3, 100) and (0, 0, 4, 8, -100).
        ("median", [2.0, 0.0]),
        ("trimmed-mean", [2.0, 4.0 / 3.0]),
        # Squared distances of the four near rows: 1, 20, 73; 1, 17, 68; 20, 17, 17; 73, 68, 17. The four nearest with
        # itself add up to 94, 86, 54 and 158.
        ("krum", [2.0, 4.0]),
        ("multi-krum", [1.5, 3.0]),
    ],
)
def test_a_rule_worked_out_by_hand(name: str, expected: list[float]) -> None:
    updates = np.array([[0, 0], [1, 0], [2, 4], [3, 8], [100, -100]], np.float64)
    assert_allclose(aggregate(name, updates, 1), expected, rtol=1e-14)


def test_norm_bounding_worked_out_by_hand() -> None:
    # Norms 1, 5 and 10, so the bound is 5.
    updates = np.array([[1, 0], [3, 4], [0, -10]], np.float64)
    assert_allclose(aggregate("norm-bounding", updates, 1), [4 / 3, -1 / 3], rtol=1e-14)


def test_fltrust_worked_out_by_hand() -> None:
    root = np.array([2.0, 0.0])
    updates = np.array([[5, 0], [3, 4], [0, 9], [-100, 1]], np.float64)
    # Cosines 1, 0.6, 0 and below 0; each as long as the root: 2 (1 (1, 0) + 0.6 (0.6, 0.8)) / 1.6.
    found, state = RULES["fltrust"](updates, 3, {ROOT: root})
    assert_allclose(found, [2 * 1.36 / 1.6, 2 * 0.48 / 1.6], rtol=1e-14)
    assert state == {}
    assert_allclose(RULES["fltrust"](-np.abs(updates[:1]), 0, {ROOT: root})[0], [0, 0])
    with pytest.raises(PolicyError, match="fltrust: needs an update of the server's own examples"):
        RULES["fltrust"](updates, 1, {})


def test_centered_clipping_worked_out_by_hand() -> None:
    # Center 0, distances 1, 2, 6: radius 2, so 0 moves to (-1 + 2 + 2) / 3 = 1. There the distances are 2, 1, 5, the
    # radius 2 and the differences -2, 1, 2: it moves to 4 / 3. There they are 7/3, 2/3, 14/3, the radius 7/3.
    updates, state = np.array([[-1.0], [2.0], [6.0]]), {"center": np.array([0.0])}
    found, after = RULES["centered-clipping"](updates, 1, state)
    assert_allclose(found, [4 / 3 + (-7 / 3 + 2 / 3 + 7 / 3) / 3], rtol=1e-14)
    assert_allclose(after["center"], found)
    assert state["center"] == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_the_geometric_median_is_where_the_sum_of_distances_is_least(seed: int) -> None:
    updates = drawn(seed)

    def total(point: np.ndarray) -> float:
        return float(np.linalg.norm(updates - point, axis=1).sum())

    best = minimize(total, np.median(updates, axis=0), method="Nelder-Mead", options={"xatol": 1e-9, "maxiter": 20000})
    found = aggregate("geometric-median", updates, 2)
    assert total(found) <= best.fun * (1 + 1e-12)
    assert_allclose(found, best.x, atol=2e-3)


def test_the_geometric_median_may_be_an_update() -> None:
    # The middle of a cross; and of three points on a line the one in the middle, where the search begins.
    cross = np.array([[1, 0], [-1, 0], [0, 1], [0, -1], [0, 0]], np.float64)
    assert_allclose(aggregate("geometric-median", cross, 2), [0, 0], atol=1e-9)
    assert_allclose(aggregate("geometric-median", np.array([[0.0], [1.0], [50.0]]), 1), [1.0], atol=1e-9)
    # Two of three are equal, so they hold the median: the third one pulls with 1, they with 2.
    assert_allclose(aggregate("geometric-median", np.array([[4, 4], [4, 4], [9, 0]], np.float64), 1), [4, 4], atol=1e-9)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_the_order_of_the_updates_does_not_matter(name: str, seed: int) -> None:
    updates = drawn(seed)
    order = np.random.default_rng(seed).permutation(len(updates))
    assert_allclose(aggregate(name, updates[order], 2), aggregate(name, updates, 2), rtol=1e-7, atol=1e-9)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", TRANSLATED)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_moved_updates_move_the_aggregate(name: str, seed: int) -> None:
    updates = drawn(seed)
    away = np.random.default_rng(seed + 1).normal(size=updates.shape[1]) * 10
    assert_allclose(aggregate(name, updates + away, 2), aggregate(name, updates, 2) + away, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_scaled_updates_scale_the_aggregate(name: str) -> None:
    updates = drawn(3)
    scale = 1.0 if name == "fltrust" else 1e-6
    assert_allclose(aggregate(name, updates * 1e-6, 2), aggregate(name, updates, 2) * scale, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("name", [*BY_COORDINATE, "krum", "geometric-median"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_the_aggregate_stays_among_the_honest_updates(name: str, seed: int) -> None:
    """With f arbitrary updates however far away; Krum picks an honest one, which is between them too."""
    updates = np.random.default_rng(seed).normal(size=(9, 4))
    updates[7:] = 1e6
    found, honest = aggregate(name, updates, 2), updates[:7]
    if name == "geometric-median":
        # Within 2 (n - f) / (n - 2f) of the largest distance (Minsker 2015, lemma 2.1); it has no hull of its own.
        assert np.linalg.norm(found - honest[0]) <= 2 * 7 / 5 * np.linalg.norm(honest - honest[0], axis=1).max()
        return
    assert (found >= honest.min(axis=0) - 1e-9).all()
    assert (found <= honest.max(axis=0) + 1e-9).all()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("mixing", ["", *MIXERS])
def test_f_arbitrary_updates_do_not_break_a_rule_and_the_mean_they_do(name: str, mixing: str) -> None:
    rng = np.random.default_rng(4)
    updates = 1.0 + 0.1 * rng.normal(size=(11, 6))
    updates[[0, 4, 8]] = -1e9
    assert np.linalg.norm(updates.mean(axis=0) - 1.0) > 1e8
    mixed = MIXERS[mixing](updates, 3, rng.permutation(11)) if mixing else updates
    found = aggregate(name, mixed, 3)
    # Bounded norms and clipped differences leave a part; it does not grow with what the three send.
    if name in ("norm-bounding", "centered-clipping"):
        assert np.linalg.norm(found - 1.0) < 3.0 * np.sqrt(6)
    else:
        assert np.linalg.norm(found - 1.0) < 1.0


def test_equal_updates_are_their_aggregate() -> None:
    updates = np.full((5, 3), 0.7)
    for name in RULES:
        assert_allclose(aggregate(name, updates, 2), np.full(3, 1.0 if name == "fltrust" else 0.7), rtol=1e-12)
        assert_allclose(aggregate(name, 0 * updates, 2), np.zeros(3), atol=1e-300)


def test_mixers_worked_out_by_hand() -> None:
    updates = np.array([[0.0], [1.0], [3.0], [50.0]])
    order = np.array([2, 0, 3, 1])
    assert_allclose(MIXERS["nnm"](updates, 1, order), [[4 / 3], [4 / 3], [4 / 3], [18.0]], rtol=1e-14)
    # Three buckets are the fewest with f = 1: floor(3 / 2) = 1 in each. Of five updates two.
    assert_allclose(MIXERS["bucketing"](updates, 1, order), updates[order])
    five = np.array([[0.0], [1.0], [3.0], [50.0], [7.0]])
    assert_allclose(MIXERS["bucketing"](five, 1, np.array([2, 0, 3, 1, 4])), [[1.5], [25.5], [7.0]])


def test_more_than_twice_as_many_buckets_are_left_as_are_arbitrary() -> None:
    for count in range(1, 40):
        for tolerated in range((count - 1) // 2 + 1):
            mixed = MIXERS["bucketing"](np.ones((count, 1)), tolerated, np.arange(count))
            assert len(mixed) > 2 * tolerated


def test_distances_keep_their_digits_beside_a_far_update() -> None:
    updates = np.array([[0.0, 0.0], [3e-5, 4e-5], [0.0, 1e-5], [1e8, 1e8]]) + 1e3
    found = np.sqrt(squared_distances(updates))
    assert_allclose(found[0, 1], 5e-5, rtol=1e-6)
    assert_allclose(found[0, 3], np.sqrt(2) * 1e8, rtol=1e-9)
    assert (found == found.T).all()


@pytest.mark.parametrize("name", [*RULES, *MIXERS])
def test_too_few_updates_are_refused(name: str) -> None:
    if name == "fltrust":
        return
    last = {} if name in RULES else np.arange(4)
    with pytest.raises(PolicyError, match=f"{name}: 4 updates are too few to tolerate 2; it needs 5 or more"):
        (RULES | MIXERS)[name](np.zeros((4, 2)), 2, last)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"rule": "medoid"}, "rule: there is no 'medoid'; there are: mean, centered-clipping"),
        ({"rule": "median", "mixing": "x"}, "mixing: there is no 'x'; there are: bucketing, nnm"),
        ({"rule": "median", "tolerated": -1}, "tolerated: -1 is not 0 or more"),
        ({"tolerated": 1}, "the mean tolerates no arbitrary update"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Aggregation(**settings_)  # type: ignore[arg-type]


def test_a_task_may_name_every_rule_and_mixer_and_no_other() -> None:
    assert tuple(sorted(RULES)) == RULE_NAMES
    assert tuple(sorted(MIXERS)) == MIXER_NAMES
