"""Models and their versions as the API shows them. A page takes the same few queries however many items it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from sqlalchemy import Executable, and_, func, select
from sqlalchemy.orm import Session

from archipel.bundle import Lineage
from archipel.protocol.operator.registry import (
    MAX_EVALUATIONS,
    Evaluation,
    ModelInfo,
    VersionInfo,
    VersionState,
)
from archipel.protocol.operator.results import RoundResult
from archipel.server.database.registry_tables import Model, ModelVersion, Rollout
from archipel.server.database.tables import BundleRow, CheckInRow, Round, Task, Version
from archipel.server.devices.smallest_answer import round_down
from archipel.server.registry.expiry import expiry, why_not_offered
from archipel.server.storage.blob_rows import deleted_weights

COUNTED_SECONDS = 30 * 86400.0
"""How long after its last check-in a device still counts among those that fetched a version."""


class _Origin(msgspec.Struct):
    """The one field that is read of a manifest. The whole manifest was checked when the bundle was uploaded."""

    lineage: Lineage = Lineage()


_origin = msgspec.json.Decoder(_Origin)


def describe_models(session: Session, models: Sequence[Model], now: float) -> list[ModelInfo]:
    """Describe the models, in the same order."""
    names = [each.name for each in models]
    highest = select(ModelVersion.model, func.max(ModelVersion.number).label("newest"))
    rows = session.execute(highest.where(ModelVersion.model.in_(names)).group_by(ModelVersion.model))
    newest = {row.model: row.newest for row in rows}
    live = {row.model: row.rollout_id for row in session.execute(_live(names))}
    promoted = (
        select(Model.name, Model.promoted, BundleRow.manifest)
        .join(ModelVersion, and_(ModelVersion.model == Model.name, ModelVersion.number == Model.promoted))
        .join(BundleRow, BundleRow.digest == ModelVersion.bundle)
        .where(Model.name.in_(names))
    )
    withheld = {row.name: why_not_offered(row.promoted, expiry(row.manifest), now) for row in session.execute(promoted)}
    return [
        ModelInfo(
            name=each.name,
            population=each.population,
            promoted=each.promoted,
            newest=newest.get(each.name),
            rollout_id=live.get(each.name),
            not_offered=withheld.get(each.name, ""),
            keep_versions=each.keep_versions,
            keep_days=each.keep_days,
            created=each.created,
        )
        for each in models
    ]


def describe_versions(
    session: Session, model: Model, versions: Sequence[ModelVersion], now: float, smallest: int
) -> list[VersionInfo]:
    """Describe the model's versions, in the same order. `smallest`: the setting `smallest_answer`."""
    bundles = select(BundleRow.digest, BundleRow.manifest).where(
        BundleRow.digest.in_({each.bundle for each in versions})
    )
    manifests = {row.digest: row.manifest for row in session.execute(bundles)}
    lineages = {digest: _origin.decode(manifest).lineage for digest, manifest in manifests.items()}
    tasks = {each.task_id for each in versions if each.task_id is not None}
    trained = {
        (row.task_id, row.number): row for row in session.scalars(select(Version).where(Version.task_id.in_(tasks)))
    }
    deleted = deleted_weights(session, [each.weights for each in versions])
    live = session.execute(_live([model.name])).one_or_none()
    fetched: dict[int, int | None] = dict(_fetched(session, model, [each.number for each in versions], now))
    asked = select(Rollout.eligibility).where(Rollout.model == model.name, Rollout.eligibility != "").limit(1)
    if smallest > 1 and session.scalar(asked) is not None:
        # The devices that fetched a candidate are those for which the rollout's expression is true, so an exact count
        # would tell about single devices' attributes.
        fetched = {each.number: round_down(fetched.get(each.number) or 0, smallest) for each in versions}

    # A promoted or offered version is shown as that, whatever else holds: it cannot be rejected meanwhile.
    def state(version: ModelVersion) -> VersionState:
        if version.number == model.promoted:
            return "promoted"
        if live is not None and version.number == live.version:
            return "candidate"
        return "registered" if version.rejected is None else "rejected"

    described = []
    for version in versions:
        lineage, origin = lineages[version.bundle], trained.get((version.task_id or "", version.task_version or 0))
        gone = deleted.get(version.weights or "", (None, ""))
        described.append(
            VersionInfo(
                model=model.name,
                number=version.number,
                digest=version.digest,
                state=state(version),
                reason=version.reason,
                bundle=version.bundle,
                weights=version.weights,
                parent=version.parent,
                task_id=version.task_id,
                task_version=version.task_version,
                round_id=None if origin is None else origin.round_id,
                cohort=None if origin is None else origin.cohort,
                downloaded=fetched.get(version.number, 0),
                not_after=expiry(manifests[version.bundle]),
                weights_deleted=gone[0],
                deleted_why=gone[1],
                created=version.created,
                bundle_parent=lineage.parent,
                recipe=list(lineage.recipe),
                bundle_metrics=dict(lineage.metrics),
            )
        )
    return described


def evaluations_of(session: Session, model: Model, version: ModelVersion) -> list[Evaluation]:
    """The results of evaluations of this version by devices of the model's population, newest first."""
    # Any evaluation of the same bundle and weights counts, whichever task or rollout asked for it.
    same_weights = Task.weights.is_(None) if version.weights is None else Task.weights == version.weights
    query = (
        select(Round.task_id, Round.round_id, Round.result, Round.ended)
        .join(Task)
        .where(
            Task.kind == "evaluation",
            Task.bundle == version.bundle,
            Task.population == model.population,
            same_weights,
            Round.phase == "committed",
            # What a round for the upstream server has measured is for that server to tell.
            Task.upstream.is_(None),
        )
        .order_by(Round.ended.desc(), Round.round_id)
        .limit(MAX_EVALUATIONS)
    )
    evaluations = []
    for row in session.execute(query):
        result = msgspec.convert(row.result, RoundResult)
        evaluations.append(
            Evaluation(
                task_id=row.task_id,
                round_id=row.round_id,
                devices=result.devices,
                examples=result.examples or 0.0,
                metrics=result.metrics,
                distributions=result.distributions,
                clamped=result.clamped,
                ended=row.ended,
            )
        )
    return evaluations


def _live(models: Iterable[str]) -> Executable:
    columns = select(Rollout.model, Rollout.rollout_id, Rollout.version)
    return columns.where(Rollout.model.in_(models), Rollout.ended.is_(None))


def _fetched(session: Session, model: Model, numbers: Sequence[int], now: float) -> dict[int, int]:
    """How many devices reported each version as the one they fetched last. It is not known which of them run it."""
    reported = CheckInRow.versions[model.name].as_integer()
    query = (
        select(reported.label("number"), func.count().label("devices"))
        .where(
            CheckInRow.population == model.population,
            CheckInRow.last_seen > now - COUNTED_SECONDS,
            reported.in_(numbers),
        )
        .group_by(reported)
    )
    return {row.number: row.devices for row in session.execute(query)}
