"""A device says that it is there, and learns whether it has something to do."""

from __future__ import annotations

from sqlalchemy import Connection, and_, bindparam, case, insert, select, update

from archipel.protocol.messages import CheckIn, CheckInResponse, SetAside
from archipel.protocol.sealed import Sealed, decode
from archipel.server.database.fault_tables import Quarantine
from archipel.server.database.registry_tables import OfferSerial
from archipel.server.database.tables import Answer, CheckInRow, Device, Participant, Round
from archipel.server.devices.revocation import SHARED, require_member
from archipel.server.http.problems import refuse
from archipel.server.http.routes import DEVICE, Call, Route
from archipel.server.rounds.machine import ORDER, RULES
from archipel.server.services import Services

WRITES_PER_WINDOW = 4
MAX_BYTES = 16 << 10


_CHECK_IN = (
    select(
        CheckInRow.due,
        CheckInRow.attributes,
        CheckInRow.versions,
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
    """The plan of the round that the device is in, while it still has a part in it; else when to ask again, and which
    versions it is to run."""
    if len(call.raw) > MAX_BYTES:
        raise refuse(413, f"{len(call.raw)} bytes of attributes, the limit is {MAX_BYTES}")
    services = call.services
    now = services.clock()
    told, device_id, over = call.body, call.identity.device_id, ""
    row = services.database.look(_CHECK_IN, device_id=device_id)
    if row is not None and row.round_id is not None:
        given = select(Answer.phase).where(Answer.of(row.round_id, device_id))
        with services.database.read() as session:
            answers = set(session.scalars(given))
        wanted = has_part(row.phase, answers) if row.ends is None else (not answers and now < row.ends)
        wanted = wanted and row.left is None and row.excluded is None
        if wanted or row.ends is None:
            plan = decode("plan", row.plan, Sealed) if wanted else None
            wait = services.settings.retry_after
            if told.versions is not None and row.versions != told.versions:
                services.database.together(lambda connection: _store(connection, device_id, told, now, wait, ""))
            # A device that goes from round to round would never hear of them otherwise.
            offers = _offers(services, row.population, row.serial, device_id, told)
            return CheckInResponse(plan=plan, retry_after=wait, offers=offers)
        # Its seat in a buffer is over. The coordinator sees to that only while the task has a round.
        over = row.round_id
    wait = services.pace.retry_after(now)
    # Where all come every second, most check-ins only read: the time is written a few times per window.
    stale = services.settings.check_in_window / WRITES_PER_WINDOW
    population, serial, aside = "", None, None
    if row is not None:
        population, serial = row.population, row.serial
        if row.until is not None and row.until > now:
            aside = SetAside(until=row.until, reason=f"{row.reason} ({row.detail})")
    fresh = row is not None and row.due >= now + wait - stale
    if row is None or not fresh or row.attributes != told.attributes or row.versions != told.versions:
        population = services.database.together(lambda connection: _store(connection, device_id, told, now, wait, over))
        if row is None and told.versions is not None:
            with services.database.read() as session:
                serial = session.scalar(_SERIAL, {"population": population})
    offers = _offers(services, population, serial, device_id, told)
    return CheckInResponse(retry_after=wait, set_aside=aside, offers=offers)


def _offers(services: Services, population: str, serial: int | None, device_id: str, told: CheckIn) -> list[Sealed]:
    if told.versions is None or serial is None:
        return []
    return services.offers.to(population, serial, device_id, told.attributes, told.versions, now=services.clock())


def _store(connection: Connection, device_id: str, told: CheckIn, now: float, wait: float, over: str) -> str:
    """Write down that the device waits, no longer in the round `over`, and what it told. Returns its population."""
    device = require_member(connection.execute(_DEVICE, {"device": device_id}).one_or_none(), device_id)
    if device.kind != "device":
        raise refuse(403, f"a member of kind {device.kind!r} takes no part in this server's rounds")
    row = {
        "device": device_id,
        "attributes": dict(told.attributes),
        "versions": None if told.versions is None else dict(told.versions),
        "now": now,
        "due": now + wait,
    }
    if over:
        connection.execute(_LEFT, {"device": device_id, "over": over})
    if not connection.execute(_AGAIN, row).rowcount:
        connection.execute(_FIRST, {**row, "population": device.population})
    return str(device.population)


_DEVICE = (
    select(Device.population, Device.kind, Device.revoked)
    .where(Device.device_id == bindparam("device"))
    .with_for_update(**SHARED)
)
_WAITS = CheckInRow.round_id.is_(None)
_AGAIN = (
    update(CheckInRow)
    .where(CheckInRow.device_id == bindparam("device"))
    .values(
        attributes=bindparam("attributes"),
        versions=bindparam("versions"),
        last_seen=case((_WAITS, bindparam("now")), else_=CheckInRow.last_seen),
        due=case((_WAITS, bindparam("due")), else_=CheckInRow.due),
    )
)
_LEFT = (
    update(CheckInRow)
    .where(CheckInRow.device_id == bindparam("device"), CheckInRow.round_id == bindparam("over"))
    .values(round_id=None)
)
_FIRST = insert(CheckInRow).values(
    device_id=bindparam("device"),
    population=bindparam("population"),
    attributes=bindparam("attributes"),
    versions=bindparam("versions"),
    last_seen=bindparam("now"),
    due=bindparam("due"),
)


def has_part(phase: str, answers: set[str]) -> bool:
    """Whether a participant that answered in the phases `answers` can still do something in `phase`.

    One that dropped out, or has done everything, is not sent the plan again: it would train in vain.
    """
    if ORDER[phase] <= ORDER["advertising"]:
        return True
    rule = RULES[phase]
    if rule.waits_for != "answers" or not (rule.previous == "assigning" or rule.previous in answers):
        return False
    return not (phase in ("unmasking", "updating") and phase in answers)


ROUTES = (Route("POST", "/v1/check-ins", DEVICE, check_in, CheckIn, CheckInResponse),)
