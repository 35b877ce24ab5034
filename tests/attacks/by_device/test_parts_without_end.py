"""A device uploads parts of its update for ever, or those of another device: the server's disk, and others' sums."""

from __future__ import annotations

import hashlib
import secrets

import pytest

from archipel.server.http.api import updates
from tests.support.devices import Device
from tests.support.fixtures.server import (  # noqa: F401
    bundle_file,
    bundle_maker,
    data_folder,
    device_maker,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.world import World

PART = 5


@pytest.fixture
def fleet(world: World, monkeypatch: pytest.MonkeyPatch) -> list[Device]:  # noqa: F811
    monkeypatch.setattr(updates, "PART_BYTES", PART)
    devices = world.add_devices(5)
    world.create_task()
    world.start_round(devices)
    world.run_to("masking", devices)
    return devices


def parts_of(data: bytes) -> list[bytes]:
    return [data[start : start + PART] for start in range(0, len(data), PART)]


def headers_of(data: bytes) -> dict[str, str]:
    return {"Digest-SHA256": hashlib.sha256(data).hexdigest()}


@pytest.mark.sampled(every=4)
def test_a_device_stores_no_more_than_one_update(world: World, fleet: list[Device]) -> None:  # noqa: F811
    """However often it sends parts, with whatever bytes, of whatever digest."""
    device = fleet[0]
    size = 9 * device.plan.modulus_bits // 8
    count = len(parts_of(bytes(size)))
    for _ in range(20):
        data = secrets.token_bytes(size)
        for number, part in enumerate(parts_of(data), start=1):
            assert device.call("PUT", f"{device.round}/update/parts/{number}", part, headers_of(data))[0] == 200
        for number in (count + 1, 4096, 4097, 999_999_999):
            assert device.call("PUT", f"{device.round}/update/parts/{number}", data[:PART], headers_of(data))[0] == 422
        assert sum(map(len, world.stored("parts").values())) == size
    # The last ones make an update like any other; parts that are mixed of several make none.
    assert device.call("PUT", f"{device.round}/update/parts/1", secrets.token_bytes(PART), headers_of(data))[0] == 200
    assert device.call("PUT", f"{device.round}/update", b"", headers_of(data))[0] == 422
    assert (world.stored("parts"), world.stored("updates")) == ({}, {})


@pytest.mark.sampled(every=3)
def test_nobody_else_sees_or_changes_them_and_they_end_with_the_round(world: World, fleet: list[Device]) -> None:  # noqa: F811
    device, other = fleet[:2]
    (stranger,) = world.add_devices(1)
    good = secrets.token_bytes(9 * device.plan.modulus_bits // 8)
    headers = headers_of(good)
    assert device.call("PUT", f"{device.round}/update/parts/1", good[:PART], headers)[0] == 200
    assert other.call("GET", f"{device.round}/update/parts")[1] == {}
    assert stranger.call("GET", f"{device.round}/update/parts")[0] == 403
    assert stranger.call("PUT", f"{device.round}/update/parts/1", good[:PART], headers)[0] == 403
    world.clock.now += 301
    world.settle()
    assert world.stored("parts") == {}
    assert device.call("PUT", f"{device.round}/update/parts/2", good[PART : 2 * PART], headers)[0] == 410
    assert world.stored("parts") == {}
