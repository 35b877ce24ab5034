"""Measures and traces the coordinator's work: how long phases and rounds take, how they end, and what sums cost.

It sees rounds as the coordinator's steps do, so a phase is measured to within a step. It keeps nothing: what happens
while no coordinator works, or is missed by a kill, is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from sqlalchemy import Row, select

from archipel.server.database.tables import Round, Task
from archipel.server.rounds.machine import deadline
from archipel.server.services import Services
from archipel.server.telemetry import log_lines
from archipel.tracing import round_ids


@dataclass
class _Seen:
    """A live round: `since` is when its phase began, in Unix seconds."""

    kind: str
    privacy: str
    phase: str
    since: float


class RoundWatch:
    """Measures one coordinator. Without measurements and traces it does nothing."""

    def __init__(self, services: Services) -> None:
        self._services, self._measures, self._tracer = services, services.measures, services.tracer
        self._seen: dict[str, _Seen] = {}

    def forget(self) -> None:
        """Begin anew: another coordinator may have worked since the last step."""
        self._seen.clear()

    def each(self, live: Sequence[Row[str, str]]) -> Iterator[str]:
        """The ids of the rounds, as `see`; what is logged until the next one is about that round."""
        self.see(live)
        for row in live:
            with log_lines.about(round_id=row.round_id):
                yield row.round_id

    def see(self, live: Sequence[Row[str, str]]) -> None:
        """Called in each step with `round_id` and `phase` of all live rounds."""
        if self._measures is not None:
            self._measures.steps.inc()
        elif self._tracer is None:
            return
        now = self._services.clock()
        if live or self._seen:
            self._begin([row.round_id for row in live if row.round_id not in self._seen])
        for row in live:
            seen = self._seen.get(row.round_id)
            if seen is not None and seen.phase != row.phase:
                self._end_phase(row.round_id, seen, now)
                seen.phase, seen.since = row.phase, now
        if len(self._seen) > len(live):
            self._end(set(self._seen) - {row.round_id for row in live})

    def _begin(self, ids: list[str]) -> None:
        if not ids:
            return
        query = select(Round, Task).join(Task).where(Round.round_id.in_(ids))
        with self._services.database.read() as session:
            for current, task in session.execute(query):
                since = current.phase_ends - deadline(task, current.phase, current)
                self._seen[current.round_id] = _Seen(task.kind, task.privacy, current.phase, since)

    def _end(self, ids: set[str]) -> None:
        query = select(Round.round_id, Round.phase, Round.spoiled, Round.started, Round.ended)
        with self._services.database.read() as session:
            rows = session.execute(query.where(Round.round_id.in_(ids))).all()
        for row in rows:
            seen = self._seen.pop(row.round_id)
            ended = row.ended or self._services.clock()
            self._end_phase(row.round_id, seen, ended)
            outcome = "spoiled" if row.spoiled else row.phase
            if self._tracer is not None:
                about = {"archipel.kind": seen.kind, "archipel.privacy": seen.privacy}
                about |= {"archipel.round_id": row.round_id, "archipel.outcome": outcome}
                self._tracer.record(
                    "round", row.started, ended, parent=None, own=round_ids(row.round_id), attributes=about,
                    error="" if outcome == "committed" else outcome,
                )  # fmt: skip
            measures = self._measures
            if measures is None:
                continue
            measures.rounds_ended.labels(seen.kind, seen.privacy, outcome).inc()
            if outcome == "committed":
                measures.round_seconds.labels(seen.kind).observe(max(0.0, ended - row.started))

    def _end_phase(self, round_id: str, seen: _Seen, now: float) -> None:
        if self._measures is not None:
            self._measures.phase_seconds.labels(seen.kind, seen.phase).observe(max(0.0, now - seen.since))
        if self._tracer is not None:
            self._tracer.record(f"phase {seen.phase}", seen.since, now, parent=round_ids(round_id))

    @contextmanager
    def folding(self, updates: int) -> Iterator[None]:
        """Measure the block, which adds so many updates to a running sum."""
        if self._measures is None:
            yield
            return
        with self._measures.fold_seconds.time():
            yield
        self._measures.updates_folded.inc(updates)

    def aggregating(self) -> AbstractContextManager[object]:
        """Measure the block, which makes a round's result."""
        return nullcontext() if self._measures is None else self._measures.aggregation_seconds.time()
