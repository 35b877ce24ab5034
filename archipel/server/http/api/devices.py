"""Devices as operators see them: lists them, revokes them, and releases those that were set aside."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnExpressionArgument, func, select
from sqlalchemy.orm import Session

from archipel.protocol.operator.devices import (
    DeviceInfo,
    DevicePage,
    DeviceQuery,
    QuarantineInfo,
    SuspicionInfo,
)
from archipel.server.audit import log as audit
from archipel.server.callers import Identity
from archipel.server.database.fault_tables import Fault, Quarantine, Suspect
from archipel.server.database.tables import CheckInRow, Device, DeviceKey, Participant, Round, Task
from archipel.server.devices.faults import release
from archipel.server.devices.revocation import LOCKED, revoke
from archipel.server.devices.suspicion import Score
from archipel.server.http.paging import page
from archipel.server.http.problems import refuse
from archipel.server.http.routes import OPERATOR, READ, Call, Route


def list_devices(call: Call[None]) -> DevicePage:
    """Devices, newest first."""
    query: DeviceQuery = call.query
    if query.population is not None:
        call.identity.require(query.population)
    where = call.identity.visible(Device.population)
    # Apart from `where`: the last device of a page may have left the choice when the next page is asked for.
    chosen: list[ColumnExpressionArgument[bool]] = []
    if query.population is not None:
        chosen.append(Device.population == query.population)
    if query.state is not None:
        chosen.append(Device.revoked.is_not(None) if query.state == "revoked" else Device.revoked.is_(None))
    if query.state == "set-aside":
        aside = select(Quarantine.device_id).where(Quarantine.until > call.services.clock())
        chosen.append(Device.device_id.in_(aside))
    with call.services.database.read() as session:
        rows, after = page(
            session, Device, Device.enrolled, Device.device_id, query, *where, chosen=chosen, newest_first=True
        )
        return DevicePage(items=_infos(session, rows, call.services.clock()), next=after)


def show_device(call: Call[None], device_id: str) -> DeviceInfo:
    """One device."""
    with call.services.database.read() as session:
        return _infos(session, [_device(session, call.identity, device_id)], call.services.clock())[0]


def revoke_device(call: Call[None], device_id: str) -> DeviceInfo:
    """Revoke a device for good. One that was revoked before stays as it is."""
    services = call.services
    now = services.clock()
    with services.database.write() as session:
        device = _device(session, call.identity, device_id, lock=True)
        if device.revoked is None:
            revoke(session, device, now)
            session.flush()
            audit.append(session, now, call.identity.actor, "device.revoke", device_id, population=device.population)
        info = _infos(session, [device], now)[0]
    # After the transaction: before it another request could put the session back into the cache.
    services.sessions.forget(device_id)
    return info


def release_device(call: Call[None], device_id: str) -> DeviceInfo:
    """Release a device that was set aside, so that rounds take it again. Other devices do not change."""
    now = call.services.clock()
    with call.services.database.write() as session:
        device = _device(session, call.identity, device_id, lock=True)
        release(session, device, call.identity.actor, now)
        return _infos(session, [device], now)[0]


def _device(session: Session, identity: Identity, device_id: str, *, lock: bool = False) -> Device:
    device = session.get(Device, device_id, with_for_update=LOCKED if lock else None)
    if device is None or not identity.may(device.population):
        raise refuse(404, f"no device {device_id}")
    return device


def _infos(session: Session, devices: Sequence[Device], now: float) -> list[DeviceInfo]:
    ids = [device.device_id for device in devices]

    def counts(table: type[DeviceKey] | type[Fault]) -> dict[str, int]:
        numbers = select(table.device_id, func.count()).where(table.device_id.in_(ids)).group_by(table.device_id)
        return {row[0]: row[1] for row in session.execute(numbers)}

    seen = select(CheckInRow.device_id, CheckInRow.last_seen).where(CheckInRow.device_id.in_(ids))
    last_seen = {row.device_id: row.last_seen for row in session.execute(seen)}
    keys, faults = counts(DeviceKey), counts(Fault)
    aside = select(Quarantine).where(Quarantine.device_id.in_(ids), Quarantine.until > now)
    quarantines = {row.device_id: row for row in session.scalars(aside)}
    suspects = {row.device_id: row for row in session.scalars(select(Suspect).where(Suspect.device_id.in_(ids)))}
    # Only rounds of tasks without an eligibility count: others would tell which expressions are true for this device.
    open_to_all = (
        select(Participant.device_id, func.count())
        .join(Round, Round.round_id == Participant.round_id)
        .join(Task, Task.task_id == Round.task_id)
        .where(Participant.device_id.in_(ids), Task.eligibility == "")
        .group_by(Participant.device_id)
    )
    rounds = {row[0]: row[1] for row in session.execute(open_to_all)}
    return [
        DeviceInfo(
            device_id=each.device_id,
            population=each.population,
            kind=each.kind,  # type: ignore[arg-type]
            state="active" if each.revoked is None else "revoked",
            enrolled=each.enrolled,
            last_seen=last_seen.get(each.device_id),
            revoked=each.revoked,
            rotations=keys[each.device_id] - 1,
            rounds=rounds.get(each.device_id, 0),
            faults=faults.get(each.device_id, 0),
            quarantine=_quarantine(quarantines.get(each.device_id)),
            suspicion=_suspicion(suspects.get(each.device_id)),
        )
        for each in devices
    ]


def _quarantine(row: Quarantine | None) -> QuarantineInfo | None:
    if row is None:
        return None
    return QuarantineInfo(**{name: getattr(row, name) for name in QuarantineInfo.__struct_fields__})


def _suspicion(row: Suspect | None) -> SuspicionInfo | None:
    if row is None:
        return None
    return SuspicionInfo(rounds=row.rounds, spoiled=row.spoiled, odds=Score(tuple(row.logs)).odds)


ROUTES = (
    Route("GET", "/v1/devices", READ, list_devices, response=DevicePage, query=DeviceQuery),
    Route("GET", "/v1/devices/<id:device_id>", READ, show_device, response=DeviceInfo),
    Route("POST", "/v1/devices/<id:device_id>/revoke", OPERATOR, revoke_device, response=DeviceInfo),
    Route("POST", "/v1/devices/<id:device_id>/release", OPERATOR, release_device, response=DeviceInfo),
)
