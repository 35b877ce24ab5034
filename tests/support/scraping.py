"""Reads a server's metrics as Prometheus does."""

from __future__ import annotations

import socket
import ssl
import urllib.request
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from archipel.server.telemetry.measures import Measures


class FlushedRegistry(CollectorRegistry):
    """Measurements of this process, which are written whenever they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.measures = Measures(self)

    def collect(self) -> Iterable[Metric]:
        self.measures.flush()
        return super().collect()


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def read_samples(text: str) -> Samples:
    """All samples of a text in Prometheus's format, by name and labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def samples_of(registry: CollectorRegistry) -> Samples:
    return read_samples(generate_latest(registry).decode())


def scrape(port: int, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, **headers: str) -> str:
    """The metrics of the server that has this `metrics_port`, with `tls` over TLS. Raises urllib.error.HTTPError."""
    scheme = "http" if tls is None else "https"
    request = urllib.request.Request(f"{scheme}://{host}:{port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=20, context=tls) as answer:
        return str(answer.read().decode())


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of all samples of a name that have these labels."""
    wanted = set(labels.items())
    return sum(number for (each, has), number in samples.items() if each == name and wanted <= has)
