"""Which devices a round misses, and why: of each the phase that it reached, when, and its bytes, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.orm import Session

from archipel.protocol.messages import over_neighbours
from archipel.protocol.operator.progress import MOST_MISSING, MissingDevice
from archipel.server.database.tables import PHASES, UPDATE_PHASES, Answer, Participant, Round, Task
from archipel.server.database.task_requests import request_of
from archipel.server.devices.smallest_answer import hides, pseudonym
from archipel.server.rounds.machine import ORDER, RULES, deadline
from archipel.server.settings import Settings


def last_asked(current: Round, task: Task, answered: Sequence[str]) -> str | None:
    """The last phase in which devices were to send something, as far as the round came; None if there was none.

    `answered`: the phases in which any did.
    """
    if task.buffered:
        return "updating"
    begun = {*(current.phases or {}), *answered, current.phase}
    asked = [phase for phase in begun if phase in PHASES]
    return max(asked, key=ORDER.__getitem__, default=None)


def read_missing(
    session: Session, current: Round, task: Task, asked: str | None, faults: Mapping[str, str], settings: Settings
) -> tuple[int, list[MissingDevice]]:
    """How many of the round's devices have not sent what phase `asked` asks for, and the first of them.

    `faults`: what devices did wrong in the round, by device. Where the task's eligibility reads attributes, devices go
    by the pseudonyms that they have in this round, without the times of their answers, by which they could be told.
    """
    if asked is None:
        return 0, []
    lacks: tuple[ColumnElement[bool], ...] = (
        Participant.round_id == current.round_id,
        ~exists().where(
            Answer.round_id == current.round_id, Answer.phase == asked, Answer.device_id == Participant.device_id
        ),
    )
    if task.root is not None:
        lacks = (*lacks, Participant.device_id != task.root)
    number = session.scalar(select(func.count()).select_from(Participant).where(*lacks)) or 0
    if not number:
        return 0, []
    hidden = hides(task.eligibility, settings.smallest_answer)
    query = select(Participant).where(*lacks).order_by(Participant.device_id)
    # In the order of their pseudonyms, which only whoever has the server's key can compute: so of all of them.
    rows = session.scalars(query if hidden else query.limit(MOST_MISSING)).all()
    key, of = settings.pseudonym_key, current.round_id
    named = [(pseudonym(key, of, row.device_id) if hidden else row.device_id, row) for row in rows]
    shown = sorted(named, key=lambda each: each[0])[:MOST_MISSING]
    sent: dict[str, list[Answer]] = {}
    wanted = [row.device_id for _, row in shown]
    answers = select(Answer).where(
        Answer.round_id == current.round_id, Answer.phase.in_(PHASES), Answer.device_id.in_(wanted)
    )
    for answer in session.scalars(answers):
        sent.setdefault(answer.device_id, []).append(answer)
    return number, [_device(current, task, asked, name, row, sent, faults, hidden) for name, row in shown]


def _device(
    current: Round,
    task: Task,
    asked: str,
    name: str,
    row: Participant,
    sent: Mapping[str, list[Answer]],
    faults: Mapping[str, str],
    hidden: bool,
) -> MissingDevice:
    answers = sent.get(row.device_id, [])
    last = max(answers, key=lambda each: ORDER[each.phase], default=None)
    furthest = "assigning" if last is None else last.phase
    return MissingDevice(
        device_id=name,
        furthest=furthest,  # type: ignore[arg-type]
        answered=None if last is None or hidden else last.received,
        bytes_up=sum(each.size for each in answers),
        in_sum=current.phase != "failed" and any(each.phase in UPDATE_PHASES for each in answers),
        reason=_reason(current, task, asked, furthest, row, faults.get(row.device_id, "")),
    )


def _reason(current: Round, task: Task, asked: str, furthest: str, row: Participant, fault: str) -> str:
    if fault:
        return fault
    if row.left is not None:
        return "it left the round"
    if row.excluded is not None:
        few = over_neighbours(request_of(task).protocol)
        return "too few hold its shares" if few else "a peer showed that it was sent no shares"
    if current.ended is None and (task.buffered or (current.phase == asked and RULES[asked].previous == furthest)):
        return "it has not answered yet"
    if _cut_short(current, task, asked) and (task.privacy == "plain" or RULES[asked].previous == furthest):
        return "the round ended before it answered"
    following = next((each for each, rule in RULES.items() if rule.previous == furthest and _of(task, each)), asked)
    return f"it sent nothing in phase {following}"


def _cut_short(current: Round, task: Task, asked: str) -> bool:
    """Whether the round failed before the time of phase `asked` was over, as when too many others have left."""
    began = (current.phases or {}).get(asked)
    if current.phase != "failed" or current.ended is None or began is None or task.buffered:
        return False
    return current.ended < began + deadline(task, asked, current)


def _of(task: Task, phase: str) -> bool:
    """Whether rounds of the task have the phase."""
    return (phase == "updating") == (task.privacy == "plain")
