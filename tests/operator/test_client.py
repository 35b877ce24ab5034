"""The client with a real server: what no command calls, what may be repeated, and what it costs to import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import urllib3

from archipel.errors import RefusedError
from archipel.operator import OperatorClient, TaskRequest, TokenRequest
from archipel.protocol import unseal
from archipel.protocol.messages import WeightsStatement
from tests.support.federation import Federation
from tests.support.fixtures.federation import *  # noqa: F403
from tests.support.served import Served


@pytest.fixture
def client(served: Served) -> Iterator[OperatorClient]:
    with OperatorClient(served.url, served.token) as made:
        yield made


@pytest.mark.sampled(every=4)
def test_the_server_describes_its_api(client: OperatorClient) -> None:
    described = client.server.description()
    assert described["openapi"] == "3.1.0"
    assert "/v1/tasks" in described["paths"]


@pytest.mark.sampled(every=4)
def test_pieces_are_of_the_file(client: OperatorClient, served: Served) -> None:
    bundle = client.bundles.upload(served.folder / "digits.bundle", "pupils")
    pieces = client.bundles.pieces(bundle.digest)
    assert pieces.size == bundle.bytes == len(client.bundles.download(bundle.digest))
    assert all(each.offset + each.length <= pieces.size for each in pieces.pieces)


@pytest.mark.sampled(every=8)
def test_where_weights_come_from(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [federation.agent(number) for number in range(4)]
    task, operator = federation.task(rounds=2), federation.operator
    federation.run(agents, lambda: operator.tasks.get(task.task_id).state != "running")
    population, bundle = task.population, task.bundle
    monkeypatch.setattr("archipel.server.rounds.weights_log.MAX_ENTRIES", 2)
    entries = [
        unseal("weights", each, operator.server.info().server_key, WeightsStatement)
        for each in operator.weights_log.list(population, bundle)
    ]
    assert [(each.number, each.kind) for each in entries] == [(1, "start"), (2, "step"), (3, "step")]
    newest = operator.tasks.get(task.task_id).model
    assert entries[-1].weights == newest
    for after in range(4):
        assert len(list(operator.weights_log.list(population, bundle, after=after))) == 3 - after
    assert list(operator.weights_log.list(population, "0" * 64)) == []
    assert len(operator.weights_log.endorsement(population, bundle, 2).endorsers) >= 3
    with pytest.raises(RefusedError) as refusal:
        operator.weights_log.endorsement(population, bundle, 1)  # no round made it
    assert refusal.value.status == 404
    assert operator.weights.pieces(newest).size == len(operator.weights.download(newest))
    assert operator.weights.read(newest).keys() == {"w"}


@pytest.mark.sampled(every=4)
def test_what_may_be_repeated_is(client: OperatorClient, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a request is sent again is urllib3's business; that it may be is said for each."""
    again: list[tuple[str, bool]] = []
    request: Any = urllib3.PoolManager.request

    def record(self: urllib3.PoolManager, method: str, url: str, **options: Any) -> urllib3.BaseHTTPResponse:
        again.append((f"{method} {url.removeprefix(served.url).partition('?')[0]}", bool(options["retries"])))
        return request(self, method, url, **options)

    monkeypatch.setattr(urllib3.PoolManager, "request", record)
    bundle = client.bundles.upload(served.folder / "digits.bundle", "pupils")
    asked = TaskRequest(
        name="t", population="pupils", bundle=bundle.digest, rounds=1, min_cohort=3, cohort=4, threshold=3
    )
    task = client.tasks.create(asked)
    client.tasks.cancel(task.task_id)
    client.tokens.create(TokenRequest(name="t", role="auditor"))
    assert len(list(client.tokens.list())) == 1
    assert again == [
        ("POST /v1/bundles", False),
        ("POST /v1/tasks", True),
        (f"POST /v1/tasks/{task.task_id}/cancel", True),
        ("POST /v1/tokens", False),
        ("GET /v1/tokens", True),
    ]


@pytest.mark.sampled(every=3)
def test_importing_it_is_cheap() -> None:
    code = """
import sys
import archipel.operator
heavy = {"flask", "sqlalchemy", "alembic", "gunicorn", "werkzeug", "fsspec", "onnx", "onnxruntime", "torch", "click"}
print(sorted(heavy & set(sys.modules)), [name for name in sys.modules if name.startswith("archipel.server")])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"
