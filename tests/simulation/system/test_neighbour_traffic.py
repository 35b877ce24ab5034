"""The bytes of secure rounds over neighbours are those of real messages, on average over the devices."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean

import numpy as np
import pytest

from archipel.protocol.secagg_plus.agreement import KeyAgreement
from archipel.protocol.secagg_plus.alone import Alone
from archipel.protocol.secagg_plus.hybrid import Hybrid
from archipel.protocol.secagg_plus.messages import Drawn, Packed, pack
from archipel.protocol.secagg_plus.sizes import Assumptions, Server, Sizes
from archipel.protocol.secagg_plus.tree import MemberTree
from archipel.simulation.system.neighbour_traffic import NeighbourTraffic, proof_hashes
from tests.support.neighbour_rounds import NeighbourRound, make_terms


def size(*messages: Packed) -> int:
    return sum(len(pack(message)) for message in messages)


def mean_size(messages: Iterable[Packed]) -> float:
    return mean(size(message) for message in messages)


@pytest.mark.parametrize(
    ("count", "sizes", "server", "gone", "agreement"),
    [
        (5, Sizes(4, 3, 4), "malicious", 0, Alone),
        (30, Sizes(12, 7, 5), "semi-honest", 4, Alone),
        (24, Sizes(10, 8, 10), "malicious", 2, Alone),
        (16, Sizes(8, 5, 3), "semi-honest", 2, Hybrid),
    ],
)
@pytest.mark.sampled(every=6)
def test_every_phase_has_the_size_of_real_messages(
    count: int, sizes: Sizes, server: Server, gone: int, agreement: type[KeyAgreement]
) -> None:
    assumed = Assumptions(0, 0.2, server, security=1, correctness=1)
    run = NeighbourRound(count, make_terms(sizes, assumed, count, agreement))
    everybody, stay = range(count), range(gone, count)
    expected = NeighbourTraffic(sizes, server, agreement)
    run.open()
    # The certificates of these devices name population "plants".
    member = len(run.roster.members[0])
    assert expected.advertising().up == member + len("devices") - len("plants")
    run.deal(everybody)
    drawn = [Drawn(places=row.tolist()) for row in run.roster.drawn]
    down = mean(size(run.roster.invite(p), run.roster.introduce(p, drawn[p])) for p in everybody)
    assert expected.sharing(count, "plants").down == pytest.approx(down, rel=0.01)
    up = mean(size(drawn[p]) for p in everybody) * 2 + 132 * sizes.neighbours
    if agreement is Hybrid:
        up += 1088 * sizes.neighbours + 1152 * sizes.partners
    assert expected.sharing(count, "plants").up == pytest.approx(up, rel=0.01)
    inboxes = [run.roster.inbox(p) for p in everybody]
    run.receive(everybody)
    assert expected.complaining(count).down == pytest.approx(mean_size(inboxes), rel=0.01)
    run.mask({p: np.full(3, 1, np.uint32) for p in stay})
    partners = mean_size(run.roster.pair(p, run.sharers) for p in everybody)
    assert expected.masking(count).down == pytest.approx(partners, rel=0.02)
    run.answer(stay)
    confirming, unmasking = expected.confirming(count, len(stay)), expected.unmasking(count, len(stay))
    assert confirming.down == pytest.approx(mean_size(run.questions.values()), rel=0.1)
    signed = mean(len(question.present) for question in run.questions.values()) * 64 * (server == "malicious")
    assert confirming.up == pytest.approx(signed, rel=0.05, abs=4)
    assert unmasking.down == pytest.approx(signed, rel=0.05, abs=40)
    assert unmasking.up == pytest.approx(mean_size(run.answers.values()), rel=0.05)


@pytest.mark.parametrize(("members", "asked"), [(64, 9), (100, 20), (1000, 112), (7, 7)])
def test_proofs_have_as_many_hashes_as_real_ones_on_average(members: int, asked: int) -> None:
    tree, draws = MemberTree([bytes(32)] * members), np.random.default_rng(members)
    found = [len(tree.prove(draws.permutation(members)[:asked].tolist())) // 32 for _ in range(100)]
    assert proof_hashes(members, asked) == pytest.approx(mean(found), rel=0.03, abs=1)
