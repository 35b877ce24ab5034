"""What the settled sets of rounds take in memory: the key trees of kept cohorts are bounded in bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.orm import Session

from archipel.protocol.messages import Cohort
from archipel.protocol.secagg import KeyTree
from archipel.server.rounds import frozen
from archipel.server.rounds.frozen import FrozenCohort, FrozenComplaints, FrozenRounds

DEVICES = 8
SIZE = DEVICES * (32 * 8 + 32 * (8 + 4 + 2 + 1))
"""Of the trees of 8 devices: each has 8 keys and 15 hashes."""


def grown(made: list[str], round_id: str) -> Callable[[], FrozenCohort]:
    def make() -> FrozenCohort:
        made.append(round_id)
        time.sleep(0.01)
        trees = {f"{number:032x}": KeyTree(os.urandom(32 * DEVICES), DEVICES) for number in range(DEVICES)}
        session: Any = None
        return FrozenCohort(Cohort(members=[]), session, trees)

    return make


def test_the_oldest_cohorts_go_when_their_trees_take_too_much() -> None:
    kept, made = FrozenRounds(kept_bytes=2 * SIZE), list[str]()
    complaints = kept._once("complaints", "a", lambda: FrozenComplaints(b"{}", "0"))
    for round_id in ("a", "b", "a", "c", "a", "c", "b"):
        assert kept._once("cohort", round_id, grown(made, round_id)).size == SIZE
    # With room for two, c pushed b out, for a was asked for since; and b then a.
    assert made == ["a", "b", "c", "b"]
    assert kept._once("complaints", "a", lambda: FrozenComplaints(b"", "1")) is complaints


def test_one_that_is_larger_than_all_may_take_is_kept_alone() -> None:
    kept, made = FrozenRounds(kept_bytes=SIZE - 1), list[str]()
    for round_id in ("a", "a", "b", "b", "a"):
        kept._once("cohort", round_id, grown(made, round_id))
    assert made == ["a", "b", "a"]


def test_of_many_threads_one_grows_the_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, made = FrozenRounds(), list[str]()

    def members(_: Session, round_id: str) -> FrozenCohort:
        return grown(made, round_id)()

    monkeypatch.setattr(frozen, "grow_cohort", members)
    nothing: Any = None
    threads = [threading.Thread(target=kept.cohort, args=(nothing, "a")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["a"]
