"""Minimum cuts of small random graphs against all cuts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from archipel.converter.frozen.min_cut import source_side


def cost(edges: list[tuple[int, int, int]], side: set[int]) -> int:
    return sum(capacity for a, b, capacity in edges if a in side and b not in side)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_cheaper_and_none_as_cheap_is_smaller(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = 7
    edges = [(int(a), int(b), int(c)) for a, b, c in zip(*rng.integers(0, nodes, (2, 16)), rng.integers(0, 9, 16))]
    found = source_side(edges, 0, nodes - 1)
    inner = range(1, nodes - 1)
    cuts = [{0, *chosen} for size in range(nodes) for chosen in itertools.combinations(inner, size)]
    best = min(cost(edges, side) for side in cuts)
    assert cost(edges, found) == best
    assert found == set.intersection(*(side for side in cuts if cost(edges, side) == best))


def test_parallel_edges_add_up() -> None:
    edges = [("s", "a", 2), ("s", "a", 2), ("a", "t", 3)]
    assert source_side(edges, "s", "t") == {"s", "a"}
    assert source_side([*edges, ("a", "t", 1)], "s", "t") == {"s"}
