"""The account of what a population's devices have paid for the versions of a model, in all its tasks.

A round with noise is paid for in a transaction of its own, before the coordinator looks at its sum. So whatever
becomes of the round then, also a kill at any point, it has been paid for. A round that is aggregated again is paid for
again: its first attempt may have left a noisy model on the disk. With correlated noise it adds the same noise again,
so it has been paid for (archipel.server.rounds.noise.kept_noise); so has one whose devices add the noise, which costs
what the noise of those that were in it makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from archipel.bundle import Manifest, decode_manifest
from archipel.errors import ArchipelError, PolicyError
from archipel.privacy import Event, Repeated, read_events, spent_epsilon, write_events
from archipel.privacy.central import events_of, settle
from archipel.privacy.distributed import round_event
from archipel.protocol.messages import ServerNoise
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy, PrivacySpent
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.policy import noisy_devices
from archipel.server.audit import log as audit
from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.database.registry_tables import ModelVersion
from archipel.server.database.tables import BundleRow, Round, Task, Version
from archipel.server.database.task_requests import read_plan, request_of
from archipel.server.rounds.assigning import let_go
from archipel.server.rounds.machine import answered
from archipel.server.rounds.noise import kept_noise

if TYPE_CHECKING:
    from archipel.server.services import Services

Write = Callable[[], AbstractContextManager[Session]]
"""A writing transaction that only commits while the lease is this coordinator's."""
ACCOUNTANT = "rdp"
"""It holds for discrete noise, see archipel.privacy.accounting."""
UNIT = "a device: everything that it ever contributes, with zeros in its place in every round"
SAMPLING = (
    "none assumed: rounds take devices that check in, so each device is charged for every round; with correlated noise "
    "for every round that its separation allows"
)
TRUST = (
    "whoever reads the server's memory or disk during a round sees its sum without noise, and with correlated noise "
    "those of the task's last rounds; devices see it with noise"
)
TRUSTS = {
    "distributed": (
        "nobody sees a sum without noise; more devices than the bundle's privacy policy expects to work with the "
        "server can take theirs out of it"
    ),
    "local": (
        "nobody sees a device's update without noise; the server sees those of rounds that failed as well, which only "
        "the devices' own journals count"
    ),
}
"""Of mechanisms whose noise devices add; of others TRUST."""
COVERS = (
    "the weights of all versions, noisy counts of clipped updates, and evaluations and analyses with noise; not who "
    "took part, nor the results of other evaluations and analyses, nor failures"
)

_MOST_TOLD = 1e30
"""The largest epsilon of a plan."""

Counts = tuple[tuple[bytes, int], ...]


def settle_noise(session: Session, request: TaskRequest, manifest: Manifest) -> TaskRequest:
    """The request with its noise multiplier, which leaves room for what the model has cost before.

    Raises PolicyError where the account has no room for a single round.
    """
    noise = request.differential_privacy
    if not noise.is_private:
        return request
    before = _counts(session, request.population, manifest.name)
    settled = settle(noise, request.rounds, (*_events(before), *_evaluations(request)))
    least = manifest.privacy.noise_multiplier
    if noise.on_devices and noise.noise_multiplier is None and (settled.noise_multiplier or 0.0) < least:
        settled = msgspec.structs.replace(settled, noise_multiplier=least)
    if why := _lacking(settled, before):
        raise PolicyError(f"differential_privacy: {why}")
    return msgspec.structs.replace(request, differential_privacy=settled)


