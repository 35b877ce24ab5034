"""How a task's rounds go, as one answer: those that run, those that ended last, and where the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.protocol.operator.progress import ModelPlace, RegisteredVersion, RoundProgress, TaskProgress
from archipel.protocol.operator.results import RoundResult
from archipel.protocol.operator.tasks import FaultInfo
from archipel.server.database.fault_tables import Fault, Quarantine
from archipel.server.database.registry_tables import Model, ModelVersion
from archipel.server.database.tables import Blob, Round, Task, Version
from archipel.server.database.task_requests import request_of
from archipel.server.devices.smallest_answer import hides, rename_devices
from archipel.server.devices.spoiler_search import describe
from archipel.server.rounds.machine import RULES, required
from archipel.server.rounds.progress.funnel import Funnel, in_sum, present, read_funnels, steps
from archipel.server.rounds.progress.missing import last_asked, read_missing
from archipel.server.rounds.progress.results import means_by_name, spread_by_name
from archipel.server.rounds.refusals import refusals_of_rounds
from archipel.server.rounds.waiting import last_failure, shown_waiting, under_way
from archipel.server.settings import Settings
from archipel.server.storage.blob_rows import deleted_weights


def task_progress(
    session: Session, task: Task, *, settings: Settings, now: float, operates: bool, newest: int
) -> TaskProgress:
    """Read how the task's rounds go.

    Arguments:
        session: A reading transaction.
        task: The task, in any state.
        settings: The server's; `smallest_answer` bounds what is told of devices that an expression chose.
        now: Unix seconds.
        operates: Whether the reader may create such tasks; only they are told why an expression finds no devices.
        newest: Of how many ended rounds to tell.
    """
    mine = select(Round).where(Round.task_id == task.task_id)
    running = session.scalars(mine.where(Round.ended.is_(None)).order_by(Round.started, Round.round_id)).all()
    ended = session.scalars(
        mine.where(Round.ended.is_not(None)).order_by(Round.ended.desc(), Round.round_id.desc()).limit(newest)
    ).all()
    told = _rounds(session, task, [*running, *ended], settings, now)
    window, smallest = settings.check_in_window, settings.smallest_answer
    _, reasons = shown_waiting(session, task, operates=operates, now=now, window=window, smallest=smallest)
    return TaskProgress(
        task_id=task.task_id,
        name=request_of(task).name,
        population=task.population,
        kind=task.kind,  # type: ignore[arg-type]
        privacy=task.privacy,  # type: ignore[arg-type]
        mode=task.mode,  # type: ignore[arg-type]
        state=task.state,  # type: ignore[arg-type]
        reason=task.reason,
        rounds=request_of(task).rounds,
        rounds_committed=task.rounds_committed,
        failed_rounds=task.failed_rounds,
        spoiled_rounds=task.spoiled_rounds,
        waiting_for=reasons,
        under_way=under_way(session, task, now=now, window=window, smallest=smallest) if task.live else "",
        last_failure=last_failure(session, task),
        search=describe(session, task),
        running=told[: len(running)],
        newest=told[len(running) :],
        model=_model(session, task),
        created=task.created,
        ended=task.ended,
        now=now,
    )


def _rounds(
    session: Session, task: Task, rounds: Sequence[Round], settings: Settings, now: float
) -> list[RoundProgress]:
    if not rounds:
        return []
    ids = [row.round_id for row in rounds]
    funnels, refused = read_funnels(session, task, rounds), refusals_of_rounds(session, ids)
    faults: dict[str, dict[str, str]] = {}
    noted = select(Fault).where(Fault.round_id.in_(ids)).order_by(Fault.device_id, Fault.reason)
    for fault in session.scalars(noted):
        of_round = faults.setdefault(fault.round_id, {})
        earlier = of_round.get(fault.device_id)
        of_round[fault.device_id] = fault.reason if earlier is None else f"{earlier}; {fault.reason}"
    aside: dict[str, list[str]] = {}
    quarantined = select(Quarantine.round_id, Quarantine.device_id).where(Quarantine.round_id.in_(ids))
    for of, device_id in session.execute(quarantined.order_by(Quarantine.device_id)):
        aside.setdefault(of, []).append(device_id)
    evaluations = {each.evaluates: each for each in session.scalars(select(Task).where(Task.evaluates.in_(ids)))}
    of_evaluations = select(Round.task_id, Round.result).where(
        Round.task_id.in_([each.task_id for each in evaluations.values()]), Round.phase == "committed"
    )
    found = {row.task_id: _result(row.result) for row in session.execute(of_evaluations)} if evaluations else {}
    made = []
    for row in rounds:
        evaluation = evaluations.get(row.round_id)
        evaluated = None if evaluation is None else found.get(evaluation.task_id)
        wrong = (faults.get(row.round_id, {}), aside.get(row.round_id, []))
        told = _round(
            session, task, row, funnels[row.round_id], wrong, refused.get(row.round_id, {}), evaluated, settings, now
        )  # fmt: skip
        state = None if evaluation is None else evaluation.state
        made.append(msgspec.structs.replace(told, evaluation_state=state))
    return made


def _round(
    session: Session,
    task: Task,
    row: Round,
    funnel: Funnel,
    wrong: tuple[Mapping[str, str], Sequence[str]],
    refused: dict[str, int],
    evaluated: RoundResult | None,
    settings: Settings,
    now: float,
) -> RoundProgress:
    smallest = settings.smallest_answer
    counts = None
    if row.ended is None:
        counts = present(session, row, task, now=now, window=settings.check_in_window, smallest=smallest)
    hidden = hides(task.eligibility, smallest)

    def shown(text: str) -> str:
        # A fault's text may name the device that showed it.
        return rename_devices(text, settings.pseudonym_key, row.round_id) if hidden else text

    faults = {device_id: shown(reason) for device_id, reason in wrong[0].items()}
    asked = last_asked(row, task, list(funnel.sent))
    missing, devices = read_missing(session, row, task, asked, faults, settings)
    waits = row.ended is None and RULES[row.phase].waits_for != "work"
    result = _result(row.result)
    return RoundProgress(
        round_id=row.round_id,
        number=row.number,
        part_of=row.part_of,
        outcome="running" if row.ended is None else "spoiled" if row.spoiled else row.phase,  # type: ignore[arg-type]
        phase=row.phase,  # type: ignore[arg-type]
        phase_ends=row.phase_ends,
        needed=required(task, RULES[row.phase]) if waits else None,
        reason=row.reason,
        phases=steps(row, task, funnel, counts, now),
        assigned=funnel.assigned,
        in_sum=in_sum(row, task, funnel),
        left=funnel.left,
        excluded=funnel.excluded,
        missing=missing,
        missing_devices=devices,
        # Sorted by what is shown: the order of the true ids would tell whose pseudonym is whose.
        faults=sorted(
            (FaultInfo(device_id=shown(device_id), reason=reason) for device_id, reason in faults.items()),
            key=lambda each: each.device_id,
        ),
        set_aside=sorted(map(shown, wrong[1])),
        refused=refused,
        bytes_up=funnel.bytes_up,
        bytes_down=funnel.bytes_down,
        metrics=means_by_name(task.kind, result) | means_by_name("evaluation", evaluated),
        distributions=spread_by_name(result) | spread_by_name(evaluated),
        clamped={} if result is None else dict(result.clamped),
        clipped=None if result is None else result.clipped,
        evaluation_state=None,
        weights_out=row.weights_out,
        started=row.started,
        ended=row.ended,
        seconds=max(0.0, (row.ended or now) - row.started),
    )


def _result(stored: object) -> RoundResult | None:
    return None if stored is None else msgspec.convert(stored, RoundResult)


def _model(session: Session, task: Task) -> ModelPlace | None:
    if task.kind != "training" or task.model is None:
        return None
    newest = select(Version.number).where(Version.task_id == task.task_id).order_by(Version.number.desc()).limit(1)
    size = session.scalar(select(Blob.size).where(Blob.digest == task.model, Blob.kind == "weights"))
    named = (
        select(ModelVersion.model, ModelVersion.number, Model.promoted)
        .join(Model, Model.name == ModelVersion.model)
        .where(ModelVersion.task_id == task.task_id, ModelVersion.weights == task.model)
        .order_by(ModelVersion.model, ModelVersion.number)
    )
    return ModelPlace(
        weights=task.model,
        number=session.scalar(newest) or 0,
        path=f"/v1/blobs/{task.model}",
        bytes=size,
        deleted=deleted_weights(session, [task.model]).get(task.model, (None, ""))[0],
        registered=[
            RegisteredVersion(model=row.model, version=row.number, promoted=row.promoted == row.number)
            for row in session.execute(named)
        ],
    )
