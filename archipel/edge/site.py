"""What an edge server contributes to a round of its upstream: the sum of a round of its own devices.

The wish for a sum is a row in the edge's database, and so is all that becomes of it; this process and the coordinator
meet there alone. The agent's journal says how the upstream's round ended for this site. So a kill of either process at
any point leaves at most one own round for each of the upstream's, whose sum is sent in the same bytes or not at all.
"""

from __future__ import annotations

import logging
import time

from sqlalchemy import select

from archipel.client.connection.session import DeviceSession
from archipel.client.device import SiteRound
from archipel.client.memory.journal import Journal
from archipel.edge.log_copy import copy_log
from archipel.errors import (
    PolicyError,
    ProtocolError,
    RefusedError,
    RoundAbandonedError,
    ServerError,
    SessionRefusedError,
    UnreachableError,
)
from archipel.protocol.messages import RoundStatus, RoundTask
from archipel.protocol.sites import site_vector
from archipel.protocol.vector import Vector
from archipel.server.database.site_tables import SiteRound as Row
from archipel.server.database.tables import Round
from archipel.server.rounds.sites.ending import follow_task, live_tasks
from archipel.server.rounds.sites.holding import read_sum
from archipel.server.rounds.sites.mirroring import Wish, keep_bundle, take_over
from archipel.server.services import Services
from archipel.server.upstream_settings import Upstream

log = logging.getLogger("archipel.edge")

LOOK_SECONDS = 0.1
"""How often the own round is looked at."""
SILENT_SECONDS = 45.0
"""After so long without an answer of the upstream, whose round needs the sum no more, the own devices are let go."""
_NOT_SENT = ("advertising", "sharing", "complaining")
"""Steps of the agent in which the upstream has keys of this site, and no masked sum yet."""
ASK_SECONDS = 5.0
"""How often the upstream is asked whether its round still goes on."""


