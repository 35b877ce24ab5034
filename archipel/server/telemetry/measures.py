"""The measurements of one process, as Prometheus metrics. docs/metrics.md describes each of them.

No label has a value that somebody outside has chosen: routes are lines of the route table, everything else is a word of
this program. So their number is bounded, whatever devices send.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
QUICK_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
WORK_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PHASE_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)

FLUSH_SECONDS = 1.0
"""A process that is killed loses what it measured in this time."""


class Measures:
    """Counters, histograms and gauges of this process; all times are in seconds, all sizes in bytes.

    `registry`: where they can be read in this very process. In a server's processes it is None: there every process
    writes into a file of its own, and telemetry.shared adds the files up.

    What is measured often waits in queues: `flush` writes it. In a server's processes that is done once a second.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._writers: list[Callable[[], None]] = []
        self._flushing = threading.Lock()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter("archipel_http_requests", "Requests answered.", ["route", "method", "status"])
        self.request_seconds = histogram(
            "archipel_http_request_seconds", "Seconds until the answer was ready.", ["route"], buckets=REQUEST_BUCKETS
        )
        self.received = counter("archipel_http_received_bytes", "Bytes of requests' bodies.", ["route"])
        self.sent = counter("archipel_http_sent_bytes", "Bytes of answers' bodies.", ["route"])
        self.in_progress = Gauge(
            "archipel_http_requests_in_progress",
            "Requests that are being worked on.",
            registry=registry,
            multiprocess_mode="sum",
        )
        # A process that was killed in the middle of requests left its number, and this one goes on with its file.
        self.in_progress.set(0)
        self.check_ins = counter("archipel_check_ins_answered", "Check-ins of devices that were answered.")
        self.updates = counter("archipel_updates_acknowledged", "Uploaded updates that were acknowledged.")
        self.statement_seconds = histogram(
            "archipel_database_statement_seconds",
            "Seconds that the database took for a statement.",
            ["operation"],
            buckets=QUICK_BUCKETS,
        )
        self.write_seconds = histogram(
            "archipel_database_write_seconds",
            "Seconds of a writing transaction from its begin to its durable end.",
            buckets=QUICK_BUCKETS,
        )
        self.database_errors = counter("archipel_database_errors", "Statements that failed.", ["error"])
        self.storage_seconds = histogram(
            "archipel_storage_seconds", "Seconds that the file store took.", ["operation"], buckets=QUICK_BUCKETS
        )
        self.storage_errors = counter("archipel_storage_errors", "Failures of the file store.", ["operation"])
        self.rounds_ended = counter("archipel_rounds_ended", "Rounds that ended.", ["kind", "privacy", "outcome"])
        self.phase_seconds = histogram(
            "archipel_round_phase_seconds", "Seconds that a phase of a round took.", ["kind", "phase"],
            buckets=PHASE_BUCKETS,
        )  # fmt: skip
        self.round_seconds = histogram(
            "archipel_round_seconds", "Seconds that a committed round took.", ["kind"], buckets=PHASE_BUCKETS
        )
        self.updates_folded = counter("archipel_updates_folded", "Updates that were added to a running sum.")
        self.fold_seconds = histogram(
            "archipel_fold_seconds", "Seconds that adding updates to a running sum took.", buckets=WORK_BUCKETS
        )
        self.aggregation_seconds = histogram(
            "archipel_aggregation_seconds", "Seconds that making a round's result took.", buckets=WORK_BUCKETS
        )
        self.steps = counter("archipel_coordinator_steps", "Steps of the coordinator.")

    def at_flush(self, write: Callable[[], None]) -> None:
        """Have `write` called whenever what waits is written."""
        self._writers.append(write)

    def flush(self) -> None:
        """Write what waits."""
        with self._flushing:
            for write in self._writers:
                write()

    def flush_for_ever(self) -> None:
        """Flush in a thread of its own, until the process ends."""

        def run() -> None:
            while True:
                time.sleep(FLUSH_SECONDS)
                self.flush()

        threading.Thread(target=run, daemon=True, name="measures").start()
