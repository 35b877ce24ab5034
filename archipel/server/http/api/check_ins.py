"""Check-ins: a device reports that it is there, and gets its round's plan, or the time of its next check-in."""

from __future__ import annotations

from flask import request
from sqlalchemy import Connection, and_, bindparam, case, insert, select, update

from archipel.protocol.messages import CheckIn, CheckInResponse, SetAside
from archipel.protocol.sealed import Sealed, decode
from archipel.server.database.fault_tables import Quarantine
from archipel.server.database.registry_tables import OfferSerial
from archipel.server.database.tables import Answer, CheckInRow, Device, Participant, Round, Task
from archipel.server.devices.revocation import SHARED, require_member
from archipel.server.http.problems import refuse
from archipel.server.http.request_log import HELD, OF_NO_ROUND
from archipel.server.http.routes import DEVICE, Call, Route
from archipel.server.rounds.candidates import could_take
from archipel.server.rounds.machine import ORDER, RULES
from archipel.server.services import Services

WRITES_PER_WINDOW = 2.5
"""How often at most the time of a check-in is written within `check_in_window`. That is at least three waits long, so
the time is written at every second check-in or less often, and a device may be late by more than a wait."""
MAX_BYTES = 16 << 10
AT_ONCE = 0.05
"""Seconds after which a device comes again whose check-in was held to the end."""


_CHECK_IN = (
    select(
        CheckInRow.due,
        CheckInRow.attributes,
        CheckInRow.versions,
        CheckInRow.neighbours,
        CheckInRow.mlkem,
        CheckInRow.adds_noise,
        CheckInRow.population,
        OfferSerial.serial,
        Round.round_id,
        Round.phase,
        Round.plan,
        Participant.ends,
        Participant.left,
        Quarantine.until,
        Quarantine.detail,
        Quarantine.reason,
        Participant.excluded,
    )
    .outerjoin(OfferSerial, OfferSerial.population == CheckInRow.population)
    .outerjoin(Round, Round.round_id == CheckInRow.round_id)
    .outerjoin(
        Participant,
        and_(Participant.round_id == CheckInRow.round_id, Participant.device_id == CheckInRow.device_id),
    )
    .outerjoin(Quarantine, Quarantine.device_id == CheckInRow.device_id)
    .where(CheckInRow.device_id == bindparam("device_id"))
)
_SERIAL = select(OfferSerial.serial).where(OfferSerial.population == bindparam("population"))


def check_in(call: Call[CheckIn]) -> CheckInResponse:
    """Report that the device is there, and learn what to do.

    The server answers with the plan of the device's round if the device can take part in it, and otherwise with the
    time to ask again. It also offers the versions that the device is to run. It keeps an answer without plan and offers
    back for as long as the device asks for (`wait`) and the server holds check-ins, until the device is in a round.
    """
    if len(call.raw) > MAX_BYTES:
        raise refuse(413, f"{len(call.raw)} bytes of attributes, the limit is {MAX_BYTES}")
    answer, hold = _answer(call, None)
    held = call.services.held.hold(call.identity.device_id, hold) if hold else 0.0
    if held:
        request.environ[HELD] = held
        answer = _answer(call, held)[0]
    if answer.plan is None:
        # What it was sent before it has a plan is of no round.
        call.services.fetched.take(call.identity.device_id)
        request.environ[OF_NO_ROUND] = True
    return answer


def _answer(call: Call[CheckIn], held: float | None) -> tuple[CheckInResponse, float]:
    """The answer, and for how many seconds it may be kept back. `held`: how long it has been kept back already."""
    services = call.services
    now = services.clock()
    report, device_id, over = call.body, call.identity.device_id, ""
    row = services.database.look(_CHECK_IN, device_id=device_id)
    if row is not None and row.round_id is not None:
        given = select(Answer.phase).where(Answer.of(row.round_id, device_id))
        with services.database.read() as session:
            answers = set(session.scalars(given))
        takes_part = has_part(row.phase, answers) if row.ends is None else (not answers and now < row.ends)
        takes_part = takes_part and row.left is None and row.excluded is None
        # A device that has dropped out of its round gets no plan, and no other round takes it before that one ends.
        if takes_part or row.ends is None:
            plan = decode("plan", row.plan, Sealed) if takes_part else None
            wait = services.pace.after_round(now)
            if report.versions is not None and row.versions != report.versions:
                services.database.together(lambda connection: _store(connection, device_id, report, now, wait, ""))
            # Also in a round: a device that goes from one round into the next would never learn of offers otherwise.
            offers = _offers(services, row.population, row.serial, device_id, report)
            return CheckInResponse(plan=plan, retry_after=wait, offers=offers), 0.0
        # The device's seat in a buffer is over. The coordinator releases it only while the task has an open round, so
        # it is released here too.
        over = row.round_id
    # A device that checks in for the first time has no row yet.
    member = row or services.database.look(_POPULATION, device=device_id)
    population, serial, aside = "" if member is None else str(member.population), None, None
    wait = services.pace.retry_after(now, population)
    hold = min(report.wait, services.settings.longest_hold)
    # Who is to come later than that is one of very many, of which the server cannot hold all.
    holds = held is None and wait <= hold
    if row is not None:
        serial = row.serial
        if row.until is not None and row.until > now:
            aside = SetAside(until=row.until, reason=f"{row.reason} ({row.detail})")
    offers = _offers(services, population, serial, device_id, report)
    holds = holds and not offers and aside is None
    # A device that comes for the first time rests for no task.
    holds = holds and (row is None or _could_be_taken(services, population, device_id, report, now))
    # A held device counts as waiting until its time is over: half of that from now is near enough at any moment of it.
    due = now + (hold / 2 if holds else wait)
    # Most check-ins only read: `due` is written only if it would be off by more than this. The window tolerates that.
    tolerance = services.settings.check_in_window / WRITES_PER_WINDOW
    fresh = row is not None and (held is not None or row.due >= due - tolerance)
    speaks = "neighbours" in report.protocols, "neighbours-mlkem" in report.protocols
    told = (report.attributes, report.versions, *speaks, report.adds_noise)
    was = None if row is None else (row.attributes, row.versions, row.neighbours, row.mlkem, row.adds_noise)
    if row is not None and not over and was == told and row.due > 0:
        if not fresh:
            services.database.note(_STILL_WAITS, device=device_id, now=now, due=due)
    elif over or not fresh or was != told:
        population = services.database.together(
            lambda connection: _store(connection, device_id, report, now, due - now, over)
        )
        # A first check-in: the serial could not be looked up before the device's population was known.
        if row is None and report.versions is not None:
            with services.database.read() as session:
                serial = session.scalar(_SERIAL, {"population": population})
            offers = _offers(services, population, serial, device_id, report)
    wait = max(AT_ONCE, wait - held) if held is not None else wait
    return CheckInResponse(retry_after=wait, set_aside=aside, offers=offers), hold if holds and not offers else 0.0


