"""Takes a round of the upstream server over: its task, bundle and weights, and the wish for a sum of own devices.

The uplink (archipel.edge) has verified all of it. Everything is stored before the transaction that names it,
and the transaction does the same however often it is repeated, so that a kill leaves nothing half done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.bundle import Bundle, Manifest, encode_manifest, pack
from archipel.errors import PolicyError
from archipel.protocol.messages import RoundPlan, WeightsStatement
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.policy import colluders_of, policy_of_members
from archipel.protocol.provenance import entry_hash
from archipel.protocol.sealed import Sealed, encode
from archipel.server.audit import log as audit
from archipel.server.database.site_tables import SiteRound
from archipel.server.database.tables import BundleRow, Task, WeightsEntry
from archipel.server.database.task_requests import audited
from archipel.server.devices import queries
from archipel.server.rounds import reach
from archipel.server.rounds.checks import check_task
from archipel.server.rounds.opening import new_task
from archipel.server.storage.blob_rows import record_blob

if TYPE_CHECKING:
    from archipel.server.services import Services
    from archipel.server.upstream_settings import Upstream


@dataclass(frozen=True)
class Wish:
    """A round of the upstream server: its plan, as it was sealed too, and the population of its weights log.

    `bundle`, and the files with the plan's weights and broadcast (None where it has none), are verified. `rounds`: so
    many its task asks for. `sum_by`: until when (Unix seconds) the sum is of use.
    """

    plan: RoundPlan
    sealed: Sealed
    bundle: Bundle
    weights: bytes
    broadcast: bytes | None
    root_population: str
    rounds: int
    sum_by: float


def site_request(plan: RoundPlan, manifest: Manifest, upstream: Upstream, rounds: int) -> TaskRequest:
    """The request of this server's own task for a plan of the upstream's. Raises PolicyError where it has no place."""
    levels = plan.levels - 1
    policy, sites = policy_of_members(manifest.privacy, levels), manifest.privacy.aggregators
    if sites is None:
        raise PolicyError("the bundle's privacy policy allows no rounds among edge servers (aggregators)")
    site = plan.site // upstream.cohort if levels else None
    if upstream.cohort > plan.site or site == 0:
        raise PolicyError(
            f"the upstream server takes sites of up to {plan.site} devices; make the cohort in [upstream] smaller, it "
            f"is {upstream.cohort}"
        )
    colluders = colluders_of(policy, upstream.cohort)
    # Contributors are devices; where the members are edge servers each of them counts those of its own.
    least = (sites.min_cohort if levels else max(sites.min_site_cohort, plan.min_contributors)) + colluders
    return TaskRequest(
        name=f"upstream-{plan.task_id[:8]}",
        population=upstream.population,
        bundle=plan.bundle,
        rounds=rounds,
        kind=plan.kind,
        min_cohort=max(least, upstream.min_cohort),
        cohort=upstream.cohort,
        goal=upstream.goal or None,
        levels=levels,
        site=site,
        **(_asked(plan) if plan.kind != "training" else {}),
    )


def _asked(plan: RoundPlan) -> dict[str, Any]:
    """What an evaluation or analysis asks, in the fields of a request. The weights are those of each plan."""
    return {
        "program": plan.program,
        "metrics": plan.metrics,
        "distributions": dict(plan.distributions),
        "max_examples": plan.max_examples,
        "min_contributors": plan.min_contributors or None,
    }


def take_over(services: Services, upstream: Upstream, wish: Wish) -> SiteRound:
    """Store what the wish needs besides its bundle, and the wish. Durable when it returns; returns its row.

    Raises PolicyError or another ArchipelError where this server's own devices could not take part.
    """
    plan, manifest = wish.plan, wish.bundle.manifest
    request = check_task(
        site_request(plan, manifest, upstream, wish.rounds),
        manifest,
        max_update_bytes=services.settings.max_update_bytes,
    )
    with services.database.read() as session:
        there = session.get(SiteRound, plan.round_id)
    if there is not None:
        return there
    blobs = [(services.blobs.put(wish.weights), "weights", len(wish.weights))]
    if wish.broadcast is not None:
        blobs.append((services.blobs.put(wish.broadcast), "broadcast", len(wish.broadcast)))
    now = services.clock()
    with services.database.write() as session:
        task = session.get(Task, plan.task_id, with_for_update=True)
        if task is None:
            task = new_task(
                request, task_id=plan.task_id, request_digest=None, now=now, created_by="upstream",
                proposed=plan.kind != "training" and services.settings.query_approval, upstream=wish.root_population,
            )  # fmt: skip
            session.add(task)
            session.flush()
            audit.append(session, now, "upstream", "task.create", task.task_id, **audited(task))
        elif task.upstream is None:
            raise PolicyError(f"task {plan.task_id}: this server has a task of its own with that id")
        # One that is proposed waits for the approval of somebody here, as long as the sum is of use.
        if not task.live and task.state != "proposed":
            raise PolicyError(f"task {plan.task_id} is {task.state} at this server")
        if queries.is_query(task) and not (budget := queries.budget(session, task, now=now)).left:
            raise PolicyError(
                f"population {task.population!r} was asked {budget.spent} times in the last {budget.days} days; the "
                f"bundle allows {budget.allowed} queries"
            )
        for digest, kind, length in blobs:
            record_blob(session, services.blobs, digest=digest, kind=kind, size=length, now=now)
        reach.extend(session, task.population, task.task_id, plan.bundle, *(digest for digest, *_ in blobs))
        task.model = plan.weights
        row = session.get(SiteRound, plan.round_id)
        if row is None:
            row = SiteRound(
                round_id=plan.round_id, task_id=task.task_id, plan=encode(wish.sealed), state="wanted",
                sum_by=wish.sum_by, created=now,
            )  # fmt: skip
            session.add(row)
        return row


def keep_bundle(services: Services, bundle: Bundle) -> None:
    """Store a verified bundle of the upstream server. Nobody reads it before a task names it."""
    with services.database.read() as session:
        if session.get(BundleRow, bundle.digest) is not None:
            return
    path = Path(services.settings.folder) / f"{bundle.digest}.packing"
    path.unlink(missing_ok=True)
    # The same bytes for the same bundle, whoever packs it.
    pack(bundle.folder, path)
    data = path.read_bytes()
    path.unlink()
    digest, now = services.blobs.put(data), services.clock()
    with services.database.write() as session:
        if session.get(BundleRow, bundle.digest) is None:
            record_blob(session, services.blobs, digest=digest, kind="bundle", size=len(data), now=now)
            session.add(
                BundleRow(
                    digest=bundle.digest,
                    file_digest=digest,
                    name=bundle.manifest.name,
                    size=len(data),
                    strategy=bundle.manifest.strategy,
                    manifest=encode_manifest(bundle.manifest),
                    published=now,
                )
            )


@dataclass(frozen=True)
class LogEntry:
    """One entry of the root's weights log, verified, and the JSON of its endorsement (None: it needs none)."""

    statement: WeightsStatement
    sealed: Sealed
    evidence: bytes | None


def newest_entry(session: Session, population: str, bundle: str) -> int:
    """The number of the last entry of the root's log that this server has."""
    query = select(WeightsEntry.number).where(WeightsEntry.population == population, WeightsEntry.bundle == bundle)
    return session.scalar(query.order_by(WeightsEntry.number.desc()).limit(1)) or 0


def store_entries(services: Services, entries: Sequence[LogEntry]) -> None:
    """Store entries of the root's log, to hand them on to devices. Those that are there stay."""
    with services.database.write() as session:
        for each in entries:
            said = each.statement
            if session.get(WeightsEntry, (said.population, said.bundle, said.number)) is None:
                session.add(
                    WeightsEntry(
                        population=said.population,
                        bundle=said.bundle,
                        number=said.number,
                        kind=said.kind,
                        weights=said.weights,
                        hash=entry_hash(each.sealed),
                        statement=encode(each.sealed),
                        evidence=each.evidence,
                    )
                )
