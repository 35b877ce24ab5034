"""An OTLP receiver: takes spans over HTTP as an OpenTelemetry collector does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Spans:
    """Every span that came, with the name of the service that sent it. Ids are in hexadecimal, "" is no parent."""

    address: str
    received: list[tuple[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def named(self, name: str, service: str = "archipel-server") -> list[Any]:
        return [span for sender, span in self.received if span.name == name and sender == service]


@contextmanager
def receiving() -> Iterator[Spans]:
    """Receive spans while the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            spans.bodies.append(body)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {each.key: each.value.string_value for each in group.resource.attributes}
                assert set(about) == {"service.name"}
                for scope in group.scope_spans:
                    spans.received += [(about["service.name"], span) for span in scope.spans]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *values: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        spans = Spans(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield spans
        server.shutdown()
        thread.join()
