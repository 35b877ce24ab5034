"""Somebody reads the server's logs.

Who: whoever reads log files, or the place that they are sent to. What they want: tokens, with which they could speak in
the name of a device or an operator; or to write lines of their own into the logs, which look like the server's. What
stops them: no log has a token, its hash, a body, a query string or a parameter of a statement; a line is one line.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import urllib3

from archipel.operator import OperatorClient
from archipel.protocol.operator.access import TokenRequest
from tests.support.devices import Device
from tests.support.fixtures.server import data_folder, keys  # noqa: F401
from tests.support.serving import Server
from tests.support.world import DataFolder


@pytest.fixture
def server(data_folder: DataFolder) -> Iterator[Server]:  # noqa: F811
    made = Server(data_folder[0])
    yield made
    if made.alive:
        made.stop(signal.SIGKILL)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_no_log_has_a_secret_and_no_line_is_forged(
    server: Server,
    data_folder: DataFolder,  # noqa: F811
    log_format: str,
) -> None:
    folder, root, keys = data_folder  # noqa: F811
    url = server.start(log_format=log_format, slow_query_ms="0.0001")
    pool = urllib3.PoolManager(retries=False)

    def transport(method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        answer = pool.request(method, url + path, body=body, headers=headers)
        return answer.status, answer.data

    with OperatorClient(url, root) as operator:
        device = Device(transport, keys, operator.server.info().server_key, not_after=2e9)
        made = operator.tokens.create(TokenRequest(name="test", role="operator"))
        assert list(operator.tasks.list()) == []
    device.enrol().open_session()
    device.attributes = {"ward": "private-ward"}
    device.check_in()
    guess = "apt_" + "g" * 40
    for path in ("/v1/tasks?token=in-a-query", "/v1/x%0A2026-01-01 archipel.coordinator: forged", "/v1/tasks"):
        transport("GET", path, None, {"Authorization": f"Bearer {guess}", "Cookie": "session=in-a-cookie"})
    # An error that nobody expects, in a statement with a token's hash among its parameters.
    with closing(sqlite3.connect(folder / "archipel.db")) as database:
        database.execute("ALTER TABLE sessions RENAME TO lost")
        database.commit()
    wanted = "s" * 43
    assert transport("GET", "/v1/bundles/" + "0" * 64, None, {"Authorization": f"Bearer {wanted}"})[0] == 500
    pool.clear()
    time.sleep(0.2)
    assert server.stop() == 0
    logs = (folder / "server.log").read_text() + (folder / "requests.log").read_text()
    assert "slow query" in logs
    assert "no such table: sessions" in logs
    secrets = [root, made.token, device.token, guess, wanted, "in-a-query", "in-a-cookie", "private-ward"]
    for secret in secrets:
        digest = hashlib.sha256(secret.encode())
        for form in (secret, digest.hexdigest(), repr(digest.digest())[2:-1], digest.digest().hex(" ")):
            assert form not in logs
    lines = (folder / "server.log").read_text().splitlines()
    assert not any(line.startswith("2026-01-01 archipel.coordinator") for line in lines)
    if log_format == "json":
        assert all(json.loads(line)["message"] for line in lines)
    assert all(json.loads(line) for line in (folder / "requests.log").read_text().splitlines())
