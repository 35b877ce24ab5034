"""What a server still does when it is told to stop."""

from __future__ import annotations

import hashlib
import signal
import socket
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import urllib3

from archipel.errors import RefusedError
from archipel.operator import OperatorClient
from archipel.protocol.operator.tasks import TaskRequest
from tests.server.rounds.test_plain_rounds import encoded, update
from tests.support.devices import Device
from tests.support.patience import stretched
from tests.support.serving import Server
from tests.support.world import DataFolder


@pytest.mark.sampled(every=4)
def test_counts_of_the_last_minute_are_written(data_folder: DataFolder) -> None:
    server = Server(data_folder[0])
    with OperatorClient(server.start(), "wrong") as stranger:
        for _ in range(3):
            with pytest.raises(RefusedError, match="401"):
                next(stranger.tasks.list())
    assert server.stop() == 0
    with sqlite3.connect(f"file:{server.folder}/archipel.db?mode=ro", uri=True) as database:
        rows = database.execute("SELECT actor, action, detail FROM audit").fetchall()
    database.close()
    assert rows == [("server", "access.refused", '{"count": 3, "sources": 1, "address:127.0.0.1": 3}')]


@pytest.mark.sampled(every=8)
def test_a_server_says_that_it_stops_and_finishes_what_is_under_way(
    data_folder: DataFolder, device_maker: type[Device], bundle_maker: Callable[..., Path], tmp_path: Path
) -> None:
    folder, token, keys = data_folder
    server = Server(folder)
    url = server.start(drain_seconds="1.5", stop_seconds="20")
    pool = urllib3.PoolManager(retries=False)

    def transport(method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        response = pool.request(method, url + path, body=body, headers=headers)
        return response.status, response.data

    def status(path: str) -> int:
        return pool.request("GET", url + path).status

    wait_until(lambda: status("/readyz") == 200)
    assert status("/healthz") == 200
    with OperatorClient(url, token) as operator:
        public = operator.server.info().server_key
        digest = operator.bundles.upload(bundle_maker(tmp_path, keys.publisher))
        operator.tasks.create(
            TaskRequest(name="digits", population="pupils", bundle=digest.digest, rounds=1, min_cohort=3, cohort=3,
                        privacy="plain", deadlines={"updating": 600})
        )  # fmt: skip
    devices = [device_maker(transport, keys, public, not_after=2e9) for _ in range(3)]
    for device in devices:
        device.enrol().open_session()
    for device in devices:
        device.check_in()
    for device in devices:
        wait_until(device.join)
    body = encoded(update(0))
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as upload:
        head = (
            f"PUT {devices[0].round}/update HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {devices[0].token}\r\n"
            f"Digest-SHA256: {hashlib.sha256(body).hexdigest()}\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        upload.sendall(head.encode() + body[:10])
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status("/readyz") == 503)
        answer = pool.request("GET", url + "/readyz").data
        assert b"about to stop" in answer
        assert status("/healthz") == 200
        for number in (1, 2):
            devices[number].updating(**update(number))  # served while it drains
        wait_until(lambda: is_gone(host, int(port)))
        upload.sendall(body[10:])
        assert upload.recv(12) == b"HTTP/1.1 200"
    pool.clear()
    assert server.stop() == 0
    with closing(sqlite3.connect(f"file:{folder}/archipel.db?mode=ro", uri=True)) as database:
        answers = dict(database.execute("SELECT device_id, digest FROM answers").fetchall())
        assert database.execute("SELECT expires FROM leases").fetchall() == [(0.0,)]
    assert answers[devices[0].id] == hashlib.sha256(body).hexdigest()
    assert set(answers) == {device.id for device in devices}


@pytest.mark.sampled(every=3)
def test_a_connection_that_says_nothing_does_not_hold_up_the_end(data_folder: DataFolder) -> None:
    server = Server(data_folder[0])
    host, port = server.start(stop_seconds="60").removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as silent:
        time.sleep(0.5)
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < stretched(10)
        assert silent.recv(1) == b""


def is_gone(host: str, port: int) -> bool:
    """Whether no web process takes connections any more: they wait then, as the supervisor holds the port."""
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.settimeout(1)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        try:
            return not connection.recv(1)
        except TimeoutError:
            return True


def wait_until(what: Callable[[], object], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + stretched(seconds)
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
