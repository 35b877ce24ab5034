"""Somebody without any right asks for challenges in a device's name, again and again, so that the one that the device
is about to sign is forgotten and it never gets a session. Or they try nonces of their own, other devices', old ones,
and one that was used, at another web process.

What stops them: the server forgets nothing because it keeps nothing. A challenge carries its own proof of where it
comes from, whose it is and until when; only those that were used are kept, in the database, until they expire.
"""

from __future__ import annotations

import secrets

import pytest

from archipel.protocol import messages
from archipel.server.app import create_app
from tests.support.devices import Device
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.world import World


@pytest.fixture
def device(world: World) -> Device:  # noqa: F811
    (made,) = world.add_devices(1)
    made.token = ""
    return made


def opens(device: Device, nonce: bytes) -> int:
    status, _ = device.call("POST", "/v1/sessions", device.session_request(nonce))
    return int(status)


def test_strangers_who_ask_in_its_name_do_not_evict_a_devices_nonce(world: World, device: Device) -> None:  # noqa: F811
    mine = device.challenge().nonce
    for _ in range(20):
        assert world.transport("POST", "/v1/challenges", b'{"device_id":"%s"}' % device.id.encode(), {})[0] == 200
    assert opens(device, mine) == 200


def test_a_nonce_is_good_once_at_whichever_web_process(world: World, device: Device) -> None:  # noqa: F811
    nonce = device.challenge().nonce
    assert opens(device, nonce) == 200
    assert opens(device, nonce) == 403
    world.app.extensions["archipel"].database.dispose()
    world.app = create_app(world.settings, clock=world.clock)  # another process, with the same database
    assert opens(device, nonce) == 403
    # What is kept of it goes when it is of no use any more, and not before.
    world.clock.now += world.settings.challenge_seconds + 2
    world.coordinator._clean()
    assert opens(device, nonce) == 403
    with world.services.database.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM used_nonces").scalar() == 0


def test_nonces_that_the_server_did_not_make_for_the_device(world: World, device: Device) -> None:  # noqa: F811
    (other,) = world.add_devices(1)
    other.token = ""
    good = device.challenge().nonce
    later = good[:16] + (int.from_bytes(good[16:20], "big") + 3600).to_bytes(4, "big") + good[20:]
    for nonce in (
        secrets.token_bytes(32),
        bytes(32),
        other.challenge().nonce,
        later,
        good[:-1] + bytes([good[-1] ^ 1]),
    ):
        assert opens(device, nonce) == 403
    assert opens(device, good) == 200


def test_a_nonce_ends_with_its_time(world: World, device: Device) -> None:  # noqa: F811
    challenge: messages.Challenge = device.challenge()
    world.clock.now = challenge.expires
    assert opens(device, challenge.nonce) == 403