def _evaluations(request: TaskRequest) -> list[Event]:
    """What all evaluations of a training's versions will cost."""
    noise = request.evaluation_noise
    if request.evaluate_every is None or not noise.is_private:
        return []
    return events_of(noise, 0, request.rounds // request.evaluate_every)


def lacks_room(session: Session, task: Task) -> str:
    """Why the task may begin no further round: the account would hold more than the task allows. "" where it may."""
    noise = request_of(task).differential_privacy
    if not noise.is_private or noise.epsilon is None:
        return ""
    return _lacking(noise, _counts(session, task.population, _model(session, task)), _paid_for(session, task))


def charge(services: Services, write: Write, round_id: str) -> str:
    """Pay for looking at the round's sum, durably when this returns, so before anything is made of the sum.

    Returns why nobody may look at it: it cannot be paid for, or the round has ended. "" where it was paid for, or costs
    nothing.
    """
    with services.database.read() as session:
        noise = request_of(session.get_one(Task, session.get_one(Round, round_id).task_id)).differential_privacy
        drawn = not noise.draws_again and kept_noise.is_drawn(session, round_id)
    if not noise.is_private or drawn:
        return ""
    kept = None
    if noise.is_correlated:
        try:
            kept = kept_noise.draw(services, round_id)
        except ArchipelError as error:
            return f"noise: {error}"
    with write() as session:
        current = session.get_one(Round, round_id, with_for_update=True)
        task = session.get_one(Task, current.task_id, with_for_update=True)
        why = lacks_room(session, task)
        if noise.is_correlated:
            why = why or kept_noise.come_again(session, task, round_id)
        if current.phase != "aggregating":
            return "the round has ended"
        if why:
            return why
        session.add(
            PrivacyEvent(
                population=task.population,
                model=_model(session, task),
                task_id=task.task_id,
                round_id=round_id,
                event=write_events(_cost_of(session, task, current)),
                charged=services.clock(),
                noise=kept,
            )
        )
        task_id = task.task_id
    if kept is not None:
        kept_noise.forget(services, task_id, noise)
    return ""


def _cost_of(session: Session, task: Task, current: Round) -> list[Event]:
    """What looking at the round's sum costs."""
    noise = request_of(task).differential_privacy
    if not noise.on_devices:
        return events_of(noise, _paid_for(session, task))
    manifest = decode_manifest(session.get_one(BundleRow, task.bundle).manifest)
    plan, present = read_plan(current), len(answered(session, current.round_id, "masking"))
    return [round_event(plan, manifest, noisy_devices(plan, manifest.privacy, present))]


def end_spent(write: Write, task_id: str, why: str, *, now: float) -> None:
    """End a running task whose account has no room for another round: its versions stay."""
    with write() as session:
        task = session.get_one(Task, task_id, with_for_update=True)
        if task.state != "running":
            return
        task.state, task.reason, task.ended = "completed" if task.rounds_committed else "failed", why, now
        audit.append(session, now, "coordinator", "task.budget-spent", task.task_id, reason=why)
        let_go(session, task)


def state(session: Session, task: Task) -> ServerNoise | None:
    """What the plan of the task's next round says of its noise; None for a task without noise."""
    noise = request_of(task).differential_privacy
    if not noise.is_central or noise.noise_multiplier is None:
        return None
    before = _counts(session, task.population, _model(session, task))
    following = (*before, (write_events(events_of(noise, _paid_for(session, task))), 1))
    return ServerNoise(
        mechanism="correlated" if noise.is_correlated else "central",
        multiplier=noise.noise_multiplier,
        epsilon=min(_epsilon(following, noise.delta), _MOST_TOLD),
        delta=noise.delta,
    )


def spent_by(session: Session, task: Task, round_id: str | None = None) -> PrivacySpent | None:
    """What the task's model has cost so far, or had cost after that round; None for a task without noise."""
    noise = request_of(task).differential_privacy
    if not noise.is_private:
        return None
    model = _model(session, task)
    last = None
    if round_id is not None:
        last = session.scalar(select(func.max(PrivacyEvent.number)).where(PrivacyEvent.round_id == round_id)) or 0
    counts = _counts(session, task.population, model, last)
    ended = None if round_id is None else session.get_one(Round, round_id).ended
    return PrivacySpent(
        population=task.population,
        model=model,
        epsilon=_epsilon(counts, noise.delta),
        delta=noise.delta,
        releases=sum(count for _, count in counts),
        exact=_exact_sums(session, task.population, model, ended),
        accountant=ACCOUNTANT,
        unit=UNIT,
        sampling=SAMPLING,
        trust=TRUSTS.get(noise.mechanism, TRUST),
        covers=COVERS,
    )


def spent_by_version(session: Session, version: ModelVersion) -> PrivacySpent | None:
    """The same of a version in the registry: up to the round that made it, or that made what it was made from.

    None where that round had no noise, or there is none.
    """
    while True:
        if version.task_id is not None:
            trained = session.get_one(Version, (version.task_id, version.task_version))
            if trained.round_id is not None:
                return spent_by(session, session.get_one(Task, version.task_id), trained.round_id)
        # A bundle as published: it tells what the version told that it was made from. Parents were registered before.
        if version.parent is None or version.parent >= version.number:
            return None
        version = session.get_one(ModelVersion, (version.model, version.parent))


def _exact_sums(session: Session, population: str, model: str, ended: float | None) -> int:
    """How many sums of the model's tasks were released without noise, up to that time."""
    query = (
        select(func.count())
        .select_from(Round)
        .join(Task, Task.task_id == Round.task_id)
        .join(BundleRow, BundleRow.digest == Task.bundle)
        .where(
            Task.population == population,
            BundleRow.name == model,
            Round.phase == "committed",
            # A task with noise has paid for whatever it has released.
            Task.task_id.not_in(select(PrivacyEvent.task_id)),
        )
    )
    return session.scalar(query if ended is None else query.where(Round.ended <= ended)) or 0


def _paid_for(session: Session, task: Task) -> int:
    """How many of the task's sums have been paid for."""
    return session.scalar(select(func.count()).where(PrivacyEvent.task_id == task.task_id)) or 0


def _lacking(noise: DifferentialPrivacy, before: Counts, number: int = 0) -> str:
    """Why the task's sum of this number cannot be paid for."""
    if noise.epsilon is None:
        return ""
    following = (*before, (write_events(events_of(noise, number)), 1))
    cost = _epsilon(following, noise.delta)
    if cost <= noise.epsilon:
        return ""
    spent = _epsilon(before, noise.delta)
    return (
        f"the model has cost epsilon {spent:.4g} at delta {noise.delta:g} so far, another round would make it "
        f"{cost:.4g}, and {noise.epsilon:g} is allowed"
    )


def _model(session: Session, task: Task) -> str:
    return session.get_one(BundleRow, task.bundle).name


def _counts(session: Session, population: str, model: str, last: int | None = None) -> Counts:
    """The account: each event, and how often it was charged, up to the row of number `last`."""
    query = select(PrivacyEvent.event, func.count()).where(
        PrivacyEvent.population == population, PrivacyEvent.model == model
    )
    if last is not None:
        query = query.where(PrivacyEvent.number <= last)
    rows = session.execute(query.group_by(PrivacyEvent.event).order_by(PrivacyEvent.event))
    return tuple((event, count) for event, count in rows)


def _events(counts: Counts) -> list[Event]:
    found: list[Event] = []
    for data, count in counts:
        for event in read_events(data):
            one, times = (event.event, event.count) if isinstance(event, Repeated) else (event, 1)
            found.append(Repeated(event=one, count=times * count))
    return found


@lru_cache(maxsize=256)
def _epsilon(counts: Counts, delta: float) -> float:
    return spent_epsilon(_events(counts), delta, "rdp")
