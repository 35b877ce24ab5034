"""The ILP, the dynamic programme and trying everything find choices of one cost."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from archipel.training.cloud.planner.choices import Problem, choose, choose_along_chain, choose_by_ilp
from archipel.training.cloud.planner.division import divide


def problem(seed: int, nodes: int, chain: bool, limit: float = math.inf) -> Problem:
    """Random costs of microseconds to milliseconds; a tenth of all pairs is forbidden."""
    drawn = np.random.default_rng(seed)
    counts = drawn.integers(1, 4, nodes)
    pairs = [(i, i + 1) for i in range(nodes - 1)]
    if not chain:
        pairs = [pair for pair in itertools.combinations(range(nodes), 2) if drawn.random() < 0.5]
    edges = []
    for a, b in pairs:
        matrix = 10.0 ** drawn.uniform(-6, -3, (counts[a], counts[b]))
        matrix[drawn.random(matrix.shape) < 0.1] = math.inf
        edges.append((a, b, matrix))
    costs = [list(10.0 ** drawn.uniform(-6, -3, count)) for count in counts]
    return Problem(costs, edges, [list(drawn.integers(1, 9, count) * 1e6) for count in counts], limit)


def cheapest(asked: Problem) -> float:
    return min(asked.total(chosen) for chosen in itertools.product(*(range(len(cost)) for cost in asked.costs)))


@pytest.mark.parametrize("seed", range(8))
def test_three_searches_agree_on_a_chain(seed: int) -> None:
    asked = problem(seed, 7, chain=True)
    expected = cheapest(asked)
    for search in (choose, lambda asked: choose_by_ilp(asked, gap=1e-7), choose_along_chain):
        chosen = search(asked)
        assert (math.inf if chosen is None else asked.total(chosen)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_the_ilp_is_the_cheapest_of_all_choices_on_graphs(seed: int) -> None:
    for limit in (math.inf, 2.5e7):
        asked = problem(seed, 7, chain=False, limit=limit)
        chosen = choose_by_ilp(asked, gap=1e-7)
        found = math.inf if chosen is None else asked.total(chosen)
        assert found == pytest.approx(cheapest(asked), rel=1e-5)
        quick = choose(asked)
        assert (math.inf if quick is None else asked.total(quick)) <= found * 1.002


def test_no_choice_within_the_limit() -> None:
    assert choose(problem(0, 5, chain=False, limit=1.0)) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_has_a_lighter_heaviest_part(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    weights = [float(w) for w in drawn.integers(0, 9, 9)]
    weights[0] += 1
    parts = min(int(drawn.integers(1, 5)), sum(w > 0 for w in weights))

    def heaviest(starts: tuple[int, ...]) -> float:
        edges = [0, *starts, len(weights)]
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(edges))

    heavy = [i for i, weight in enumerate(weights) if weight and i]
    expected = min(heaviest(starts) for starts in itertools.combinations(heavy, parts - 1))
    starts = divide(weights, parts)
    assert len(starts) == parts - 1
    assert heaviest(tuple(starts)) == expected


def test_too_few_items_for_the_parts() -> None:
    with pytest.raises(ValueError, match="2 items"):
        divide([1, 0, 2], 3)
