"""The coordinator: opens rounds for running tasks, takes them through their phases, makes the new versions.

It keeps nothing in memory that matters: killed at any point and started again, it goes on from the database. A round
that was being aggregated is aggregated again, with the same result, until its deadline passes. Of several coordinators
on one database the one with the lease works, and the others wait for it to expire.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import delete, exists, select
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from archipel import strategies
from archipel.bundle import Manifest, decode_manifest, write_weights
from archipel.errors import ArchipelError, LeaseLostError, ServerError
from archipel.protocol.policy import plan_digest
from archipel.protocol.sealed import encode, seal
from archipel.protocol.vector import Layout
from archipel.server.aggregation import NewVersion, aggregate
from archipel.server.candidates import count_candidates
from archipel.server.lease import Lease
from archipel.server.models import Blob, BundleRow, ChallengeRow, DeviceSession, Round, Task, Version
from archipel.server.resources import TaskRequest
from archipel.server.rounds import (
    RULES,
    Transition,
    Verdict,
    advance,
    commit_round,
    count,
    decide,
    fail_round,
    required,
)
from archipel.server.services import Services
from archipel.server.stopping import Stop
from archipel.server.task_checks import make_plan, update_program, update_size

log = logging.getLogger("archipel.coordinator")

CLEAN_SECONDS = 60.0
STANDBY_SECONDS = 1.0
RENEWALS = 3
"""In the time of a lease."""
LONGEST_STEP = 600.0
LEFTOVER_SECONDS = 86400.0


class Coordinator:
    """`step` does everything that is due. Without a `lease` it must be the only one of its database."""

    def __init__(self, services: Services, lease: Lease | None = None) -> None:
        self._services = services
        self._lease = lease
        self._next_cleaning = 0.0
        self._step_began = 0.0

    def run(self, stop: Stop) -> None:
        """Step until `stop` is set. A busy database or full disk is waited out; any other error ends the process."""
        if self._lease is None:
            self.recover()
            self._work(stop)
            return
        heart = threading.Thread(target=self._renew, args=(stop, self._lease), daemon=True)
        heart.start()
        while not stop.is_set():
            try:
                if not self._lease.take():
                    stop.wait(STANDBY_SECONDS)
                    continue
                log.info("coordinating, as number %s", self._lease.term)
                self.recover()
                self._work(stop)
            except LeaseLostError as error:
                log.warning("%s", error)
            except (OperationalError, OSError) as error:
                log.warning("waiting: %s", getattr(error, "orig", error))
                stop.wait(STANDBY_SECONDS)
        heart.join()
        with suppress(DBAPIError):  # it expires by itself
            self._lease.give_back()

    def _work(self, stop: Stop) -> None:
        while not stop.is_set():
            self._step_began = time.monotonic()
            if self._lease is not None and self._lease.term is None:
                return
            try:
                busy = self.step()
            except (OperationalError, OSError) as error:
                log.warning("waiting: %s", getattr(error, "orig", error))
                busy = False
                stop.wait(1.0)
            if not busy:
                stop.wait(self._services.settings.poll_seconds)

    def _renew(self, stop: Stop, lease: Lease) -> None:
        """Renew the lease while a step takes long; one that does not come back loses it."""
        while not stop.wait(lease.seconds / RENEWALS):
            if lease.term is None or time.monotonic() - self._step_began > LONGEST_STEP:
                continue
            try:
                lease.renew()
            except (DBAPIError, OSError) as error:
                log.warning("the lease was not renewed: %s", getattr(error, "orig", error))

    @contextmanager
    def _write(self) -> Iterator[Session]:
        """A transaction that only commits while the lease is this coordinator's."""
        with self._services.database.write() as session:
            if self._lease is not None:
                self._lease.fence(session)
            yield session

    def recover(self) -> None:
        """Remove the updates of rounds that ended while nobody could."""
        with self._services.database.read() as session:
            live = list(session.scalars(select(Round.round_id).where(Round.ended.is_(None))))
        self._services.spool.sweep(live)

    def step(self) -> bool:
        """One pass over live rounds and idle tasks. Returns whether anything happened."""
        services = self._services
        with services.database.read() as session:
            live = session.execute(select(Round.round_id, Round.phase).where(Round.ended.is_(None))).all()
            idle = list(
                session.scalars(
                    select(Task)
                    .where(Task.state == "running")
                    .where(~exists().where(Round.task_id == Task.task_id, Round.ended.is_(None)))
                )
            )
        happened = False
        for row in live:
            happened |= self._advance(row.round_id)
        for task in idle:
            happened |= self._start(task)
        if services.clock() >= self._next_cleaning:
            self._next_cleaning = services.clock() + CLEAN_SECONDS
            self._clean()
        return happened

    def _advance(self, round_id: str) -> bool:
        services, settings = self._services, self._services.settings
        now, window = services.clock(), settings.check_in_window
        with services.database.read() as session:
            # Most of the time nothing is due, and finding that out must not take the write lock.
            current = session.get_one(Round, round_id)
            task = session.get_one(Task, current.task_id)
            rule = RULES.get(current.phase)
            if rule is None:
                return False
            counts = count(session, current, task, now=now, window=window)
            verdict = decide(rule, counts, now=now, phase_ends=current.phase_ends)
            live = task.live
        if live and verdict is Verdict.STAY:
            return self._aggregate(round_id) if rule.waits_for == "work" else False
        with self._write() as session:
            done = advance(session, round_id, now=now, window=window, max_failed=settings.max_failed_rounds)
        if done is not None:
            self._report(done)
        return done is not None

    def _aggregate(self, round_id: str) -> bool:
        services, settings = self._services, self._services.settings
        version, reason = None, ""
        try:
            version = aggregate(services, round_id)
        except ArchipelError as error:
            reason = f"aggregation: {error}"
        now = services.clock()
        with self._write() as session:
            current = session.get_one(Round, round_id, with_for_update=True)
            task = session.get_one(Task, current.task_id, with_for_update=True)
            if current.phase != "aggregating":
                return False
            if not task.live:
                reason = f"the task is {task.state}"
            if version is None or reason:
                done = fail_round(session, current, task, reason, now=now, max_failed=settings.max_failed_rounds)
            else:
                self._commit(session, current, task, version, now)
                done = Transition(round_id, "committed")
        self._report(done)
        return True

    def _commit(self, session: Session, current: Round, task: Task, version: NewVersion, now: float) -> None:
        session.merge(Blob(digest=version.weights, kind="weights", size=version.weights_size, created=now))
        if version.strategy_state is not None:
            session.merge(
                Blob(digest=version.strategy_state, kind="state", size=version.strategy_state_size, created=now)
            )
        session.add(
            Version(
                task_id=task.task_id,
                number=current.number,
                weights=version.weights,
                strategy_state=version.strategy_state,
                parent=current.weights_in,
                round_id=current.round_id,
                cohort=version.cohort,
                weight_sum=version.weight_sum,
                created=now,
            )
        )
        current.weights_out = version.weights
        current.weight_sum = version.weight_sum
        task.model = version.weights
        task.strategy_state = version.strategy_state
        commit_round(session, current, task, now=now)

    def _start(self, task: Task) -> bool:
        services, now = self._services, self._services.clock()
        if task.model is None:
            try:
                self._make_first_version(task)
            except LeaseLostError:
                raise
            except ArchipelError as error:
                self._fail_task(task.task_id, f"the first version cannot be made: {error}")
            return True
        with services.database.read() as session:
            waiting = count_candidates(session, task, now=now, window=services.settings.check_in_window)
        if waiting < required(task, RULES["assigning"]):
            return False
        try:
            self._open_round(task, now)
        except LeaseLostError:
            raise
        except ArchipelError as error:
            self._fail_task(task.task_id, f"no round can be opened: {error}")
        return True

    def _make_first_version(self, task: Task) -> None:
        services = self._services
        with services.database.read() as session:
            row = session.get_one(BundleRow, task.bundle)
        bundle = services.open_bundle(row.file_digest)
        parameters = bundle.parameters()
        state = strategies.get(bundle.manifest.strategy).init(parameters)
        weights = write_weights(parameters)
        state_bytes = write_weights(state) if state else b""
        digest = services.blobs.put(weights)
        state_digest = services.blobs.put(state_bytes) if state_bytes else None
        now = services.clock()
        with self._write() as session:
            stored = session.get_one(Task, task.task_id, with_for_update=True)
            session.merge(Blob(digest=digest, kind="weights", size=len(weights), created=now))
            if state_digest is not None:
                session.merge(Blob(digest=state_digest, kind="state", size=len(state_bytes), created=now))
            session.add(
                Version(
                    task_id=task.task_id,
                    number=0,
                    weights=digest,
                    strategy_state=state_digest,
                    parent=None,
                    round_id=None,
                    cohort=0,
                    weight_sum=None,
                    created=now,
                )
            )
            stored.model = digest
            stored.strategy_state = state_digest

    def _open_round(self, task: Task, now: float) -> None:
        services = self._services
        with services.database.read() as session:
            manifest = decode_manifest(session.get_one(BundleRow, task.bundle).manifest)
        if task.model is None:
            raise ServerError(f"task {task.task_id} has no model yet")
        broadcast, broadcast_size = self._store_broadcast(task, manifest)
        plan = make_plan(
            _request(task),
            manifest,
            round_id=secrets.token_hex(16),
            task_id=task.task_id,
            number=task.rounds_committed + 1,
            weights=task.model,
            broadcast=broadcast,
        )
        sealed = seal("plan", plan, services.settings.private_key)
        services.spool.open_round(plan.round_id)
        with self._write() as session:
            stored = session.get_one(Task, task.task_id, with_for_update=True)
            if stored.state != "running":
                return
            if broadcast is not None:
                session.merge(Blob(digest=broadcast, kind="broadcast", size=broadcast_size, created=now))
            session.add(
                Round(
                    round_id=plan.round_id,
                    task_id=task.task_id,
                    number=plan.number,
                    phase="assigning",
                    phase_ends=now + task.deadlines["assigning"],
                    reason="",
                    plan=encode(sealed),
                    plan_digest=plan_digest(sealed),
                    update_bytes=update_size(Layout.of(update_program(manifest)), plan.modulus_bits),
                    weights_in=task.model,
                    weights_out=None,
                    weight_sum=None,
                    started=now,
                    ended=None,
                )
            )
        self._report(Transition(plan.round_id, "assigning"))

    def _store_broadcast(self, task: Task, manifest: Manifest) -> tuple[str | None, int]:
        services = self._services
        state = {}
        if task.strategy_state is not None:
            state = services.blobs.read_weights(task.strategy_state)
        tensors = strategies.get(manifest.strategy).broadcast(state)
        if not tensors:
            return None, 0
        data = write_weights(tensors)
        return services.blobs.put(data), len(data)

    def _fail_task(self, task_id: str, reason: str) -> None:
        log.warning("task %s failed: %s", task_id, reason)
        with self._write() as session:
            task = session.get_one(Task, task_id, with_for_update=True)
            if task.live:
                task.state = "failed"
                task.reason = reason[:1024]
                task.ended = self._services.clock()

    def _report(self, done: Transition) -> None:
        log.info("round %s: %s%s", done.round_id, done.phase, f" ({done.reason})" if done.reason else "")
        if done.phase in ("committed", "failed"):
            self._services.spool.discard(done.round_id)

    def _clean(self) -> None:
        now = self._services.clock()
        with self._write() as session:
            session.execute(delete(DeviceSession).where(DeviceSession.expires <= now))
            session.execute(delete(ChallengeRow).where(ChallengeRow.expires <= now))
        self._services.blobs.sweep(before=now - LEFTOVER_SECONDS)
        self.recover()


def _request(task: Task) -> TaskRequest:
    return TaskRequest(
        name=task.name,
        population=task.population,
        bundle=task.bundle,
        rounds=task.rounds,
        min_cohort=task.min_cohort,
        cohort=task.cohort,
        privacy=task.privacy,  # type: ignore[arg-type]
        threshold=task.threshold,
        goal=task.goal,
        hyperparameters=task.hyperparameters,
    )
