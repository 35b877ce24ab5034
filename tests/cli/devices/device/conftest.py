"""Devices as `archipel device` runs them: in processes of their own, with a server over TCP."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from archipel.protocol.sealed import encode
from tests.support.commands import Command
from tests.support.device_process import Device
from tests.support.federation import Federation
from tests.support.fixtures.commands import archipel  # noqa: F401  (fixture)
from tests.support.fixtures.federation import federation, server_host  # noqa: F401  (fixtures)


@pytest.fixture
def device_of(federation: Federation) -> Iterator[Callable[[int], Device]]:  # noqa: F811
    made: list[Device] = []

    def make(number: int) -> Device:
        made.append(Device(federation.folder, number, encode(federation.token())))
        return made[-1]

    yield make
    for device in made:
        if device.alive:
            device.stop(signal.SIGKILL)


@pytest.fixture
def enrolled(device_of: Callable[[int], Device], archipel: Command) -> Device:  # noqa: F811
    device = device_of(0)
    archipel("device", "enroll", str(device.config), str(device.token))
    return device
