"""A server over TCP without a coordinator, and what the client sends."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import urllib3
from werkzeug.serving import make_server

from archipel import bundle as b
from archipel.operator import OperatorClient, RolloutRequest, TaskRequest, TokenRequest, VersionRequest
from archipel.operator.connection import Resource
from archipel.protocol.sealed import public_bytes
from archipel.server import create_app, init_data_folder, load_settings
from archipel.server.services import Services
from tests.server.conftest import make_bundle

SAMPLES: dict[str, Any] = {
    "task_id": "1" * 32,
    "round_id": "2" * 32,
    "device_id": "3" * 32,
    "rollout_id": "4" * 32,
    "token_id": "5" * 32,
    "digest": "6" * 64,
    "name": "digits",
    "population": "pupils",
    "number": 7,
    "reason": "worse",
}
REQUESTS: dict[type, Any] = {
    TaskRequest: TaskRequest(name="t", population="pupils", bundle="6" * 64, rounds=1, min_cohort=3, cohort=5),
    VersionRequest: VersionRequest(bundle="6" * 64),
    RolloutRequest: RolloutRequest(model="digits", version=1, stages=[], gate="none"),
    TokenRequest: TokenRequest(name="t", role="auditor"),
}


@dataclass
class Served:
    """`url` of a server, and the `token` of its admin; `folder` holds digits.bundle and newer.bundle."""

    url: str
    token: str
    folder: Path


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    publisher, enrolment = b.generate_key(), b.generate_key()
    for name in ("digits", "newer"):
        (tmp_path / name).mkdir()
        make_bundle(tmp_path / name, publisher, name=name).rename(tmp_path / f"{name}.bundle")
    folder = tmp_path / "server"
    token = init_data_folder(folder, enrolment_key=public_bytes(enrolment), publisher_keys=[public_bytes(publisher)])
    settings = load_settings(folder, environment={})
    services = Services.open(settings)
    services.prepare()
    app = create_app(settings)
    web = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield Served(f"http://127.0.0.1:{web.server_port}", token, tmp_path)
    web.shutdown()
    thread.join()
    web.server_close()
    app.extensions["archipel"].database.dispose()
    services.database.dispose()


class SentError(Exception):
    """Raised in place of an answer."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Method and address of every request that a client would send; a call ends with SentError."""
    requests: list[tuple[str, str]] = []

    def record(self: Any, method: str, url: str, **options: Any) -> Any:
        requests.append((method, url.removeprefix("http://127.0.0.1:1")))
        raise SentError

    monkeypatch.setattr(urllib3.PoolManager, "request", record)
    return requests


def nowhere() -> OperatorClient:
    return OperatorClient("http://127.0.0.1:1", "t")


def methods() -> list[str]:
    """Every public method of every resource, such as "tasks.create"."""
    return [
        f"{resource}.{name}"
        for resource, each in vars(nowhere()).items()
        if isinstance(each, Resource)
        for name, _ in inspect.getmembers(type(each), inspect.isfunction)
        if not name.startswith("_")
    ]


def method(client: OperatorClient, place: str) -> Callable[..., Any]:
    resource, name = place.split(".")
    found: Callable[..., Any] = getattr(getattr(client, resource), name)
    return found


def arguments(call: Callable[..., Any], folder: Path) -> dict[str, Any]:
    """Something for each argument that a method must have."""
    needed = [name for name, each in inspect.signature(call).parameters.items() if each.default is each.empty]
    kinds = get_type_hints(call)
    samples = {**SAMPLES, "path": folder / "some.bundle"}
    (folder / "some.bundle").write_bytes(b"bytes")
    return {name: REQUESTS[kinds[name]] if name == "request" else samples[name] for name in needed}


def send(call: Callable[..., Any], **options: Any) -> None:
    """Have the first request of a call sent."""
    with pytest.raises(SentError):
        next(iter(call(**options)))