def _could_be_taken(services: Services, population: str, device_id: str, report: CheckIn, now: float) -> bool:
    """Whether a round may take the device soon: not if it has to rest for all tasks, or is none of theirs."""
    running = select(Task).where(Task.population == population, Task.state == "running")
    with services.database.read() as session:
        tasks = session.scalars(running).all()
        # A new task begins its first round at once.
        return not tasks or any(could_take(session, task, device_id, report.attributes, now=now) for task in tasks)


def _offers(services: Services, population: str, serial: int | None, device_id: str, report: CheckIn) -> list[Sealed]:
    if report.versions is None or serial is None:
        return []
    return services.offers.to(population, serial, device_id, report.attributes, report.versions, now=services.clock())


def _store(connection: Connection, device_id: str, report: CheckIn, now: float, wait: float, over: str) -> str:
    """Store that the device waits, and what it reported; it leaves the round `over` (""). Returns its population."""
    device = require_member(connection.execute(_DEVICE, {"device": device_id}).one_or_none(), device_id)
    row = {
        "device": device_id,
        "attributes": dict(report.attributes),
        "versions": None if report.versions is None else dict(report.versions),
        "neighbours": "neighbours" in report.protocols,
        "mlkem": "neighbours-mlkem" in report.protocols,
        "adds_noise": report.adds_noise,
        "now": now,
        "due": now + wait,
    }
    if over:
        connection.execute(_LEFT, {"device": device_id, "over": over})
    if not connection.execute(_AGAIN, row).rowcount:
        connection.execute(_FIRST, {**row, "population": device.population, "aggregator": device.kind == "aggregator"})
    return str(device.population)


_POPULATION = select(Device.population).where(Device.device_id == bindparam("device"))
_DEVICE = (
    select(Device.population, Device.kind, Device.revoked)
    .where(Device.device_id == bindparam("device"))
    .with_for_update(**SHARED)
)
# A round may have taken the device since it was looked up. Then `due` must stay 0 (see `assigning.seat`).
_WAITS = CheckInRow.round_id.is_(None)
_AGAIN = (
    update(CheckInRow)
    .where(CheckInRow.device_id == bindparam("device"))
    .values(
        attributes=bindparam("attributes"),
        versions=bindparam("versions"),
        neighbours=bindparam("neighbours"),
        mlkem=bindparam("mlkem"),
        adds_noise=bindparam("adds_noise"),
        last_seen=case((_WAITS, bindparam("now")), else_=CheckInRow.last_seen),
        due=case((_WAITS, bindparam("due")), else_=CheckInRow.due),
    )
)
# The most frequent writing of all. A round that has taken the device meanwhile has set `due` to 0, and so has whoever
# revoked it: it is in this very row, so nothing else has to be looked at.
_STILL_WAITS = (
    update(CheckInRow)
    .where(CheckInRow.device_id == bindparam("device"), CheckInRow.due > 0)
    .values(last_seen=bindparam("now"), due=bindparam("due"))
)
_LEFT = (
    update(CheckInRow)
    .where(CheckInRow.device_id == bindparam("device"), CheckInRow.round_id == bindparam("over"))
    .values(round_id=None)
)
_FIRST = insert(CheckInRow).values(
    device_id=bindparam("device"),
    population=bindparam("population"),
    mlkem=bindparam("mlkem"),
    attributes=bindparam("attributes"),
    versions=bindparam("versions"),
    neighbours=bindparam("neighbours"),
    adds_noise=bindparam("adds_noise"),
    aggregator=bindparam("aggregator"),
    last_seen=bindparam("now"),
    due=bindparam("due"),
)


def has_part(phase: str, answers: set[str]) -> bool:
    """Whether a participant that answered in the phases `answers` can still do something in `phase`.

    A device that dropped out or has done everything does not get the plan again: it would train in vain.
    """
    if ORDER[phase] <= ORDER["advertising"]:
        return True
    rule = RULES[phase]
    if rule.waits_for != "answers" or not (rule.previous == "assigning" or rule.previous in answers):
        return False
    # These are the last phases in which a device of a secure and of a plain round sends something.
    return not (phase in ("unmasking", "updating") and phase in answers)


ROUTES = (Route("POST", "/v1/check-ins", DEVICE, check_in, CheckIn, CheckInResponse),)
