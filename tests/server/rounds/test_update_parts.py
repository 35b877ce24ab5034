"""What the server takes as parts of an update, how much it stores, and what it puts together."""

from __future__ import annotations

import hashlib
import secrets

import pytest

from archipel.server.http.api import updates
from tests.support.devices import Device
from tests.support.world import World

PART = 5


@pytest.fixture
def fleet(world: World, monkeypatch: pytest.MonkeyPatch) -> list[Device]:
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
def test_it_is_put_together_once_all_are_there(world: World, fleet: list[Device]) -> None:
    device = fleet[0]
    path, good = f"{device.round}/update", secrets.token_bytes(9 * device.plan.modulus_bits // 8)
    headers, parts = headers_of(good), parts_of(good)
    assert len(parts) > 2
    assert len(parts[-1]) < PART
    assert device.call("GET", f"{path}/parts")[1] == {}
    for number in (len(parts), 1):
        assert device.call("PUT", f"{path}/parts/{number}", parts[number - 1], headers)[0] == 200
    status, answer = device.call("PUT", path, b"", headers)
    assert (status, answer["detail"]) == (422, f"{len(parts) - 2} of {len(parts)} parts are missing, the first is 2")
    assert device.call("GET", f"{path}/parts")[1] == {"held": [1, len(parts)]}
    # A part that is sent again replaces the one before: no device stores more than its update.
    for _ in range(3):
        assert device.call("PUT", f"{path}/parts/2", secrets.token_bytes(PART), headers)[0] == 200
    for number, part in enumerate(parts[1:-1], start=2):
        assert device.call("PUT", f"{path}/parts/{number}", part, headers)[0] == 200
    stored = world.stored("parts")
    assert sum(map(len, stored.values())) == len(good)
    assert device.call("PUT", path, b"", headers)[0] == 200
    assert list(world.stored("updates").values()) == [good]
    assert world.stored("parts") == {}
    # The answer was lost, and the device repeats what it sent last, or a part.
    assert device.call("PUT", path, b"", headers)[0] == 200
    assert device.call("PUT", path, good, headers)[0] == 200
    assert device.call("PUT", f"{path}/parts/1", parts[0], headers)[0] == 200
    assert world.stored("parts") == {}
    assert device.call("PUT", f"{path}/parts/1", parts[0], headers_of(b"other"))[0] == 409


@pytest.mark.sampled(every=3)
def test_what_is_no_part_is_refused(world: World, fleet: list[Device]) -> None:
    device = fleet[0]
    path, good = f"{device.round}/update", secrets.token_bytes(9 * device.plan.modulus_bits // 8)
    headers, parts = headers_of(good), parts_of(good)
    last = len(parts)
    for number, body, expected in (
        ("1", b"", 422), ("1", parts[0][:-1], 422), ("1", parts[0] + b"\0", 413), (str(last), parts[0], 422),
        (str(last + 1), parts[-1], 422), ("0", parts[0], 404), ("-1", parts[0], 404), ("01", parts[0], 404),
        ("4097", parts[0], 422), ("999999999", parts[0], 422), ("9" * 30, parts[0], 404),
    ):  # fmt: skip
        assert device.call("PUT", f"{path}/parts/{number}", body, headers)[0] == expected, number
    assert device.call("PUT", f"{path}/parts/1", parts[0])[0] == 400
    assert world.stored("parts") == {}
    # Bytes that are not those of the digest: all parts go, as nobody knows which is wrong.
    for number, part in enumerate(parts, start=1):
        assert device.call("PUT", f"{path}/parts/{number}", part, headers_of(good[::-1]))[0] == 200
    status, answer = device.call("PUT", path, b"", headers_of(good[::-1]))
    assert (status, "SHA-256 is" in answer["detail"]) == (422, True)
    assert (world.stored("parts"), world.stored("updates")) == ({}, {})
