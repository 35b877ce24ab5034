"""Which blobs nothing needs any more, by the retention rule of the server and of each model.

A rule keeps the newest `versions` versions and those of the last `days` days. It is that of each model in which the
weights are registered, and of the server for all others. Whatever the rule says, these stay:

- what is promoted, and every version that a rollback can go back to;
- both versions of a rollout that has not ended;
- what a task that has not ended works with: its weights and states, and those of its rounds, also for devices that
  still work for a round that is over.

States of strategies go with the weights of their version, broadcasts when their rounds are over. Bundles stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, exists, false, func, or_, select, true, tuple_
from sqlalchemy.orm import Session, aliased

from archipel.server.database.registry_tables import Model, ModelVersion, Promotion, Rollout
from archipel.server.database.site_tables import SiteRound
from archipel.server.database.tables import LIVE, Blob, Round, Task, Version
from archipel.server.database.task_requests import read_plan
from archipel.server.rounds.at_work import rounds_at_work
from archipel.server.settings import Settings

KINDS = ("weights", "state", "broadcast")
"""The kinds of blobs that retention deletes."""
DAY = 86400.0
_UNENDED = ("proposed", *LIVE)


@dataclass(frozen=True)
class Rule:
    """Keep the newest `versions` (0: all) and those of the last `days`."""

    versions: int
    days: float

    @classmethod
    def of(cls, settings: Settings) -> Rule:
        """The server's."""
        return cls(settings.keep_versions, settings.keep_days)

    def __str__(self) -> str:
        return f"the newest {self.versions} versions and those of the last {self.days:g} days are kept"


@dataclass(frozen=True)
class Unneeded:
    """A blob that may go: `size` in bytes, `created` in Unix seconds."""

    digest: str
    kind: str
    size: int
    created: float


def find_unneeded(
    session: Session, rule: Rule, now: float, *, among: Collection[tuple[str, str]] | None = None, limit: int = -1
) -> list[Unneeded]:
    """The blobs that may go, oldest first, or those of them `among` these pairs of digest and kind (None: all).

    Where it decides, the caller has locked the blobs' rows: then no transaction can name one of them meanwhile.
    """
    query = select(Blob.digest, Blob.kind, Blob.size, Blob.created).where(Blob.deleted.is_(None), _is_free(rule, now))
    if among is not None:
        query = query.where(tuple_(Blob.digest, Blob.kind).in_(list(among)))
    rows = session.execute(query.order_by(Blob.created, Blob.digest)).all()
    if not rows:
        return []
    # Read after the query above: a rollout that ends between the two promotes its version, and is seen by one of them.
    needed = _promoted(session) | _in_plans(session, now)
    found = [Unneeded(*row) for row in rows if row.digest not in needed]
    return found if limit < 0 else found[:limit]


def _is_free(rule: Rule, now: float) -> ColumnElement[bool]:
    digest, since, on = Blob.digest, now - rule.days * DAY, (true() if rule.versions else false())
    registered = exists(select(ModelVersion.number).where(ModelVersion.weights == digest))
    works = Task.state.in_(_UNENDED)
    weights = [
        or_(and_(registered, ~_kept_by_model(rule, now)), and_(~registered, on, ~_kept_by_task(rule, since))),
        ~_in_rollout(),
        ~exists(select(Task.task_id).where(works, or_(Task.weights == digest, Task.model == digest))),
        ~exists(select(Round.round_id).where(Round.ended.is_(None), Round.weights_in == digest)),
    ]
    made = aliased(Blob)
    # A state without a version is one of a robust rule.
    of_version = select(Version.number).where(Version.strategy_state == digest)
    kept = of_version.join(made, and_(made.digest == Version.weights, made.kind == "weights", made.deleted.is_(None)))
    state = [
        ~exists(kept),
        or_(exists(of_version), and_(on, Blob.created < since)),
        ~exists(select(Task.task_id).where(works, or_(Task.strategy_state == digest, Task.rule_state == digest))),
    ]
    return or_(
        and_(Blob.kind == "weights", *weights),
        and_(Blob.kind == "state", *state),
        and_(Blob.kind == "broadcast", on, Blob.created < since),
    )


def _kept_by_model(rule: Rule, now: float) -> ColumnElement[bool]:
    """Whether the rule of a model in which the weights are registered keeps them."""
    other = aliased(ModelVersion)
    newest = select(func.max(other.number)).where(other.model == ModelVersion.model).scalar_subquery()
    most, days = func.coalesce(Model.keep_versions, rule.versions), func.coalesce(Model.keep_days, rule.days)
    return exists(
        select(ModelVersion.number)
        .join(Model, Model.name == ModelVersion.model)
        .where(
            ModelVersion.weights == Blob.digest,
            or_(most == 0, ModelVersion.number > newest - most, ModelVersion.created >= now - days * DAY),
        )
    )


def _kept_by_task(rule: Rule, since: float) -> ColumnElement[bool]:
    """Whether the server's rule keeps the weights as a version of a training, or those of another task as young."""
    other = aliased(Version)
    newest = select(func.max(other.number)).where(other.task_id == Version.task_id).scalar_subquery()
    kept = or_(Version.number > newest - rule.versions, Version.created >= since)
    return or_(Blob.created >= since, exists(select(Version.number).where(Version.weights == Blob.digest, kept)))


def _in_rollout() -> ColumnElement[bool]:
    """Whether the weights are those of a version in a rollout that has not ended."""
    number = ModelVersion.number
    both = and_(ModelVersion.model == Rollout.model, or_(number == Rollout.version, number == Rollout.baseline))
    rollouts = select(Rollout.rollout_id).join(ModelVersion, both)
    return exists(rollouts.where(Rollout.ended.is_(None), ModelVersion.weights == Blob.digest))


def _promoted(session: Session) -> set[str]:
    """Weights of the versions that are promoted, or that a rollback can go back to, however often it is repeated."""
    # The models first: on PostgreSQL an entry may be added between the two, and it must not be the one that is missing.
    models = session.execute(select(Model.name, Model.promotion)).all()
    rows = session.execute(
        select(Promotion.model, Promotion.number, Promotion.below, ModelVersion.weights).join(
            ModelVersion, and_(ModelVersion.model == Promotion.model, ModelVersion.number == Promotion.version)
        )
    )
    entries = {(row.model, row.number): row for row in rows}
    needed = set()
    for model in models:
        at = model.promotion
        while at is not None:
            entry = entries[model.name, at]
            needed.add(entry.weights)
            at = entry.below
    return needed - {None}


def _in_plans(session: Session, now: float) -> set[str]:
    """Weights and broadcasts of the rounds that devices or the coordinator still work for."""
    rounds: Sequence[Round] = session.scalars(select(Round).where(Round.round_id.in_(rounds_at_work(now)))).all()
    plans = [read_plan(each) for each in rounds]
    # An edge server works with what the plans of its upstream server name.
    wished = select(SiteRound).where(SiteRound.state.in_(("wanted", "open", "summed")))
    plans += [read_plan(each) for each in session.scalars(wished)]
    return {digest for plan in plans for digest in (plan.weights, plan.broadcast) if digest is not None}
