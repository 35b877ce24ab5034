"""Whatever a server answers in a round over neighbours, the agent says nothing twice differently, and then it works."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from archipel.errors import CertificateError, ClientError
from tests.client.fuzz.test_fuzz import CASES, LONGEST, MANY, any_change
from tests.client.rounds.neighbours.server import READ, SENT, digests
from tests.client.rounds.neighbours.world import NeighbourWorld, opened

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NeighbourWorld]:
    with opened(tmp_path_factory.mktemp("fuzz"), "malicious") as made:
        yield made


@pytest.mark.parametrize("cases", [CASES, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", sorted({*READ, *SENT} - {"update"}))
@pytest.mark.sampled(every=6)
def test_an_answer_that_is_not_right(fuzzed: NeighbourWorld, step: str, cases: int) -> None:
    rng, server, agent = random.Random(f"{step} {cases}"), fuzzed.server, fuzzed.agent
    for _ in range(cases):
        server.forget()
        server.begin()
        server.changes[step] = [any_change(step, rng, server)]
        began = time.monotonic()
        for _ in range(3):
            try:
                agent.run_once()
            except (ClientError, CertificateError):
                continue
            if not server.changes[step]:
                break
        assert not server.changes[step], "the answer was not asked for"
        # Whatever came back, and however often it asked again.
        assert all(len(said) <= 1 for said in digests(server).values())
        server.phase = server.phase if server.phase == "committed" else "failed"
        agent.run_once()
        assert time.monotonic() - began < LONGEST
        assert all(entry.step == "closed" for entry in agent.rounds)
    server.forget()
    round_id = server.begin()
    while agent.run_once().round_id != round_id:
        pass
    [entry] = [entry for entry in agent.rounds if entry.round_id == round_id]
    assert (entry.step, entry.result) == ("closed", "took_part"), entry
