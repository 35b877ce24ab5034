"""A server that offers versions to one device and writes down every byte that the device sends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np

from archipel.bundle import open_bundle
from archipel.client import Agent, AgentConfig, Event
from archipel.protocol.messages import Offer
from archipel.protocol.sealed import public_bytes, seal
from tests.support.linear_bundle import POPULATION, local_data
from tests.support.registry import MODEL, make_model
from tests.support.scripted_server import Reply, Scripted

LOOK = 0.6


class Listening(Scripted):
    """Serves any number of bundles; `heard` is every request, `at` when it came (seconds)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.stored: dict[str, bytes] = {}
        self.heard: list[tuple[str, str, bytes, str]] = []
        self.at: list[float] = []

    def version(self, number: int, w: tuple[float, ...], serial: int) -> Offer:
        """An offer of a version with these parameters."""
        file = make_model(self.folder / f"version-{number}-{len(self.stored)}", self.publisher, w)
        digest = open_bundle(file, [public_bytes(self.publisher)]).digest
        self.stored[digest] = file.read_bytes()
        return Offer(population=POPULATION, model=MODEL, version=number, bundle=digest, serial=serial)

    def offer(self, *offers: Offer) -> None:
        self.offers = [seal("offer", each, self.key) for each in offers]

    def reply(self, method: str, path: str, body: bytes, headers: Message) -> Reply | bytes | None:
        with self.lock:
            self.at.append(time.monotonic())
            if not path.startswith(("/v1/sessions", "/v1/challenges", "/v1/devices")):
                self.heard.append((method, path, body, headers.get("Range") or ""))
        digest = path.removeprefix("/v1/bundles/")
        if method == "GET" and digest in self.stored:
            return self._file(self.stored[digest], headers.get("Range"))
        return super().reply(method, path, body, headers)


@dataclass
class Watched:
    """A device with data of its own, at such a server."""

    server: Listening
    data: dict[str, np.ndarray]
    folder: Path
    events: list[Event] = field(default_factory=list)

    def agent(self, **changes: Any) -> Agent:
        config = AgentConfig(
            folder=self.folder, adopt=True, isolated=False, look_seconds=LOOK, poll_jitter=0.0, backoff=0.01,
            max_wait=0.05, **changes,
        )  # fmt: skip
        return Agent(config, examples=lambda: self.data, on_event=self.events.append)

    def names(self) -> list[str]:
        return [each.name for each in self.events if each.name in ("adopted", "kept")]


def opposite_data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """For the first the model [1, -1, 2] is right, for the second [-1, 1, -2]; else they are the same."""
    x = local_data(0)["x"]
    y = (x @ np.array([1, -1, 2], np.float32)).astype(np.float32)
    return {"x": x, "y": y}, {"x": x, "y": -y}
