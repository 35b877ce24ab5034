"""How many neighbours: against the tails in exact fractions, and against numbers published by others."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from archipel.errors import PolicyError
from archipel.protocol.secagg_plus.sizes import (
    Assumptions,
    Sizes,
    _disconnected,
    check_sizes,
    choose_sizes,
    choose_sizes_between,
)


def more_than(limit: int, population: int, marked: int, drawn: int) -> Fraction:
    """P(more than `limit` marked among the drawn), exactly."""
    ways = sum(comb(marked, x) * comb(population - marked, drawn - x) for x in range(limit + 1, drawn + 1))
    return Fraction(ways, comb(population, drawn))


def holds(cohort: int, sizes: Sizes, assumed: Assumptions) -> bool:
    """Whether the sizes withstand what is assumed, but for the partners, by the definition."""
    corrupt, left = int(assumed.corrupt * cohort + 1e-9), int(assumed.dropped * cohort + 1e-9)
    k, t = sizes.neighbours, sizes.threshold
    # The fewest corrupt ones that any of the devices may have, at half of the probability that is allowed.
    allowed = Fraction(1, cohort * 2 ** (assumed.security + 1))
    most = next(c for c in range(k + 1) if more_than(c, cohort - 1, corrupt, k) <= allowed)
    honest_server = assumed.server == "semi-honest"
    secret = t > most if honest_server else 2 * t >= k + most + assumed.hidden and 3 * t > 2 * k
    # Fewer than t stay: more than k - t of those that left.
    gone = more_than(k - t, cohort - 1, left, k)
    return secret and gone <= Fraction(1, cohort * 2**assumed.correctness)


@pytest.mark.parametrize("cohort", [30, 100])
@pytest.mark.parametrize("server", ["semi-honest", "malicious"])
@pytest.mark.parametrize("shares", [(0.2, 0.2), (0.1, 0.1), (0.05, 0.25)])
def test_they_are_the_least_that_exact_fractions_allow(cohort: int, server: str, shares: tuple[float, float]) -> None:
    assumed = Assumptions(*shares, server=server)  # type: ignore[arg-type]
    sizes = choose_sizes(cohort, assumed)
    assert holds(cohort, sizes, assumed)
    assert not holds(cohort, Sizes(sizes.neighbours, sizes.threshold - 1, 1), assumed)
    fewer = sizes.neighbours - 1
    possible = [t for t in range(2, fewer + 1) if holds(cohort, Sizes(fewer, t, 1), assumed)]
    # Where fewer neighbours could keep and recover the secrets, the masks among so few fall apart.
    assert not possible or sizes.partners == sizes.neighbours


@pytest.mark.parametrize(
    ("cohort", "corrupt", "dropped", "server", "degree", "threshold"),
    [
        (100, 0.45, 0.45, "semi-honest", 92, 46),
        (1000, 0.45, 0.45, "semi-honest", 822, 417),
        (1000, 0.33, 0.33, "semi-honest", 286, 150),
        (10_000, 0.33, 0.33, "semi-honest", 422, 221),
        (1000, 0.05, 0.33, "semi-honest", 72, 24),
        (1000, 0.33, 0.05, "semi-honest", 78, 60),
        (1000, 0.3, 0.3, "malicious", 872, 584),
        (1000, 0.33, 0.05, "malicious", 132, 109),
        (10_000, 0.33, 0.05, "malicious", 178, 146),
    ],
)
@pytest.mark.sampled(every=6)
def test_they_agree_with_those_of_federated_compute(
    cohort: int, corrupt: float, dropped: float, server: str, degree: int, threshold: int
) -> None:
    # The table in fcp/secagg/server/graph_parameter_finder_test.cc of google-parfait/federated-compute: 40 bits of
    # security, 20 of correctness, an even number of neighbours, and no demand on who hides whom beyond the threshold.
    assumed = Assumptions(corrupt, dropped, server, correctness=20)  # type: ignore[arg-type]
    sizes = choose_sizes(cohort, assumed)
    assert sizes.neighbours == pytest.approx(degree, abs=max(2, degree * (0.02 if server == "semi-honest" else 0.05)))
    assert sizes.threshold == pytest.approx(
        threshold, abs=max(1, threshold * (0.02 if server == "semi-honest" else 0.05))
    )


def test_the_published_sizes_of_a_fifth() -> None:
    # docs/protocol.md and docs/performance.md state them.
    half_honest, anything = Assumptions(server="semi-honest"), Assumptions(server="malicious")
    assert choose_sizes(1000, half_honest) == Sizes(112, 59, 23)
    assert choose_sizes(10_000, half_honest) == Sizes(136, 71, 25)
    assert choose_sizes(1000, anything) == Sizes(344, 232, 344)
    assert choose_sizes(10_000, anything) == Sizes(570, 384, 570)


def connected(count: int, edges: set[frozenset[int]]) -> bool:
    reached, todo = {0}, [0]
    while todo:
        one = todo.pop()
        for other in range(count):
            if other not in reached and frozenset((one, other)) in edges:
                reached.add(other)
                todo.append(other)
    return len(reached) == count


def test_the_bound_on_masks_that_fall_apart_is_above_the_truth() -> None:
    # Five devices, all honest, each with one partner: all 4^5 graphs by hand. The bound counts a graph for every way in
    # which it falls apart.
    graphs: list[set[frozenset[int]]] = [set()]
    for device in range(5):
        graphs = [graph | {frozenset((device, other))} for graph in graphs for other in range(5) if other != device]
    apart = sum(not connected(5, graph) for graph in graphs) / len(graphs)
    splits = sum(
        all(frozenset((one, other)) not in graph for one in part for other in set(range(5)) - set(part))
        for graph in graphs
        for size in (1, 2)
        for part in combinations(range(5), size)
    ) / len(graphs)  # fmt: skip
    assert 0 < apart <= splits
    assert _disconnected(5, 5, 1) == pytest.approx(splits)


def test_what_cannot_be_met_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"cohort of 10 with 3 corrupt and 3 leaving .* at least 7 .* at most 6"):
        choose_sizes(10, Assumptions(0.3, 0.3))
    with pytest.raises(PolicyError, match="from 3 to"):
        choose_sizes(2, Assumptions())
    for wrong in ({"corrupt": 1.0}, {"dropped": -0.1}, {"hidden": 1}, {"security": 0}, {"server": "kind"}):
        with pytest.raises(PolicyError, match=next(iter(wrong))):
            Assumptions(**wrong)  # type: ignore[arg-type]


def test_a_device_refuses_sizes_that_do_not_withstand_what_it_assumes() -> None:
    assumed = Assumptions(0.1, 0.2)
    sizes = choose_sizes(100, assumed)
    check_sizes(sizes, 100, assumed)
    with pytest.raises(PolicyError, match="threshold"):
        check_sizes(Sizes(sizes.neighbours, sizes.threshold - 1, sizes.partners), 100, assumed)
    with pytest.raises(PolicyError, match="partners"):
        check_sizes(Sizes(sizes.neighbours, sizes.threshold, sizes.partners - 1), 100, assumed)
    with pytest.raises(PolicyError, match="threshold"):
        check_sizes(sizes, 100, Assumptions(0.3, 0.2))
    # A shrunken neighbourhood: 2 of 3 are above two thirds, and yet two corrupt ones among three are no rarity.
    with pytest.raises(PolicyError, match="below"):
        check_sizes(Sizes(3, 3, 3), 100, assumed)
    with pytest.raises(PolicyError, match="exceed"):
        check_sizes(Sizes(3, 4, 3), 100, assumed)
    # A cohort of fewer than they are for has the complete graph.
    check_sizes(choose_sizes(10, assumed), 8, assumed)


@pytest.mark.parametrize("server", ["semi-honest", "malicious"])
@pytest.mark.parametrize(("corrupt", "dropped"), [(1 / 3, 0.2), (0.13, 0.07)])
def test_sizes_for_a_cohort_that_may_come_smaller(server: str, corrupt: float, dropped: float) -> None:
    assumed = Assumptions(corrupt, dropped, server, hidden=4)  # type: ignore[arg-type]
    most = 90
    alone, sizes = choose_sizes(most, assumed), choose_sizes_between(5, most, assumed)
    assert alone.neighbours <= sizes.neighbours <= alone.neighbours + 2
    assert sizes.threshold >= alone.threshold
    for cohort in range(sizes.threshold + 1, most + 1):
        check_sizes(sizes, cohort, assumed)
