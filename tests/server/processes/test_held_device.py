"""A device whose check-in is kept back, and a server that stops."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import urllib3

from archipel.operator import OperatorClient
from archipel.protocol.messages import CheckIn, CheckInResponse
from tests.support.devices import Device
from tests.support.serving import Server
from tests.support.world import DataFolder


@pytest.mark.sampled(every=4)
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
