"""What many devices send at one moment: one transaction, in which each has the outcome that it has alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from sqlalchemy import event, select

from archipel.errors import ApiError, ConflictError, ForbiddenError, GoneError, NotFoundError
from archipel.protocol.messages import Receipt
from archipel.server.database.tables import Answer
from archipel.server.rounds import answering
from archipel.server.rounds.answering import store_answer
from archipel.server.rounds.seats import Seat, find_seat
from tests.support.devices import Device
from tests.support.world import World

A, B = "a" * 64, "b" * 64


class Crowd:
    """Devices of a round that all send something at one moment."""

    def __init__(self, world: World, devices: list[Device]) -> None:
        self.world, self.database = world, world.services.database
        self.seats = [find_seat(world.services, device.plan.round_id, device.id) for device in devices]
        self.statements: list[str] = []
        event.listen(self.database.engine, "after_cursor_execute", self._note)

    def send(self, *sent: tuple[Seat, str]) -> list[object]:
        """Send the digests as advertisements; the outcomes."""
        ends: list[object] = [None] * len(sent)

        def one(place: int, seat: Seat, digest: str) -> None:
            try:
                ends[place] = store_answer(self.world.services, seat, "advertising", digest=digest, size=1)
            except Exception as error:  # noqa: BLE001 - looked at by the test
                ends[place] = error

        group = self.database._group or self.database._groups[answering._store]
        threads = [threading.Thread(target=one, args=(place, *each)) for place, each in enumerate(sent)]
        self.statements.clear()
        with group._committing:
            for thread in threads:
                thread.start()
            end = time.monotonic() + 30
            while len(group._queue) < len(sent):
                assert time.monotonic() < end
                time.sleep(0.001)
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return ends

    def _note(self, connection: object, cursor: object, statement: str, *more: object) -> None:
        self.statements.append(statement.split()[0])

    def stored(self) -> dict[str, str]:
        with self.database.read() as session:
            rows = session.execute(select(Answer.device_id, Answer.digest).where(Answer.phase == "advertising"))
            return {row.device_id: row.digest for row in rows}


@pytest.fixture
def crowd(world: World) -> Crowd:
    world.create_task(cohort=5, min_cohort=3, threshold=3)
    devices = world.add_devices(5)
    for device in devices:
        device.check_in()
    world.settle()
    assert all(device.join() for device in devices)
    crowd = Crowd(world, devices)
    # So that PostgreSQL has a queue for it, too.
    assert store_answer(world.services, crowd.seats[4], "advertising", digest=A, size=1) == Receipt()
    return crowd


@pytest.mark.sampled(every=3)
def test_many_answers_take_two_statements(crowd: Crowd) -> None:
    first = crowd.seats[:4]
    assert crowd.send(*((seat, A) for seat in first)) == [Receipt()] * 4
    assert [each for each in crowd.statements if each in ("SELECT", "INSERT")] == ["SELECT", "INSERT"]
    assert crowd.stored() == {seat.device_id: A for seat in crowd.seats}


@pytest.mark.sampled(every=3)
def test_each_has_its_own_outcome(crowd: Crowd) -> None:
    one, two, three, _, five = crowd.seats
    elsewhere = Seat(**{**_fields(one), "round_id": "0" * 32})
    stranger = Seat(**{**_fields(one), "device_id": "1" * 32})
    ends = crowd.send((one, A), (five, A), (five, B), (elsewhere, A), (stranger, A), (two, B), (three, A))
    assert [ends[place] for place in (0, 1, 5, 6)] == [Receipt()] * 4
    assert [type(ends[place]) for place in (2, 3, 4)] == [ConflictError, NotFoundError, ForbiddenError]
    found = {one.device_id: A, two.device_id: B, three.device_id: A, five.device_id: A}
    assert crowd.stored() == found


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("other", [A, B])
def test_a_device_that_sends_twice_at_one_moment(crowd: Crowd, other: str) -> None:
    """The same is one message, and another one is refused, whichever comes first."""
    ends = crowd.send((crowd.seats[0], A), (crowd.seats[0], other), (crowd.seats[1], A))
    refused = [each for each in ends if isinstance(each, ConflictError)]
    assert (len(refused), ends.count(Receipt())) == ((0, 3) if other == A else (1, 2))
    assert set(crowd.stored()) == {crowd.seats[place].device_id for place in (0, 1, 4)}


@pytest.mark.sampled(every=3)
def test_those_who_come_too_late(crowd: Crowd) -> None:
    crowd.world.clock.now += 1000
    crowd.world.settle()
    ends = crowd.send(*((seat, A) for seat in crowd.seats[:3]))
    assert {type(each) for each in ends} <= {GoneError, ApiError}
    assert set(crowd.stored()) <= {crowd.seats[4].device_id}


@pytest.mark.sampled(every=3)
def test_an_error_of_one_is_not_that_of_the_others(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another process stores the answer of one of them at the same moment: the transaction is undone, and each
    is stored by itself."""
    taken: list[str] = []
    take: Callable[..., dict[str, object]] = answering.take_seats

    def blind(connection: object, round_id: str, devices: set[str], *, now: float) -> dict[str, object]:
        found = take(connection, round_id, devices, now=now)
        if not taken and len(devices) > 1:
            taken.append(round_id)
            seat = found[crowd.seats[4].device_id]
            assert isinstance(seat, Seat)
            found[seat.device_id] = Seat(**{**_fields(seat), "answers": {}})
        return found

    monkeypatch.setattr(answering, "take_seats", blind)
    assert crowd.send((crowd.seats[0], A), (crowd.seats[4], A), (crowd.seats[1], B)) == [Receipt()] * 3
    assert crowd.stored() == {
        crowd.seats[0].device_id: A, crowd.seats[1].device_id: B, crowd.seats[4].device_id: A,
    }  # fmt: skip


def _fields(seat: Seat) -> dict[str, object]:
    return {name: getattr(seat, name) for name in Seat.__dataclass_fields__}
