"""A version is promoted, or a task begun with it, at the very moment at which it would be deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy.orm import Session

from archipel.errors import ConflictError
from archipel.server.registry import versions as registry
from archipel.server.retention.deleting import delete_unneeded
from archipel.server.retention.rules import Rule
from archipel.server.storage.blob_rows import keep_weights
from tests.server.retention.training import deleted, train, weights_of
from tests.support.fleet import MODEL, Fleet
from tests.support.world import World

RULE = Rule(1, 0.0)


@pytest.fixture
def versions(world: World) -> list[str]:
    """The weights of versions 1 to 4 of a model, of which the first is promoted and the last is the newest."""
    task = train(world, 4)
    fleet = Fleet(world).create(0, promote=None)
    for number in range(1, 5):
        fleet.post(f"models/{MODEL}/versions", {"task_id": task["task_id"], "task_version": number}, 201)
    fleet.promote(1)
    world.clock.now += 1
    return weights_of(world, task)[1:]


class Paused:
    """Writing transactions that wait before they commit until the test lets them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.arrived, self.go_on = threading.Event(), threading.Event()

    @contextmanager
    def write(self) -> Iterator[Session]:
        with self.world.services.database.write() as session:
            yield session
            session.flush()
            self.arrived.set()
            assert self.go_on.wait(20)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    return thread, answers


@pytest.mark.sampled(every=4)
def test_a_promotion_that_comes_during_a_deletion_is_refused(world: World, versions: list[str]) -> None:
    paused = Paused(world)
    pruning, gone = in_thread(lambda: delete_unneeded(world.services, paused.write, RULE, actor="test"))
    assert paused.arrived.wait(20)
    promoting, answers = in_thread(lambda: world.operator("POST", f"/v1/models/{MODEL}/promote", {"version": 2}))
    promoting.join(0.5)
    assert promoting.is_alive(), "it did not wait for the deletion"
    paused.go_on.set()
    pruning.join(20)
    promoting.join(20)
    [[status, problem]] = answers
    assert (status, "were deleted" in problem["detail"]) == (409, True)
    assert {each.digest for each in gone[0]} >= {versions[1], versions[2]}
    assert deleted(world, versions) == [False, True, True, False]


@pytest.mark.sampled(every=4)
def test_a_deletion_that_comes_during_a_promotion_leaves_the_version(world: World, versions: list[str]) -> None:
    paused = Paused(world)

    def promote() -> None:
        with paused.write() as session:
            model = session.get_one(registry.Model, MODEL, with_for_update=True)
            version = registry.find_version(session, model, 2)
            keep_weights(session, version.weights, error=ConflictError)
            registry.set_promoted(
                session, model, 2, below=model.promotion, how="promote", now=world.clock.now, actor="test"
            )

    promoting, _ = in_thread(promote)
    assert paused.arrived.wait(20)
    database = world.services.database
    pruning, gone = in_thread(lambda: delete_unneeded(world.services, database.write, RULE, actor="test"))
    pruning.join(0.5)
    paused.go_on.set()
    promoting.join(20)
    pruning.join(20)
    assert versions[1] not in {each.digest for each in gone[0]}
    delete_unneeded(world.services, database.write, RULE, actor="test")
    assert deleted(world, versions) == [False, False, True, False]


@pytest.mark.sampled(every=4)
def test_whoever_comes_first_wins_and_nothing_promoted_is_deleted(world: World, versions: list[str]) -> None:
    """Both at once, without anything that orders them."""
    start = threading.Barrier(3)

    def promote(number: int) -> int:
        start.wait(20)
        return world.operator("POST", f"/v1/models/{MODEL}/promote", {"version": number})[0]

    def prune() -> object:
        start.wait(20)
        return delete_unneeded(world.services, world.services.database.write, RULE, actor="test")

    threads = [in_thread(lambda: promote(2)), in_thread(lambda: promote(3)), in_thread(prune)]
    for thread, _ in threads:
        thread.join(30)
    lost = deleted(world, versions)
    for number, (_, answers) in zip((2, 3), threads[:2]):
        assert answers in ([200], [409]), answers
        assert lost[number - 1] == (answers == [409])
    assert [lost[0], lost[3]] == [False, False]