class EdgeSite:
    """The site of one edge server; an `archipel.client.device.Site`."""

    def __init__(self, services: Services, upstream: Upstream) -> None:
        self._services = services
        self._upstream = upstream
        self._unknown: set[str] = set()
        self._journal: Journal | None = None
        self._session: DeviceSession | None = None

    def may_work(self) -> str:
        """For the agent's conditions: why it must leave the round that it is in, else empty.

        The devices of a sum that is held do nothing else meanwhile. Where the upstream is silent and the time is over
        until which it waits for the sum, and the masked sum was not sent, it counts in no version: the own round ends.
        """
        if self._journal is None or self._session is None or self._session.silence() < SILENT_SECONDS:
            return ""
        with self._services.database.read() as session:
            late = select(Row.round_id).where(Row.state == "summed", Row.sum_by < self._services.clock())
            rounds = list(session.scalars(late))
        steps = [entry.step for round_id in rounds if (entry := self._journal.get(round_id)) is not None]
        if any(step in _NOT_SENT for step in steps):
            return f"the upstream has not answered for {SILENT_SECONDS:.0f} s, and it is too late for the sum"
        return ""

    def collect(self, given: SiteRound) -> tuple[Vector, int]:
        """As of Site. Raises ProtocolError where this site has no sum in time, RoundAbandonedError, what the session
        raises, and PolicyError where its own devices could not take part."""
        self._session = given.session
        row = self._take_over(given)
        row = self._wait(given, row)
        try:
            signed = read_sum(self._services, row)
        except ServerError as error:
            raise ProtocolError(str(error)) from None
        assert row.devices is not None
        log.info("round %s of the upstream: the sum of %d devices", row.round_id, row.devices)
        return site_vector(signed, row.devices, given.plan.modulus_bits), row.devices

    def reconcile(self, journal: Journal) -> None:
        """Note how the upstream's rounds ended for this site, as far as the journal knows."""
        self._journal = journal
        with self._services.database.read() as session:
            states = ("wanted", "open", "summed")
            open_rows = list(session.scalars(select(Row.round_id).where(Row.state.in_(states))))
        ended = {}
        for round_id in open_rows:
            entry = journal.get(round_id)
            if entry is None or entry.step == "closed":
                ended[round_id] = "counted" if entry is not None and entry.result == "took_part" else "given_up"
        if not ended:
            return
        with self._services.database.write() as session:
            for round_id, state in ended.items():
                row = session.get_one(Row, round_id, with_for_update=True)
                row.state = state
        for round_id, state in ended.items():
            log.info("round %s of the upstream: %s", round_id, state)

    def follow(self, session: DeviceSession) -> None:
        """End the own tasks whose tasks of the upstream have ended."""
        for task_id, round_id in live_tasks(self._services).items():
            try:
                told = _task_of(session, round_id)
            except SessionRefusedError:
                raise
            except RefusedError as error:
                # Such as an upstream whose database is older than this site's. It may still ask for rounds of the task.
                if error.status not in (403, 404):
                    raise
                if task_id not in self._unknown:
                    log.warning("task %s: the upstream does not know it: %s; cancel it to end it", task_id, error)
                self._unknown.add(task_id)
                continue
            if told.task_id == task_id and follow_task(self._services, told):
                log.info("task %s of the upstream is %s", task_id, told.state)

    def _take_over(self, given: SiteRound) -> Row:
        with self._services.database.read() as session:
            known = session.get(Row, given.plan.round_id)
        if known is not None:
            return known
        plan = given.plan
        status = self._status(given)
        now, theirs = time.time(), given.session.server_time()
        keep_bundle(self._services, given.bundle)
        # Before the wish: with it devices begin, and they ask for the log.
        copy_log(self._services, given)
        wish = Wish(
            plan=plan,
            sealed=given.sealed,
            bundle=given.bundle,
            weights=given.cache.read(plan.weights),
            broadcast=None if plan.broadcast is None else given.cache.read(plan.broadcast),
            root_population=given.of_log.population,
            rounds=_task_of(given.session, plan.round_id).rounds,
            # By this server's own clock.
            sum_by=now + status.phase_ends - (now if theirs is None else theirs),
        )
        try:
            return take_over(self._services, self._upstream, wish)
        except ServerError as error:
            raise PolicyError(f"this site cannot take part in task {plan.task_id}: {error}") from None

    def _wait(self, given: SiteRound, row: Row) -> Row:
        """Until the own round has its sum; in the meantime the upstream may be away."""
        ask_at = time.monotonic() + ASK_SECONDS
        where = f"round {row.round_id} of the upstream"
        while True:
            given.check()
            with self._services.database.read() as session:
                row = session.get_one(Row, row.round_id)
                own = None if row.local_round is None else session.get_one(Round, row.local_round)
            if row.state == "summed":
                return row
            if row.state in ("counted", "given_up"):
                raise ProtocolError(f"{where}: this site has given its sum up")
            if own is not None and own.ended is not None:
                raise ProtocolError(f"{where}: the own round {own.round_id} failed: {own.reason}")
            if self._services.clock() > row.sum_by:
                raise ProtocolError(f"{where}: this site has no sum in time")
            if time.monotonic() >= ask_at:
                ask_at = time.monotonic() + ASK_SECONDS
                self._ask(given, where)
            time.sleep(LOOK_SECONDS)

    def _ask(self, given: SiteRound, where: str) -> None:
        """Raises RoundAbandonedError if the upstream's round goes on without this site, or has failed."""
        try:
            status = self._status(given)
        except UnreachableError:
            return
        except RefusedError as error:
            raise RoundAbandonedError(f"{where}: {error}") from None
        if status.phase not in ("assigning", "advertising"):
            raise ProtocolError(f"{where}: it is in phase {status.phase} ({status.reason}), without this site")

    def _status(self, given: SiteRound) -> RoundStatus:
        return given.session.call("GET", f"/v1/rounds/{given.plan.round_id}", RoundStatus)


def _task_of(session: DeviceSession, round_id: str) -> RoundTask:
    return session.call("GET", f"/v1/rounds/{round_id}/task", RoundTask)
