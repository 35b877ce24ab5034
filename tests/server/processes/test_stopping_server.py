"""What a server still does when it is told to stop."""

from __future__ import annotations

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import urllib3

from archipel.errors import RefusedError
from archipel.operator import OperatorClient
from archipel.protocol.messages import CheckIn, CheckInResponse
from tests.support.devices import Device
from tests.support.serving import Server
from tests.support.world import DataFolder


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


def test_a_device_that_waits_is_answered(data_folder: DataFolder, device_maker: type[Device]) -> None:
    folder, token, keys = data_folder
    server = Server(folder)
    url = server.start(hold_seconds="60", check_in_window="60")
    pool = urllib3.PoolManager(maxsize=2)

    def transport(method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        response = pool.request(method, url + path, body=body, headers=headers)
        return response.status, response.data

    with OperatorClient(url, token) as operator:
        key = operator.server.info().server_key
    device = device_maker(transport, keys, key, not_after=2e9).enrol().open_session()
    with ThreadPoolExecutor(1) as others:
        waiting = others.submit(device.ask, "POST", "/v1/check-ins", CheckInResponse, CheckIn(wait=60.0))
        time.sleep(0.5)
        assert not waiting.done()
        assert server.stop() == 0
        # Not cut off, as after the time in which a server must have stopped.
        assert waiting.result().plan is None
    pool.clear()
