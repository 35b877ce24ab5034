"""Rounds as people see them: the participants, how far each came, and the result."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.protocol.operator.results import RoundResult
from archipel.protocol.operator.tasks import FaultInfo, ParticipantInfo, ResultQuery, RoundInfo, RoundPage
from archipel.server.database.fault_tables import Fault, Quarantine
from archipel.server.database.tables import UPDATE_PHASES, Answer, Participant, Round, Task
from archipel.server.devices.smallest_answer import hides, pseudonym, rename_devices
from archipel.server.http.api.tasks import find_task
from archipel.server.http.paging import page
from archipel.server.http.problems import refuse
from archipel.server.http.routes import READ, Call, Route
from archipel.server.rounds.machine import ORDER
from archipel.server.rounds.refusals import refusals_of_rounds
from archipel.server.settings import Settings

COLLECTING = (*UPDATE_PHASES, "buffering")


def list_rounds(call: Call[None], task_id: str) -> RoundPage:
    """The task's rounds, oldest first unless asked otherwise, with how far each participant came."""
    with call.services.database.read() as session:
        task = find_task(session, call.identity, task_id)
        rounds, after = page(
            session, Round, Round.started, Round.round_id, call.query, Round.task_id == task_id,
            newest_first=call.query.newest_first,
        )  # fmt: skip
        return RoundPage(items=_infos(session, task, rounds, call.services.settings), next=after)


def show_round(call: Call[None], round_id: str) -> RoundInfo:
    """One round, with how far each participant came."""
    with call.services.database.read() as session:
        row = session.get(Round, round_id)
        task = None if row is None else session.get_one(Task, row.task_id)
        if row is None or task is None or not call.identity.may(task.population):
            raise refuse(404, f"no round {round_id}")
        return _infos(session, task, [row], call.services.settings)[0]


def _infos(session: Session, task: Task, rounds: Sequence[Round], settings: Settings) -> list[RoundInfo]:
    shown = [row.round_id for row in rounds]
    survivors: dict[str, list[str]] = {}
    phases: dict[tuple[str, str], set[str]] = {}
    sizes: dict[tuple[str, str], int] = {}
    left: dict[tuple[str, str], bool] = {}
    assigned = select(Participant.round_id, Participant.device_id, Participant.left)
    for row in session.execute(assigned.where(Participant.round_id.in_(shown)).order_by(Participant.device_id)):
        # A phase in which nothing is sent, so there is no answer for it; every participant has reached it.
        phases[row.round_id, row.device_id] = {"assigning"}
        left[row.round_id, row.device_id] = row.left is not None
    if task.buffered:  # the survivors are those whose updates are in the buffer, whichever round they were sent for
        folded = select(Answer.folded_into, Answer.device_id).where(Answer.folded_into.in_(shown))
        for into, device_id in session.execute(folded.order_by(Answer.device_id)):
            survivors.setdefault(into or "", []).append(device_id)
    sent = select(Answer.round_id, Answer.device_id, Answer.phase, Answer.size)
    for answer in session.execute(sent.where(Answer.round_id.in_(shown))):
        key = (answer.round_id, answer.device_id)
        phases[key].add(answer.phase)
        sizes[key] = sizes.get(key, 0) + answer.size
    participants: dict[str, list[ParticipantInfo]] = {}
    for (round_id, device_id), reached in phases.items():
        furthest = max(reached, key=ORDER.__getitem__)
        participants.setdefault(round_id, []).append(
            ParticipantInfo(
                device_id=device_id,
                furthest=furthest,  # type: ignore[arg-type]
                left=left[round_id, device_id],
                bytes_uploaded=sizes.get((round_id, device_id), 0),
            )
        )
        if reached & set(UPDATE_PHASES) and not task.buffered and device_id != task.root:
            survivors.setdefault(round_id, []).append(device_id)
    refused = refusals_of_rounds(session, shown)
    faults: dict[str, list[FaultInfo]] = {}
    noted = select(Fault).where(Fault.round_id.in_(shown)).order_by(Fault.device_id, Fault.reason)
    for fault in session.scalars(noted):
        faults.setdefault(fault.round_id, []).append(FaultInfo(device_id=fault.device_id, reason=fault.reason))
    aside: dict[str, list[str]] = {}
    quarantined = select(Quarantine.round_id, Quarantine.device_id).where(Quarantine.round_id.in_(shown))
    for shown_by, device_id in session.execute(quarantined.order_by(Quarantine.device_id)):
        aside.setdefault(shown_by, []).append(device_id)
    if hides(task.eligibility, settings.smallest_answer):
        # Under their own ids, being in the round would tell about each device that the expression is true for it.
        for round_id, present in participants.items():
            renamed = [
                msgspec.structs.replace(p, device_id=pseudonym(settings.pseudonym_key, round_id, p.device_id))
                for p in present
            ]
            # Sorted anew: the order of the true ids would tell whose pseudonym is whose.
            participants[round_id] = sorted(renamed, key=lambda each: each.device_id)
        survivors = {
            of: sorted(pseudonym(settings.pseudonym_key, of, device) for device in ids) for of, ids in survivors.items()
        }
        faults = {
            of: [
                FaultInfo(
                    device_id=pseudonym(settings.pseudonym_key, of, each.device_id),
                    # A fault may name the device that showed it.
                    reason=rename_devices(each.reason, settings.pseudonym_key, of),
                )
                for each in noted_faults
            ]
            for of, noted_faults in faults.items()
        }
        aside = {of: sorted(pseudonym(settings.pseudonym_key, of, each) for each in ids) for of, ids in aside.items()}
    return [
        _round_info(
            row,
            participants.get(row.round_id, []),
            survivors.get(row.round_id, []),
            faults.get(row.round_id, []),
            aside.get(row.round_id, []),
            refused.get(row.round_id, {}),
        )
        for row in rounds
    ]


def _round_info(
    row: Round,
    participants: list[ParticipantInfo],
    survivors: list[str],
    faults: list[FaultInfo],
    aside: list[str],
    refused: dict[str, int],
) -> RoundInfo:
    # Before that the set may still change. A failed round has no survivors.
    settled = row.phase != "failed" and ORDER[row.phase] > ORDER["masking"] and row.phase not in COLLECTING
    return RoundInfo(
        round_id=row.round_id,
        task_id=row.task_id,
        number=row.number,
        phase=row.phase,  # type: ignore[arg-type]
        phase_ends=row.phase_ends,
        reason=row.reason,
        participants=participants,
        survivors=survivors if settled else [],
        weights_in=row.weights_in,
        weights_out=row.weights_out,
        weight_sum=row.weight_sum,
        spoiled=row.spoiled,
        faults=faults,
        set_aside=aside,
        suspects=_suspects(row),
        step_norm=row.step_norm,
        step_scale=row.step_scale,
        result=None if row.result is None else msgspec.convert(row.result, RoundResult),
        refused=refused,
        deadlines=row.deadlines or {},
        part_of=row.part_of,
        started=row.started,
        ended=row.ended,
    )


def _suspects(row: Round) -> int:
    suspects = (row.draw or {}).get("suspects", 0)  # a live round has their ids, one that has ended their number
    return suspects if isinstance(suspects, int) else len(suspects)


ROUTES = (
    Route("GET", "/v1/tasks/<id:task_id>/rounds", READ, list_rounds, response=RoundPage, query=ResultQuery),
    Route("GET", "/v1/rounds/<id:round_id>/participants", READ, show_round, response=RoundInfo),
)
