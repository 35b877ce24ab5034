"""Whole rounds over neighbours in memory: the sum is exact whoever leaves and wherever, or there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel.errors import ArchipelError, ThresholdError
from archipel.protocol.secagg_plus.drawing import draw_neighbours
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes, choose_sizes
from tests.support.neighbour_rounds import NeighbourRound, make_terms
from tests.support.rounds import stream

WEAK: dict[str, Any] = {"security": 1, "correctness": 1}
"""Few neighbours in small cohorts, so that graphs are not complete."""


def make(count: int, assumed: Assumptions, sizes: Sizes | None = None, **changes: int) -> NeighbourRound:
    return NeighbourRound(count, make_terms(sizes or choose_sizes(count, assumed), assumed, count, **changes))


def vectors(places: list[int], seed: int = 0) -> dict[int, Any]:
    rng = np.random.default_rng(seed)
    return {place: rng.integers(0, 1 << 24, 7, dtype=np.uint32) for place in places}


def plain_sum(given: dict[int, Any], bits: int = 24) -> Any:
    return (sum(v.astype(np.uint64) for v in given.values()) % (1 << bits)).astype(np.uint32)


@pytest.mark.parametrize("server", ["semi-honest", "malicious"])
@pytest.mark.sampled(every=4)
def test_the_sum_of_a_cohort_from_which_some_leave_at_every_step(server: str) -> None:
    assumed = Assumptions(0.1, 0.3, server, security=8, correctness=8)  # type: ignore[arg-type]
    run = make(24, assumed)
    assert run.terms.sizes.neighbours < 23
    run.open()
    dealing = [place for place in range(24) if place != 3]
    run.deal(dealing)
    receiving = [place for place in dealing if place != 5]
    run.receive(receiving)
    assert run.sharers == set(receiving)
    sums = vectors([place for place in receiving if place not in (7, 8)])
    run.mask(sums)
    run.answer([place for place in sums if place != 11])
    np.testing.assert_array_equal(run.unmask(), plain_sum(sums))
    # What the server has before the answers says nothing: it is not the sum.
    assert (run.total != plain_sum(sums)).mean() > 0.5


@pytest.mark.sampled(every=4)
def test_any_cohort_graph_and_leaving_gives_the_exact_sum_or_none() -> None:
    sums, ends = 0, 0

    @settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal sums, ends
        ends += 1
        count = data.draw(st.integers(6, 14), "cohort")
        server = data.draw(st.sampled_from(["semi-honest", "malicious"]), "server")
        neighbours = data.draw(st.integers(3, count - 1), "neighbours")
        least = 2 if server == "semi-honest" else max(neighbours // 2 + 1, neighbours * 2 // 3 + 1)
        threshold = min(least + data.draw(st.integers(0, 1), "more"), neighbours)
        partners = neighbours if server == "malicious" else data.draw(st.integers(1, neighbours), "partners")
        assumed = Assumptions(0, 0, server, **WEAK)
        try:
            run = make(count, assumed, Sizes(neighbours, threshold, partners))
            run.open()
            steps: list[list[int]] = [list(range(count))]
            for step in ("deal", "receive", "mask", "answer"):
                leaving = data.draw(st.sets(st.sampled_from(steps[-1]), max_size=1), step)
                steps.append([place for place in steps[-1] if place not in leaving])
            run.deal(steps[1])
            run.receive(steps[2])
            given = vectors([place for place in steps[3] if place in run.sharers], count)
            run.mask(given)
            run.answer([place for place in steps[4] if place in given])
            found = run.unmask()
        except (ArchipelError, StopIteration):
            # Sizes that the device refuses, too few that stay, or nobody left: then there is no sum.
            return
        sums += 1
        np.testing.assert_array_equal(found, plain_sum(given))

    check()
    assert sums > ends / 4


def test_too_few_answers_give_no_sum() -> None:
    run = make(12, Assumptions(0, 0.2, **WEAK))
    run.open()
    run.deal(range(12))
    run.receive(range(12))
    run.mask(vectors(list(range(12))))
    run.answer(range(12))
    kept = {place: answer for place, answer in run.answers.items() if place < run.terms.sizes.threshold - 1}
    with pytest.raises(ThresholdError, match="secrets cannot be recovered"):
        run.unmask(answers=kept)


def test_a_complete_graph_is_the_small_case() -> None:
    run = make(4, Assumptions(0, 0.2), Sizes(3, 3, 3))
    run.open()
    run.deal(range(4))
    assert {tuple(sorted(row)) for row in run.roster.drawn.tolist()} == {(0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)}
    run.receive(range(4))
    sums = vectors([0, 1, 2, 3])
    run.mask(sums)
    run.answer(range(4))
    np.testing.assert_array_equal(run.unmask(), plain_sum(sums))


def test_neighbours_are_drawn_uniformly() -> None:
    randomness = stream("drawing")
    counts = np.zeros((2, 7))
    for _ in range(3000):
        drawn = draw_neighbours(7, 2, 3, randomness)
        assert len(set(drawn) - {2}) == 3
        counts[0, drawn[0]] += 1
        counts[1, drawn] += 1
    # Chi-square with 5 degrees of freedom, 0.999 quantile 20.5; the second row is a sum of dependent draws, below it.
    others = [0, 1, 3, 4, 5, 6]
    for row, expected in zip(counts[:, others], (500, 1500)):
        assert ((row - expected) ** 2 / expected).sum() < 20.5
    assert counts[:, 2].sum() == 0


def test_messages_have_the_sizes_that_the_protocol_page_states() -> None:
    run = make(5, Assumptions(0, 0.2, **WEAK), Sizes(3, 3, 3))
    run.open()
    run.deal(range(5))
    run.receive(range(5))
    run.mask(vectors([0, 1, 2, 3, 4]))
    run.answer(range(5))
    inboxes = [run.roster.inbox(place) for place in range(5)]
    assert [len(inbox.dealt) for inbox in inboxes] == [132 * (run.roster.drawn == place).sum() for place in range(5)]
    assert all(len(inbox.cipher_keys) == 32 * len(inbox.dealers) for inbox in inboxes)
    assert all(len(run.answers[p].seeds) == 36 * len(run.questions[p].present) for p in range(5))
    assert len(run.roster.root) == len(run.roster.keys[0].seed_digest) == 32
