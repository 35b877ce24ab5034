"""The device whose update is the root of a training by FLTrust: the operator runs it on examples that the operator
trusts.

It has a seat in every round of its training, beside those of the cohort. Its update is what the others are compared
with, and is not one of those that are averaged; so it counts neither towards `goal` nor towards `min_cohort`. No round
ends well without it. A training whose root device is revoked has lost what it trusted, and ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from sqlalchemy import Select, false, or_, select
from sqlalchemy.orm import Session

from archipel.errors import ServerError
from archipel.protocol.operator.tasks import TaskRequest
from archipel.server.database.fault_tables import Quarantine
from archipel.server.database.tables import UPDATE_PHASES, Answer, Device, Participant, Round, Task


@dataclass(frozen=True)
class RootStanding:
    """Where a round's root device stands. A round of a training without one lacks nothing.

    `here`: it waits for its seat, or has sent its update. `late` says, as the reason of a round that fails, what it has
    not done by the deadline; `gone` why it never will. They do not name the device: a round's reason is told to its
    devices, and none of them has to know whom to imitate or to take over.
    """

    here: bool = True
    late: str = ""
    gone: str = ""

    def lack(self, *, enough: bool) -> str:
        """The reason why the round fails, if it is the root device's doing. `enough`: the others are enough."""
        return self.gone or (self.late if enough and not self.here else "")


NO_ROOT = RootStanding()


class _Counts(Protocol):
    """machine.Counts."""

    @property
    def expected(self) -> int: ...
    @property
    def answered(self) -> int: ...
    @property
    def left(self) -> int: ...


C = TypeVar("C", bound=_Counts)


def check_root_device(session: Session, request: TaskRequest, *, now: float) -> None:
    """Raises ServerError unless the device that the task's rule takes as its root can be in the task's rounds."""
    root = request.aggregation.root
    if not root:
        return
    device, aside = session.get(Device, root), session.get(Quarantine, root)
    # One answer for both, so that nobody learns of another population's devices.
    if device is None or device.population != request.population or device.kind != "device":
        raise ServerError(f"aggregation.root: no device {root} in population {request.population!r}")
    if device.revoked is not None:
        raise ServerError(f"aggregation.root: device {root} was revoked; name one that can take part")
    if aside is not None and aside.until > now:
        raise ServerError(f"aggregation.root: device {root} is set aside; release it first, or name another one")


def roots_of_trainings(task: Task) -> Select[str]:
    """A query for the ids of devices that get no ordinary seat in the rounds of a training: its own root device, and
    those of the population's other running trainings, whose rounds would otherwise wait for them. Queries ask all."""
    kept = or_(Task.state == "running", Task.task_id == task.task_id)
    query = select(Task.root).where(Task.root.is_not(None), Task.population == task.population, kept)
    if task.kind != "training":
        query = query.where(false())
    return query  # type: ignore[return-value]  # no NULL is among them


def revoked_root(session: Session, task: Task) -> str:
    """Why the training cannot go on, if its root device was revoked; else empty."""
    if task.root is None or session.get_one(Device, task.root).revoked is None:
        return ""
    return "the task's root device was revoked"


def waiting_root(session: Session, task: Task, *, waits: bool) -> RootStanding:
    """Where the root device stands before its round begins; `waits`: it may be given its seat now."""
    late = "the task's root device does not wait for a round, at the deadline of phase assigning"
    return RootStanding(waits, late, revoked_root(session, task))


def beside_root(session: Session, current: Round, task: Task, counts: C) -> C:
    """The counts of a round that collects updates without its root device, and where that stands."""
    seat = session.get_one(Participant, (current.round_id, task.root))
    sent = select(Answer.device_id).where(Answer.of(current.round_id, task.root), Answer.phase.in_(UPDATE_PHASES))
    here = session.scalar(sent) is not None
    left = seat.left is not None and not here
    root = RootStanding(
        here,
        f"the task's root device has sent no update, at the deadline of phase {current.phase}",
        revoked_root(session, task) or ("the task's root device left the round" if left else ""),
    )
    return replace(
        counts,  # type: ignore[type-var]
        expected=counts.expected - (not left), answered=counts.answered - here, left=counts.left - left, root=root,
    )  # fmt: skip
