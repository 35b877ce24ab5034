"""Factorizations of correlated noise, against dense matrices, all ways in which a device may come, and the tree."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

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


def schedules(rounds: int, separation: int, participations: int) -> list[tuple[int, ...]]:
    """All sets of rounds that a device may come to."""
    return [
        chosen
        for size in range(1, participations + 1)
        for chosen in combinations(range(rounds), size)
        if all(later - earlier >= separation for earlier, later in pairwise(chosen))
    ]


@pytest.mark.parametrize("coefficients", [[1.0], [1.0, 0.5], [2.0, 1.5, 1.0, 0.25], [1.0, 0.9, 0.9, 0.9, 0.2, 0.1]])
@pytest.mark.parametrize(("separation", "participations"), [(2, 5), (3, 2), (4, 3), (9, 1)])
def test_no_schedule_changes_more_than_the_sensitivity(
    coefficients: list[float], separation: int, participations: int
) -> None:
    """Also with changes in directions of their own, of which those with opposite signs could add up in C x."""
    rounds, generator = 9, np.random.default_rng(3)
    matrix = dense(coefficients, rounds)
    worst = 0.0
    for chosen in schedules(rounds, separation, participations):
        worst = max(worst, float(np.linalg.norm(matrix[:, chosen].sum(axis=1))))
        vectors = generator.normal(size=(len(chosen), 3))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        assert np.linalg.norm(matrix[:, chosen] @ vectors) <= sensitivity(
            coefficients, rounds, separation, participations
        ) * (1 + 1e-12)
    assert sensitivity(coefficients, rounds, separation, participations) == pytest.approx(worst, rel=1e-12)
    rows = row_sensitivities(coefficients, rounds, separation, participations)
    # The first rounds alone cost what a shorter task costs, so a task may end at any of them.
    for fewer in range(1, rounds):
        assert np.linalg.norm(rows[:fewer]) == pytest.approx(
            sensitivity(coefficients, fewer, separation, participations), rel=1e-12
        )


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


def tree(rounds: int) -> np.ndarray:
    """The nodes of the binary tree that are complete by the last round, `[nodes, rounds]` (Dwork et al. 2010)."""
    nodes, width = [], 1
    while width <= rounds:
        nodes += [np.arange(rounds) // width == place for place in range(rounds // width)]
        width *= 2
    return np.array(nodes, float)


def tree_error(rounds: int, separation: int) -> float:
    """The least error of any tree: all nodes of the prefix are used with the best weights (Honaker 2015).

    A lower bound of its sensitivity is enough: of devices that come at even distances.
    """
    nodes = tree(rounds)
    worst = max(np.linalg.norm(nodes[:, first::separation].sum(axis=1)) for first in range(separation))
    squares = 0.0
    for end in range(1, rounds + 1):
        # Nodes that a server knows after `end` rounds: those of these rounds alone.
        known = nodes[(nodes[:, end:] == 0).all(axis=1), :end]
        weights = np.linalg.lstsq(known.T, np.ones(end), rcond=None)[0]
        np.testing.assert_allclose(known.T @ weights, 1, atol=1e-9)
        squares += float(weights @ weights)
    return float(worst) * math.sqrt(squares / rounds)


@pytest.mark.parametrize("separation", [200, 100, 50, 20, 10])
def test_at_200_rounds_the_error_is_at_most_four_fifths_of_the_trees(separation: int) -> None:
    found = best_coefficients(ROUNDS, separation, min(separation, 32))
    exact = [each / 64 for each in whole_coefficients(found, 64)]
    ours, theirs = prefix_error(exact, ROUNDS, separation), tree_error(ROUNDS, separation)
    assert ours < 0.8 * theirs
    # Whole numbers cost next to nothing.
    assert ours < 1.002 * prefix_error(found, ROUNDS, separation)


def test_whole_coefficients_never_grow() -> None:
    assert whole_coefficients([1.0, 0.52, 0.5, 0.26, 0.003], 64) == (64, 33, 32, 17)
    assert whole_coefficients([2.0, 2.0], 10) == (10, 10)


@pytest.mark.parametrize("coefficients", [[], [0.0], [1.0, -0.1], [0.5, 0.6], [1.0, math.nan]])
def test_coefficients_of_which_the_formula_does_not_hold(coefficients: list[float]) -> None:
    with pytest.raises(PolicyError, match="coefficients: expected"):
        sensitivity(coefficients, 5, 2)


@pytest.mark.parametrize(("rounds", "separation", "participations"), [(0, 2, 1), (3, 0, 1), (3, 2, 0)])
def test_numbers_out_of_bounds(rounds: int, separation: int, participations: int) -> None:
    with pytest.raises(PolicyError, match="are below 1"):
        sensitivity([1.0], rounds, separation, participations)
