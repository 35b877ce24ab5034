"""Spans of rounds for OpenTelemetry: one trace a round, of the coordinator, the web requests and the agents.

The trace id of a round, and the id of its first span, follow from the round's id, which is random and is in the plan
that the server signs. So nobody hands a trace context on, nothing is added to a plan, a coordinator that takes over
goes on with the trace, and an agent continues it wherever its owner has spans sent. As no two rounds have an id in
common, nothing in a trace leads from one round of a device to another.

A span tells no device, attribute, metric or update. opentelemetry-sdk (`archipel[telemetry]`) sends it by OTLP over
HTTP, only to the address that the settings name.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from archipel.errors import MissingExtraError

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

_LABEL = b"archipel/v1/round-trace"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0[01]")
_OWN = secrets.token_bytes(16)
"""Of this process alone, so that a device's span ids of two rounds have nothing in common."""
EXPORT_SECONDS = 5.0
SEND_EVERY_SECONDS = 2.0

Attributes = Mapping[str, str | int | float]


class Ids(NamedTuple):
    """`trace` has 16 bytes, `span` 8; neither is 0."""

    trace: int
    span: int


def round_ids(round_id: str) -> Ids:
    """The trace of a round (32 hexadecimal digits) and its first span, which is the coordinator's."""
    digest = hashlib.sha256(_LABEL + bytes.fromhex(round_id)).digest()
    # 0 means "none" in W3C Trace Context; it comes once in 2^64 rounds.
    return Ids(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1)


def device_ids(round_id: str) -> Ids:
    """The same trace, and this process's own span in it, which nobody can compute from the round's id."""
    digest = hashlib.sha256(_LABEL + _OWN + bytes.fromhex(round_id)).digest()
    return Ids(round_ids(round_id).trace, int.from_bytes(digest[:8]) or 1)


def write_parent(ids: Ids) -> str:
    """The header `traceparent` (W3C Trace Context, level 1)."""
    return f"00-{ids.trace:032x}-{ids.span:016x}-01"


def read_parent(header: str | None, round_id: str) -> Ids:
    """The span in which a request of the round was sent: the header's, if it is of this round's trace.

    Otherwise the round's first one: a sender cannot put spans into the trace of another round.
    """
    first = round_ids(round_id)
    match = _TRACEPARENT.fullmatch(header or "")
    if match is None or int(match[1], 16) != first.trace or not int(match[2], 16):
        return first
    return Ids(first.trace, int(match[2], 16))


class Tracer:
    """Sends spans to `address`, such as http://localhost:4318, under the name `service`.

    They wait in memory, up to 2,048, and are dropped when the address does not answer. Raises MissingExtraError.
    """

    def __init__(self, address: str, service: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "opentelemetry", "telemetry") from None
        self._ids = _chosen_ids()
        # `Resource.create` would add what the environment says of this machine.
        resource = Resource({"service.name": service})
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=self._ids)
        exporter = OTLPSpanExporter(endpoint=f"{address.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=1000 * SEND_EVERY_SECONDS, max_queue_size=2048)
        )
        self._tracer = self._provider.get_tracer("archipel")

    def record(
        self,
        name: str,
        began: float,
        ended: float,
        *,
        parent: Ids | None,
        own: Ids | None = None,
        attributes: Attributes | None = None,
        error: str = "",
    ) -> None:
        """Record a span that is over, from `began` to `ended` (Unix seconds).

        `parent` is the span around it, None: it is its trace's first one. `own` are its ids; without, its trace is the
        parent's and its id random. `error` marks it as failed.
        """
        from opentelemetry import trace
        from opentelemetry.context import Context

        around = Context() if parent is None else trace.set_span_in_context(_span_of(_context(parent)), Context())
        with self._ids.chosen(own):
            span = self._tracer.start_span(
                name, context=around, start_time=round(began * 1e9), attributes=dict(attributes or {})
            )
        if error:
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        span.end(end_time=round(max(began, ended) * 1e9))

    def close(self) -> None:
        """Send what waits, for some seconds at most."""
        self._provider.force_flush(round(1000 * EXPORT_SECONDS))
        self._provider.shutdown()


def _context(ids: Ids) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(ids.trace, ids.span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _span_of(context: SpanContext) -> Any:
    from opentelemetry.trace import NonRecordingSpan

    return NonRecordingSpan(context)


def _chosen_ids() -> Any:
    """An id generator of the SDK's kind, which gives chosen ids within a block and else random ones."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Chosen(RandomIdGenerator):
        def __init__(self) -> None:
            self._mine = threading.local()

        @contextmanager
        def chosen(self, ids: Ids | None) -> Iterator[None]:
            self._mine.ids = ids
            try:
                yield
            finally:
                self._mine.ids = None

        def generate_span_id(self) -> int:
            ids: Ids | None = getattr(self._mine, "ids", None)
            return super().generate_span_id() if ids is None else ids.span

        def generate_trace_id(self) -> int:
            ids: Ids | None = getattr(self._mine, "ids", None)
            return super().generate_trace_id() if ids is None else ids.trace

    return Chosen()
