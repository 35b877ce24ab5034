"""Stores what devices send in a round. What many send at one moment is one transaction of two statements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, insert

from archipel.errors import RefusalError
from archipel.protocol.messages import Receipt
from archipel.server.database.tables import Answer
from archipel.server.rounds.seats import Seat, take_seats

if TYPE_CHECKING:
    from archipel.server.services import Services


@dataclass(frozen=True)
class _Given:
    """What one device sends: the columns of its Answer, and further writes of the same transaction."""

    row: dict[str, Any]
    also: Callable[[Connection], None] | None
    clock: Callable[[], float]


def store_answer(
    services: Services,
    seat: Seat,
    phase: str,
    *,
    digest: str,
    size: int,
    body: bytes | None = None,
    also: Callable[[Connection], None] | None = None,
) -> Receipt:
    """Record that the device answered. Durable when it returns, so the device's request can be acknowledged then.

    Arguments:
        services: The server's database and clock.
        seat: The seat as `find_seat` gave it; it is looked up again under the lock.
        phase: The phase in which the device answers.
        digest: SHA-256 (hex) of the message's bytes.
        size: Length of the message in bytes.
        body: The message, or None if it is stored elsewhere (updates in the spool, shares in their own table).
        also: Further writes of the same transaction. Not called if the same message is stored already.

    Raises:
        RefusalError: The phase ended meanwhile, or another message is stored.
    """
    row = {
        "round_id": seat.round_id,
        "phase": phase,
        "device_id": seat.device_id,
        "digest": digest,
        "size": size,
        "body": body,
        "received": services.clock(),
        "fetched": services.fetched.take(seat.device_id),
    }
    return services.database.together_with(_store, _Given(row, also, services.clock))


def _store(connection: Connection, given: Sequence[_Given]) -> list[Receipt | RefusalError]:
    outcomes: dict[int, Receipt | RefusalError] = {}
    # Always in the same order, in which the rounds are locked.
    for round_id in sorted({each.row["round_id"] for each in given}):
        places = [place for place, each in enumerate(given) if each.row["round_id"] == round_id]
        outcomes.update(zip(places, _store_of_round(connection, round_id, [given[place] for place in places])))
    return [outcomes[place] for place in range(len(given))]


def _store_of_round(connection: Connection, round_id: str, given: Sequence[_Given]) -> list[Receipt | RefusalError]:
    devices = {each.row["device_id"] for each in given}
    seats = take_seats(connection, round_id, devices, now=given[0].clock())
    outcomes: list[Receipt | RefusalError] = []
    new = []
    for each in given:
        device_id, phase, digest = each.row["device_id"], each.row["phase"], each.row["digest"]
        seat = seats[device_id]
        try:
            if isinstance(seat, RefusalError):
                raise seat
            if seat.may_send(phase, digest):
                new.append(each)
                # A device may have repeated its request, and both are here.
                seats[device_id] = replace(seat, answers={**seat.answers, phase: digest})
            outcomes.append(Receipt())
        except RefusalError as error:
            outcomes.append(error)
    # After all refusals: nothing was written for those that are refused.
    if new:
        connection.execute(_STORE, [each.row for each in new])
    for each in new:
        if each.also is not None:
            each.also(connection)
    return outcomes


_STORE = insert(Answer)
