"""The coordinator: opens rounds for running tasks, takes them through their phases, and makes the new versions.

Its state is in the database: killed at any point and started again, it continues from there. A round that was being
aggregated is aggregated again, with the same result, until its deadline passes. Of several coordinators on one database
only the one with the lease works; the others wait until the lease expires.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import case, delete, func, select
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from archipel.bundle import decode_manifest
from archipel.errors import ArchipelError, LeaseLostError, SpoiledRoundError
from archipel.protocol.messages import over_neighbours
from archipel.protocol.uploads import plan_layout
from archipel.server.database.server_tables import PersonSession
from archipel.server.database.tables import (
    BundleRow,
    DeviceSession,
    Round,
    Task,
    UsedNonce,
)
from archipel.server.database.task_requests import read_plan, request_of
from archipel.server.devices import queries
from archipel.server.devices import spoiler_search as search
from archipel.server.devices.faults import note_fault, set_aside_faulty
from archipel.server.devices.rests import forget_rests
from archipel.server.devices.root_devices import revoked_root
from archipel.server.processes.lease import Lease
from archipel.server.processes.leftovers import owners_of_files
from archipel.server.processes.round_watch import RoundWatch
from archipel.server.processes.stopping import Stop
from archipel.server.registry.rollout_steps import step_rollouts
from archipel.server.retention.schedule import Retention
from archipel.server.rounds import buffers, evaluating, folding, opening, robust
from archipel.server.rounds.aggregation import aggregate
from archipel.server.rounds.candidates import fewest, root_waits
from archipel.server.rounds.committing import record_result
from archipel.server.rounds.groups import grouping
from archipel.server.rounds.machine import (
    RULES,
    Transition,
    Verdict,
    advance,
    count_seatable,
    deadline,
    fail_round,
    fail_task,
    judge,
)
from archipel.server.rounds.noise import ledger
from archipel.server.rounds.sites import holding
from archipel.server.rounds.sites.opening import open_site_round, wanted
from archipel.server.rounds.waiting import is_evaluated
from archipel.server.services import Services
from archipel.server.telemetry.log_lines import about

log = logging.getLogger("archipel.coordinator")

CLEAN_SECONDS = 60.0
STANDBY_SECONDS = 1.0
RENEWALS = 3
"""How often a lease is renewed before it would expire, so that one or two may fail."""
_GROUPS = (Task.mode == "asynchronous") & (Task.privacy == "secure")
"""Tasks with several rounds at once. Each round is a group of devices that began together."""
LONGEST_STEP = 600.0
"""Seconds after which a step counts as stuck, and the lease is not renewed any more."""
LEFTOVER_SECONDS = 86400.0
IDLE_TIMES = 4.0
"""After a step without any work the coordinator rests this many times as long as the step took."""


class Coordinator:
    """`step` does everything that is due. Without a `lease` it must be the only coordinator of its database."""

    def __init__(self, services: Services, lease: Lease | None = None) -> None:
        self._services = services
        self._lease = lease
        self._watch = RoundWatch(services)
        self._next_cleaning = 0.0
        self._retention = Retention(services)
        self._step_began = 0.0

    def run(self, stop: Stop) -> None:
        """Step until `stop` is set. A busy database or a full disk is retried; any other error ends the process."""
        if self._lease is None:
            self.recover()
            self._work(stop)
            return
        renewal = threading.Thread(target=self._renew, args=(stop, self._lease), daemon=True)
        renewal.start()
        while not stop.is_set():
            try:
                if not self._lease.take():
                    stop.wait(STANDBY_SECONDS)
                    continue
                log.info("coordinating, as number %s", self._lease.term)
                self._watch.forget()
                self.recover()
                self._work(stop)
            except LeaseLostError as error:
                log.warning("%s", error)
            except (OperationalError, OSError) as error:
                log.warning("waiting: %s", getattr(error, "orig", error))
                stop.wait(STANDBY_SECONDS)
        renewal.join()
        with suppress(DBAPIError):  # without a database the lease expires by itself
            self._lease.give_back()

    def _work(self, stop: Stop) -> None:
        while not stop.is_set():
            self._step_began = time.monotonic()
            if self._lease is not None and self._lease.term is None:
                return
            rest = self._services.settings.poll_seconds
            try:
                busy = self.step()
                # With many waiting devices a step takes long even if nothing is due, and would fill a processor.
                rest = max(rest, IDLE_TIMES * (time.monotonic() - self._step_began))
            except (OperationalError, OSError) as error:
                log.warning("waiting: %s", getattr(error, "orig", error))
                busy, rest = False, STANDBY_SECONDS
            if not busy:
                stop.wait(rest)

    def _renew(self, stop: Stop, lease: Lease) -> None:
        """Renew the lease in a thread of its own, so that a long step keeps it. A step that is stuck loses it."""
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
        """Remove the updates of rounds that have ended, as far as a kill or an upload kept them from being removed."""
        self._services.spool.sweep(self._needed)

    def _needed(self) -> list[str]:
        """Ids of the rounds whose updates, and of the tasks whose noise, are still needed."""
        # A writing transaction, only because it checks the lease: while this coordinator has it, no folder that `sweep`
        # listed before can be of a round that another coordinator is just opening.
        with self._write() as session:
            return owners_of_files(session, now=self._services.clock())

    def step(self) -> bool:
        """Make one pass over live rounds, idle tasks and rollouts.

        Everything is decided without a write lock first, and again in the transaction that does it.

        Returns:
            Whether anything changed, so that the next step should follow at once.
        """
        services = self._services
        with services.database.read() as session:
            live = session.execute(select(Round.round_id, Round.phase).where(Round.ended.is_(None))).all()
            at_work = select(func.count()).where(Round.task_id == Task.task_id, Round.ended.is_(None)).scalar_subquery()
            # One round at a time, but as many groups as fit into `concurrency` devices.
            most = case((_GROUPS, func.coalesce(Task.concurrency, 2 * Task.cohort) // Task.cohort), else_=1)
            idle = list(session.scalars(select(Task).where(Task.state == "running", at_work < most)))
        happened = False
        for round_id in self._watch.each(live):
            happened |= self._advance(round_id)
        for task in idle:
            happened |= self._start(task)
        happened |= step_rollouts(services, self._write) | evaluating.end_idle(services, self._write)
        if services.clock() >= self._next_cleaning:
            self._next_cleaning = services.clock() + CLEAN_SECONDS
            self._clean()
        return happened | self._retention.step(self._write)

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
            _, verdict = judge(session, current, task, now=now, window=window)
            stays = task.live and verdict is Verdict.STAY
            if stays and grouping.waits(session, current):
                return False
            if stays and rule.name == "buffering":
                due = buffers.seats_are_due(session, current, task, now=now, window=window)
            folds = stays and rule.collects and not robust.keeps_single(request_of(task))
            waiting = folding.pending(session, current, task) if folds else []
            if not stays and rule.name == "complaining" and over_neighbours(read_plan(current).protocol):
                # So that the transaction below does not wait for many envelopes.
                services.frozen.roster(session, round_id).with_envelopes(session)
        if stays:
            if rule.waits_for == "work":
                return self._aggregate(round_id)
            if rule.name == "buffering" and due:
                self._move_seats(round_id, now)
            # The phase buffering counts only folded updates, so they are folded at once; others in batches.
            if waiting and (rule.name == "buffering" or folding.worth_a_checkpoint(waiting)):
                return self._fold(round_id, waiting)
            return False
        with self._write() as session:
            most, frozen = settings.max_failed_rounds, services.frozen
            done = advance(session, round_id, frozen, now=now, window=window, max_failed=most)
            if done is not None and done.phase == "failed":
                # In the same transaction, so that no round takes the device again in between.
                set_aside_faulty(session, round_id, settings, now)
        if done is not None:
            self._report(done)
        return done is not None

    def _move_seats(self, round_id: str, now: float) -> None:
        with self._write() as session:
            current = session.get_one(Round, round_id, with_for_update=True)
            task = session.get_one(Task, current.task_id, with_for_update=True)
            # A paused task finishes its buffer with the devices that are at work, and seats no others.
            if current.phase == "buffering" and task.state == "running":
                window = self._services.settings.check_in_window
                buffers.move_seats(session, current, task, now=now, window=window)

    def _fold(self, round_id: str, waiting: list[folding.Pending]) -> bool:
        """Add acknowledged updates to the round's running sum. The module `folding` says what a crash leaves."""
        services = self._services
        with services.database.read() as session:
            current = session.get_one(Round, round_id)
            task = session.get_one(Task, current.task_id)
            manifest = decode_manifest(session.get_one(BundleRow, task.bundle).manifest)
        plan, request, before = read_plan(current), request_of(task), current.sum_digest
        # The sum is computed outside of any transaction, which may take seconds. Only this coordinator changes it.
        reason = ""
        try:
            with self._watch.folding(len(waiting)):
                total = folding.load(services.spool, current, plan, plan_layout(plan, manifest))
                folding.fold(services.spool, total, waiting, request.staleness_exponent)
                digest = services.spool.keep_sum(round_id, (total.encode(),)).digest
        except ArchipelError as error:
            reason = f"folding: {error}"
        with self._write() as session:
            current = session.get_one(Round, round_id, with_for_update=True)
            # The round may have ended while the sum was computed; `recover` removes its files, this sum among them.
            if current.ended is not None:
                return False
            if reason:
                task = session.get_one(Task, current.task_id, with_for_update=True)
                most = services.settings.max_failed_rounds
                done = fail_round(session, current, task, reason, now=services.clock(), max_failed=most)
            else:
                folding.record(session, current, waiting, digest)
        if reason:
            self._report(done)
        else:
            folding.forget(services.spool, round_id, waiting, before, digest)
        return True

    def _aggregate(self, round_id: str) -> bool:
        services, settings = self._services, self._services.settings
        # Outside of any transaction, because it may take long. After a kill it is done again, with the same result.
        outcome, spoiled = None, None
        with services.database.read() as session:
            site = holding.held(session, round_id)
        if site is not None and site.state != "open":
            # Its sum is there already, and waits for the upstream server.
            ended = holding.settle(services, self._write, round_id, max_failed=settings.max_failed_rounds)
            if ended is not None:
                self._report(ended)
            return ended is not None
        reason = ledger.charge(services, self._write, round_id)
        try:
            with self._watch.aggregating():
                outcome = None if reason else aggregate(services, round_id)
            if outcome is not None and outcome.reason:
                reason = f"aggregation: {outcome.reason}"
        except SpoiledRoundError as error:
            spoiled, reason = error, f"aggregation: {error}"
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
            # No version is made by the update of a device that is trusted no more.
            reason = reason or revoked_root(session, task)
            # Faults first: `fail_round` does not hold a failure against the task that some device is known to cause.
            for device_id, fault in ({} if outcome is None else outcome.faults).items():
                note_fault(session, device_id=device_id, round_id=round_id, reason=fault, now=now)
            if outcome is None or reason:
                counts = True
                if spoiled is not None and task.live:
                    counts = search.after_failure(session, current, task, spoiled, settings=settings, now=now)
                    reason += f"; {search.HOPELESS}" if counts and current.part_of is None else ""
                most = settings.max_failed_rounds
                done = fail_round(session, current, task, reason, now=now, max_failed=most, counts=counts)
            elif outcome.group_sum:
                ends = now + deadline(task, current.phase, current)
                grouping.keep_sum(session, current, outcome.group_sum, ends=ends)
                done = Transition(round_id, "aggregating", "the group has its sum")
            elif outcome.site_sum:
                done = holding.keep_sum(session, current, outcome.site_sum, outcome.cohort, outcome.result)
            else:
                record_result(session, current, task, outcome, settings=settings, blobs=services.blobs, now=now)
                done = Transition(round_id, "committed")
            set_aside_faulty(session, round_id, settings, now)
        self._report(done)
        return True

    def _start(self, task: Task) -> bool:
        """Make the task's first version, or open a round if enough devices wait. Returns whether it did."""
        services, now = self._services, self._services.clock()
        if task.model is None:
            try:
                opening.make_first_version(self._services, self._write, task)
            except LeaseLostError:
                raise
            except ArchipelError as error:
                self._fail_task(task.task_id, f"the first version cannot be made: {error}")
            return True
        with services.database.read() as session:
            if is_evaluated(session, task):
                return False
            window, lost = services.settings.check_in_window, revoked_root(session, task)
            spent = ledger.lacks_room(session, task)
            if task.upstream is not None and wanted(session, task, now) is None:
                return False
            waiting = count_seatable(session, task, now=now, window=window)
            enough = waiting >= fewest(task) and root_waits(session, task, now=now, window=window)
            if queries.is_query(task) and waiting and not queries.budget(session, task, now=now).left:
                return False
            # A buffer may begin with a single device, or for updates that are still to come from earlier rounds.
            needs_buffer = task.buffered and (waiting or buffers.at_work(session, task, now))
        if lost:
            self._fail_task(task.task_id, lost)
            return True
        if spent:
            ledger.end_spent(self._write, task.task_id, spent, now=now)
            return True
        if not (needs_buffer if task.buffered else enough):
            return False
        try:
            open_round = opening.open_round if task.upstream is None else open_site_round
            opened = open_round(services, self._write, task, now)
        except LeaseLostError:  # an ArchipelError, but no fault of the task
            raise
        except ArchipelError as error:
            self._fail_task(task.task_id, f"no round can be opened: {error}")
        else:
            if opened is not None:
                self._report(opened)
        return True

    def _fail_task(self, task_id: str, reason: str) -> None:
        log.warning("task %s failed: %s", task_id, reason)
        with self._write() as session:
            task = session.get_one(Task, task_id, with_for_update=True)
            if task.live:
                fail_task(session, task, reason, now=self._services.clock())

    def _report(self, done: Transition) -> None:
        with about(round_id=done.round_id):
            log.info("round %s: %s%s", done.round_id, done.phase, f" ({done.reason})" if done.reason else "")
        if done.phase in ("committed", "failed"):
            with self._services.database.read() as session:
                ended = session.get_one(Round, done.round_id)
                task = session.get_one(Task, ended.task_id)
                of_groups = select(Round.round_id).where(Round.part_of == ended.part_of, Round.ended.is_not(None))
                others = [] if ended.part_of is None else session.scalars(of_groups).all()
            # Devices of a live buffered task may still upload for this round; `recover` removes its files later.
            if not (task.buffered and task.live):
                for round_id in {done.round_id, *others}:
                    self._services.spool.discard(round_id)
            if not task.live and request_of(task).differential_privacy.is_correlated:
                self._services.spool.discard(task.task_id)

    def _clean(self) -> None:
        now = self._services.clock()
        with self._write() as session:
            session.execute(delete(DeviceSession).where(DeviceSession.expires <= now))
            session.execute(delete(PersonSession).where(PersonSession.expires <= now))
            forget_rests(session, now)
            search.forget(session, before=now - self._services.settings.fault_seconds)
            session.execute(delete(UsedNonce).where(UsedNonce.expires <= now))
        self._services.blobs.sweep(before=now - LEFTOVER_SECONDS)
        self.recover()
