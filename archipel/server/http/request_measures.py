"""Measures requests: how many, how long they take, and how many bytes go in and out."""

from __future__ import annotations

import re
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from archipel.server.telemetry.measures import Measures

NO_ROUTE = "(none)"
"""The label of requests that no route answers; their paths are from outside, and without number."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PARAMETER = re.compile(r"<(?:[^:>]+:)?([^>]+)>")
_MOST_KEPT = 100_000


class Answered(NamedTuple):
    """A request that was answered: `rule` and `endpoint` are the route's, None without one; sizes are in bytes."""

    rule: str | None
    endpoint: str | None
    method: str
    status: int
    seconds: float
    received: int
    sent: int


class RequestMeasures:
    """The measurements of one process's requests.

    Requests only put themselves into a queue, which takes less than a microsecond; the numbers are written when the
    measures are flushed.
    """

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._answered: deque[Answered] = deque(maxlen=_MOST_KEPT)
        self._lock = threading.Lock()
        self._in_progress = 0
        measures.at_flush(self._write)

    def begun(self) -> None:
        """A request has come."""
        with self._lock:
            self._in_progress += 1

    def answered(self, answer: Answered) -> None:
        """It is answered."""
        with self._lock:
            self._in_progress -= 1
        self._answered.append(answer)

    def _write(self) -> None:
        measures = self._measures
        measures.in_progress.set(self._in_progress)
        # Not until it is empty: others go on filling it.
        for _ in range(len(self._answered)):
            answer = self._answered.popleft()
            route = show_route(answer.rule)
            method = answer.method if answer.method in _METHODS else "other"
            measures.requests.labels(route, method, str(answer.status)).inc()
            measures.request_seconds.labels(route).observe(answer.seconds)
            if answer.received:
                measures.received.labels(route).inc(answer.received)
            if answer.sent:
                measures.sent.labels(route).inc(answer.sent)
            if answer.status < 300:
                if answer.endpoint == "check_ins.check_in":
                    measures.check_ins.inc()
                elif answer.endpoint == "updates.upload_update":
                    measures.updates.inc()


def show_route(rule: str | None) -> str:
    """A route's label: its path as in the API's description, such as /v1/rounds/{round_id}."""
    return NO_ROUTE if rule is None else _PARAMETER.sub(r"{\1}", rule)
