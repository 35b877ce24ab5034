"""Factorizations of correlated noise, against dense matrices, all ways in which a device may come, and the tree."""

from __future__ import annotations

import math
import time
from itertools import combinations, pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from archipel.errors import PolicyError
from archipel.privacy.factorization import (
    best_coefficients,
    first_inverse_column,
    prefix_error,
    row_sensitivities,
    sensitivity,
    whole_coefficients,
)

ROUNDS = 200


def dense(coefficients: list[float], rounds: int) -> np.ndarray:
    matrix = np.zeros((rounds, rounds))
    for lag, value in enumerate(coefficients[:rounds]):
        matrix += value * np.eye(rounds, k=-lag)
    return matrix


def schedules(rounds: int, separation: int) -> list[tuple[int, ...]]:
    """All sets of rounds that a device may come to."""
    return [
        chosen
        for size in range(1, rounds + 1)
        for chosen in combinations(range(rounds), size)
        if all(later - earlier >= separation for earlier, later in pairwise(chosen))
    ]


@pytest.mark.parametrize("coefficients", [[1.0], [1.0, 0.5], [2.0, 1.5, 1.0, 0.25], [1.0, 0.9, 0.9, 0.9, 0.2, 0.1]])
@pytest.mark.parametrize("separation", [1, 2, 3, 4, 9])
def test_no_schedule_changes_more_than_the_sensitivity(coefficients: list[float], separation: int) -> None:
    """Also with changes in directions of their own, of which those with opposite signs could add up in C x."""
    rounds, generator = 9, np.random.default_rng(3)
    matrix, most = dense(coefficients, rounds), sensitivity(coefficients, rounds, separation)
    worst = 0.0
    for chosen in schedules(rounds, separation):
        worst = max(worst, float(np.linalg.norm(matrix[:, chosen].sum(axis=1))))
        vectors = generator.normal(size=(len(chosen), 3))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        assert np.linalg.norm(matrix[:, chosen] @ vectors) <= most * (1 + 1e-12)
    assert most == pytest.approx(worst, rel=1e-12)
    rows = row_sensitivities(coefficients, rounds, separation)
    # The first rounds alone cost what a shorter task costs, so a task may end at any of them.
    for fewer in range(1, rounds):
        assert np.linalg.norm(rows[:fewer]) == pytest.approx(sensitivity(coefficients, fewer, separation), rel=1e-12)


def test_the_error_is_that_of_the_matrices() -> None:
    coefficients, rounds = [1.0, 0.6, 0.3, 0.1], 30
    inverse = np.linalg.inv(dense(coefficients, rounds))
    np.testing.assert_allclose(first_inverse_column(coefficients, rounds), inverse[:, 0], rtol=1e-12, atol=1e-12)
    decoder = np.tril(np.ones((rounds, rounds))) @ inverse
    expected = np.linalg.norm(decoder) / math.sqrt(rounds) * sensitivity(coefficients, rounds, 4)
    assert prefix_error(coefficients, rounds, 4) == pytest.approx(expected, rel=1e-12)
    # Independent noise in every round: a variance of t after t rounds.
    assert prefix_error([1.0], rounds, rounds) == pytest.approx(math.sqrt((rounds + 1) / 2), rel=1e-12)


@pytest.mark.parametrize(("rounds", "separation", "bands"), [(40, 40, 8), (40, 10, 10), (25, 6, 4)])
def test_no_other_coefficients_have_less_error(rounds: int, separation: int, bands: int) -> None:
    found = best_coefficients(rounds, separation, bands)
    least, generator = prefix_error(found, rounds, separation), np.random.default_rng(1)
    assert len(found) == bands
    assert least < prefix_error([1.0], rounds, separation)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(30):
            other = found * np.concatenate([[1.0], 1 + size * generator.normal(size=bands - 1)])
            if (np.diff(other) <= 0).all():
                assert prefix_error(other, rounds, separation) >= least * (1 - 1e-9)


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The peer, as the benchmark has it."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    import correlated_noise

    return correlated_noise


def test_the_trees_weights_add_up_to_all_rounds_so_far(trees: ModuleType) -> None:
    """Three rounds of the tree by hand: the node of two with the two below it has 2/3 and 1/3, the third round 1."""
    known = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], float)
    np.testing.assert_allclose(trees.best_weights(known), [1 / 3, 1 / 3, 1, 2 / 3], atol=1e-12)
    assert sorted(map(tuple, trees.tree(3).astype(int))) == sorted([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
    # After one, two and three rounds: 1, 2 (4 + 1 + 1) / 9 of one and that with one more; a device changes two nodes.
    assert trees.tree_error(trees.tree(3), 3, trees.best_weights) == pytest.approx(
        math.sqrt(2) * math.sqrt((1 + 6 / 9 + 1 + 6 / 9) / 3)
    )


@pytest.mark.parametrize("separation", [200, 100, 50, 20, 10])
@pytest.mark.sampled(every=6)
def test_at_200_rounds_the_error_is_at_most_four_fifths_of_the_trees(separation: int, trees: ModuleType) -> None:
    found = best_coefficients(ROUNDS, separation, min(separation, 32))
    exact = [each / 64 for each in whole_coefficients(found, 64)]
    ours = prefix_error(exact, ROUNDS, separation)
    # Of the tree with the best weights of its nodes.
    assert ours < 0.8 * trees.tree_error(trees.tree(ROUNDS), separation, trees.best_weights)
    # Whole numbers cost next to nothing.
    assert ours < 1.002 * prefix_error(found, ROUNDS, separation)


def test_whole_coefficients_never_grow() -> None:
    assert whole_coefficients([1.0, 0.52, 0.5, 0.26, 0.003], 64) == (64, 33, 32, 17)
    assert whole_coefficients([2.0, 2.0], 10) == (10, 10)


@pytest.mark.parametrize("coefficients", [[], [0.0], [1.0, -0.1], [0.5, 0.6], [1.0, math.nan]])
def test_coefficients_of_which_the_formula_does_not_hold(coefficients: list[float]) -> None:
    with pytest.raises(PolicyError, match="coefficients: expected"):
        sensitivity(coefficients, 5, 2)


@pytest.mark.parametrize(("rounds", "separation"), [(0, 2), (3, 0)])
def test_numbers_out_of_bounds(rounds: int, separation: int) -> None:
    with pytest.raises(PolicyError, match="are below 1"):
        sensitivity([1.0], rounds, separation)


@pytest.mark.sampled(every=4)
def test_coefficients_of_very_many_rounds_take_seconds() -> None:
    """Whoever may create tasks chooses the number, and a web process computes them."""
    began = time.process_time()
    found = best_coefficients(200_000, 1000, 32)
    assert time.process_time() - began < 30
    assert (np.diff(found) <= 0).all()
    # Less than the error of those for fewer rounds.
    fewer = best_coefficients(2000, 1000, 32)
    assert prefix_error(found, 200_000, 1000) < 0.96 * prefix_error(fewer, 200_000, 1000)
