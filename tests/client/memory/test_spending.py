"""What rounds cost outlasts their entries: never forgotten, never counted twice, whenever the agent is killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from archipel.client.memory import journal as j
from archipel.client.memory.entry import Entry
from archipel.client.memory.journal import Journal
from archipel.client.memory.spending import MAX_ROWS, Sums
from archipel.client.memory.vault import Vault
from archipel.client.owner_view import look, read_rounds
from archipel.errors import ClientError
from archipel.protocol.messages import ServerNoise
from archipel.protocol.sealed import encode
from tests.client.memory.test_journal import begin

TASK = "1" * 32
P = ParamSpec("P")
R = TypeVar("R")


def entry(number: int, **changes: Any) -> Entry:
    values: dict[str, Any] = {
        "round_id": f"{number:032x}", "task_id": TASK, "number": number, "plan": "a" * 64, "bundle": "b" * 64,
        "step": "closed", "started": 1000.0 + number, "changed": 1000.0, "masked": "c" * 64, "result": "took_part",
        "sent": 10, "received": 3, "model": "linear", "cohort": 5,
    }  # fmt: skip
    return Entry(**{**values, **changes})


def test_what_was_spent() -> None:
    entries = [
        entry(0, cohort=9, noise="added", rho=0.5),
        entry(1, cohort=4, noise="added", rho=0.25),
        entry(2, cohort=7, noise="added"),  # of unknown strength
        entry(3, cohort=5, noise="none"),
        entry(4, cohort=0),  # it was not told
        entry(5, result="dropped", noise="added", rho=0.125),  # the masked update was sent, and may be in the sum
        entry(6, result="dropped", masked=None, sent=1, noise="added", rho=8.0),  # left before
        entry(7, result="refused", masked=None, sent=0),
        entry(8, privacy="plain", cohort=0),
        entry(9, privacy="plain", result="dropped", cohort=0),  # the server saw it all the same
        entry(10, step="masked", result=""),  # under way
        entry(11, kind="analytics", cohort=6),
    ]
    sums = Sums().plus(entries)
    training, analytics = sums.spent
    assert (training.task_id, training.model, training.kind) == (TASK, "linear", "training")
    assert (training.secure, training.smallest, training.told, training.devices) == (5, 4, 4, 25)
    assert (training.plain, training.unsure, training.rounds) == (2, 2, 9)
    assert (training.sent, training.received) == (90, 27)
    assert (training.noised, training.rho) == (3, 0.875)
    assert (analytics.kind, analytics.secure, analytics.smallest, analytics.rho) == ("analytics", 1, 6, 0.0)
    found = sums.totals
    assert (found.rounds, found.took_part, found.dropped, found.refused, found.open) == (12, 7, 3, 1, 1)
    assert (found.sent, found.since) == (101, 1000.0)
    # Together or one after the other.
    assert Sums().plus(entries[:5]).plus(entries[5:]) == sums


def test_what_the_server_states_last_is_kept() -> None:
    def stated(epsilon: float) -> ServerNoise:
        return ServerNoise(mechanism="correlated", multiplier=2.0, epsilon=epsilon, delta=1e-6)

    entries = [entry(1, stated=stated(1.0)), entry(2, stated=stated(1.5)), entry(3)]
    [row] = Sums().plus(entries).spent
    assert (row.stated, row.rounds, row.last) == (2, 3, stated(1.5))
    # As the journal forgets them one by one.
    assert Sums().plus(entries[:1]).plus(entries[1:]).spent == [row]
    [left] = Sums().plus([entry(4, stated=stated(9.0), masked=None, sent=0, result="dropped"), entry(5)]).spent
    assert (left.stated, left.last) == (0, None)


def test_nothing_sent_is_nothing_spent() -> None:
    sent_nothing = [entry(0, result="refused", masked=None), entry(1, result="dropped", masked=None)]
    assert Sums().plus(sent_nothing).spent == []


def test_tasks_without_end_take_no_room_without_end() -> None:
    many = [
        entry(n, task_id=f"{n:032x}", cohort=3 + n, kind=("training", "analytics")[n % 2], noise="added", rho=0.5)
        for n in range(MAX_ROWS + 10)
    ]
    found = Sums().plus(many).spent
    assert len(found) == MAX_ROWS + 2
    older = [row for row in found if not row.task_id]
    assert {(row.kind, row.secure, row.smallest) for row in older} == {("training", 5, 3), ("analytics", 5, 4)}
    assert sum(row.rho for row in found) == 0.5 * len(many)
    assert len(encode(j.Forgotten(sums=Sums(spent=found)))) < j._MAX_FORGOTTEN_BYTES / 2


class Killed(BaseException):
    pass


def steps_of(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None], stop: int) -> int:
    """Do `work` up to its change number `stop` of the file system. Returns how many it got to."""
    done = 0

    def counting(real: Callable[P, R]) -> Callable[P, R]:
        def call(*args: P.args, **options: P.kwargs) -> R:
            nonlocal done
            if done == stop:
                raise Killed
            done += 1
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "fsync", "unlink"):
            patch.setattr(os, name, counting(getattr(os, name)))
        with contextlib.suppress(Killed):
            work()
    return done


def test_killed_while_it_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(j, "KEPT_ROUNDS", 2)
    entries = [entry(n, noise="added", rho=0.5) for n in range(6)]
    expected = Sums().plus(entries)

    def state(folder: Path) -> Journal:
        (folder / "rounds").mkdir(parents=True)
        for each in entries:
            (folder / "rounds" / f"{each.round_id}.json").write_bytes(encode(each))
        return Journal(folder / "rounds", Vault(b"k" * 32))

    for stop in range(100):
        folder = tmp_path / f"{stop}"
        reached = steps_of(monkeypatch, state(folder)._forget_old, stop)
        assert read_rounds(folder)[1] == expected
        Journal(folder / "rounds", Vault(b"k" * 32))._forget_old()
        assert read_rounds(folder)[1] == expected
        assert len(list((folder / "rounds").glob("*.json"))) == 2
        if reached < stop:
            break
    assert stop >= 7  # fsync of file and folder, rename, four deletions


def test_every_round_is_counted_once_as_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(j, "KEPT_ROUNDS", 3)
    numbers = iter(range(100))
    journal = Journal(tmp_path / "rounds", Vault(b"k" * 32), lambda: float(next(numbers)))
    for number in range(8):
        opened = begin(journal, number, task=0)
        opened.store_masked(b"masked", "c" * 64)
        opened.close("took_part", sent=7, noise="added", rho=0.25)
        view = look(tmp_path)
        assert (view.totals.rounds, view.totals.sent) == (number + 1, 7 * (number + 1))
        assert view.privacy.tasks[0].spent.rho == 0.25 * (number + 1)
        assert view.totals.since == 0.0
    assert len(view.rounds) == 3
    # The last that went: its entry may still be counted as gone, so it must not begin anew.
    with pytest.raises(ClientError, match="its plan is an old one"):
        begin(journal, 4, task=0)


def test_damaged_sums_are_named(tmp_path: Path) -> None:
    (tmp_path / "rounds").mkdir()
    (tmp_path / "rounds" / "forgotten").write_bytes(b'{"rounds":[]')
    with pytest.raises(ClientError, match="rounds/forgotten: damaged"):
        look(tmp_path)
    (tmp_path / "rounds" / "forgotten").write_bytes(b"{" * (2 << 20))
    with pytest.raises(ClientError, match="rounds/forgotten: damaged"):
        look(tmp_path)
