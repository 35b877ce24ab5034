"""Whoever has recorded a signed plan shows it to the device again, to have it train and send on the same data once
more: at once, after hundreds of other rounds, after a restart, with the device's clock set back. Or an old plan that
the device was not shown when it was new.

What stops them: a plan has a serial, greater with every round of its task, of which the device keeps the greatest on
disk, and a time after which it is good no longer; of tasks that are forgotten that time is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.client.memory import journal, plan_book
from archipel.client.memory.plan_book import PlanBook
from archipel.errors import ClientError
from archipel.protocol.messages import RoundPlan
from archipel.protocol.sealed import Sealed
from tests.client.answers.world import World
from tests.support.scripted_server import Reply, scripted


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with scripted(tmp_path) as server:
        made = World(tmp_path, server)
        yield made
        made.agent.close()


def dated(seconds: float) -> Callable[[Reply], Reply]:
    """The right answer, by a server whose clock says that."""
    return lambda reply: Reply(reply.status, reply.body, {**reply.headers, "Date": formatdate(seconds, usegmt=True)})


def replayed(world: World, recorded: tuple[RoundPlan | None, Sealed]) -> str:
    """The outcome of showing the agent a recorded plan, and the requests that it made for its round."""
    world.server.forget()
    world.server.plan, world.server.sealed = recorded
    world.server.phase = "updating"
    outcome = world.agent.run_once()
    assert world.asked("update") == 0
    return outcome.kind


def test_a_plan_is_taken_once_however_long_ago_that_was(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # The journal forgets what 256 rounds ago was; nobody waits for so many.
    monkeypatch.setattr(journal, "KEPT_ROUNDS", 2)
    monkeypatch.setattr(plan_book, "KEPT_TASKS", 2)
    assert world.round(privacy="plain").kind == "took_part"
    recorded = (world.server.plan, world.server.sealed)
    assert replayed(world, recorded) == "waiting"  # it knows that it was in it
    for _ in range(5):
        assert world.round(privacy="plain").kind == "took_part"
    assert replayed(world, recorded) == "refused"
    world.restart()
    assert replayed(world, recorded) == "refused"
    # Neither once its task is forgotten, whatever the clocks say: theirs were good for longer than it was.
    for task in ("c", "d", "e"):
        assert world.round(privacy="plain", task_id=task * 32, not_after=2**40 + 1).kind == "took_part"
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert replayed(world, recorded) == "refused"
    world.restart()
    assert replayed(world, recorded) == "refused"


def test_a_plan_ends_by_the_servers_clock_and_by_the_devices(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = int(time.time())
    # A server whose answers carry no time: the device goes by its own clock, which may be ahead by a day.
    assert world.round(privacy="plain", not_after=now - 60).kind == "took_part"
    assert world.round(privacy="plain", not_after=now - 2 * 86400).kind == "refused"
    world.answers("check-in", dated(now))
    assert world.round(privacy="plain", not_after=now - 60).kind == "refused"
    world.answers("check-in", dated(now))
    assert world.round(privacy="plain", not_after=now + 60).kind == "took_part"
    world.restart()
    assert world.round(privacy="plain", not_after=0).kind == "refused"
    # The device's own clock is believed only when it is far behind what the plan says.
    assert world.round(privacy="plain", not_after=now + 60).kind == "took_part"
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 2 * 86400)
    assert world.round(privacy="plain", not_after=now + 60).kind == "refused"


def test_a_device_that_is_killed_between_plan_and_work_may_begin_that_round_again(world: World) -> None:
    world.server.begin(privacy="plain")
    assert world.server.plan is not None
    world.agent._device.journal.begin(world.server.plan, "0" * 64)
    world.restart()
    assert world.agent.run_once().kind == "took_part"


def plan(serial: int, task: int = 0, *, asynchronous: bool = False, not_after: int = 1000) -> RoundPlan:
    return RoundPlan(
        round_id=f"{serial:032x}", task_id=f"{task:032x}", number=1, bundle="d" * 64, weights="e" * 64,
        privacy="secure",
        min_cohort=3, max_cohort=3, threshold=3, modulus_bits=24, serial=serial, not_after=not_after,
        staleness_exponent=0.5 if asynchronous else None,
    )  # fmt: skip


def test_rounds_of_asynchronous_tasks_overlap(tmp_path: Path) -> None:
    book = PlanBook(tmp_path / "plans")
    for serial in (5, 3, 9, 4):
        assert not book.why_old(plan(serial, asynchronous=True))
        book.take(plan(serial, asynchronous=True))
    for serial in (3, 4, 5, 9):
        assert book.why_old(plan(serial, asynchronous=True)), serial
    for serial in range(10, 10 + plan_book.RECENT):
        book.take(plan(serial, asynchronous=True))
    again = PlanBook(tmp_path / "plans")
    assert all(again.why_old(plan(serial, asynchronous=True)) for serial in range(18))
    assert not again.why_old(plan(18, asynchronous=True))
    # Of a task whose rounds do not overlap none comes late.
    again.take(plan(7, task=1))
    assert again.why_old(plan(6, task=1))
    assert not again.why_old(plan(8, task=1))


def test_what_is_forgotten_is_bounded_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_book, "KEPT_TASKS", 4)
    book = PlanBook(tmp_path / "plans")
    for task in range(20):
        book.take(plan(1, task=task, not_after=1000 + task))
    assert (tmp_path / "plans").stat().st_size < 1000
    assert all(book.why_old(plan(1, task=task, not_after=1000 + task)) for task in range(20))
    assert not book.why_old(plan(1, task=99, not_after=1016))


@settings(max_examples=200)
@given(data=st.one_of(st.binary(max_size=64), st.text(max_size=64).map(str.encode)), cut=st.integers(0, 100))
@pytest.mark.sampled(every=4)
def test_a_damaged_file_is_said_to_be_damaged(tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged-plans"  # one for all examples: making folders takes longer
    path.unlink(missing_ok=True)
    PlanBook(path).take(plan(1))
    whole = path.read_bytes()
    for damaged in (data, whole[:cut] + data, whole[: cut % len(whole)]):
        path.write_bytes(damaged)
        reason = ""
        try:
            PlanBook(path).why_old(plan(1))
        except ClientError as error:
            reason = str(error)
        assert reason == "" or ("damaged" in reason and "remove it" in reason)
