"""An enrolled device advertises X25519 keys of small order, with which every private key agrees on zero.

It wants its peers to fail: a peer that finds such a key in its cohort leaves, and no round is completed. What stops it:
the server looks at every key before it counts the device among the cohort, those for single senders too; and peers look
again, because the server may be the one who lies.
"""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.errors import ProtocolError
from archipel.protocol import messages, seal
from archipel.protocol.messages import Advertisement, AdvertiseRequest, Cohort
from archipel.protocol.secagg import KeyTree, hand_out_keys
from tests.support.fixtures.server import *  # noqa: F403
from tests.support.rounds import Round
from tests.support.world import World

POINTS = {
    "order 1": (1).to_bytes(32, "little"),
    "order 2": bytes(32),
    "order 4": (2**255 - 20).to_bytes(32, "little"),
    "order 8": bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    "order 1, another spelling": (2**255 - 18).to_bytes(32, "little"),
}
PLACES = ("cipher_key", "mask_key", "envelope key")


def with_small_key(
    good: AdvertiseRequest, place: str, point: bytes, at: int, leaves: int, identity: Ed25519PrivateKey
) -> AdvertiseRequest:
    """The advertisement of a device that signs whatever it likes."""
    body = msgspec.json.decode(good.advertisement.body, type=Advertisement)
    keys = good.envelope_keys
    if place == "envelope key":
        keys = keys[: 32 * at] + point + keys[32 * at + 32 :]
        body = msgspec.structs.replace(body, envelope_root=KeyTree(keys, leaves).root)
    else:
        body = msgspec.structs.replace(body, **{place: point})
    return AdvertiseRequest(advertisement=seal("advertisement", body, identity), envelope_keys=keys)


@pytest.mark.sampled(every=6)
def test_the_server_refuses_them_and_the_round_goes_on(world: World) -> None:
    task = world.create_task(cohort=5, min_cohort=4, threshold=3)
    devices = world.add_devices(5)
    world.start_round(devices)
    hostile, honest = devices[0], devices[1:]
    good = hostile.participant.advertise()
    for place in PLACES:
        for point in POINTS.values():
            bad = with_small_key(good, place, point, 3, 5, hostile.key)
            status, answer = hostile.call("PUT", f"{hostile.round}/advertisement", bad)
            assert status == 422, answer
            assert "small order" in answer["detail"]
    for device in honest:
        device.advertising()
    world.clock.now += 121
    world.settle()
    for phase in ("sharing", "complaining", "masking", "confirming", "unmasking"):
        for device in honest:
            device.answer(phase)
        world.settle()
    assert world.task(task["task_id"])["rounds_committed"] == 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_peers_refuse_them_where_the_server_does_not(place: str, point: bytes) -> None:
    round_ = Round(3, threshold=2)
    round_.advertise()
    reader = sorted(round_.ids).index(round_.ids[1])
    bad = with_small_key(round_.requests[0], place, point, reader, 3, round_.keys[0])
    requests = {**round_.requests, 0: bad}
    members = [
        messages.Member(chain=round_.chains[i], advertisement=each.advertisement) for i, each in requests.items()
    ]
    trees = {round_.ids[i]: KeyTree(each.envelope_keys, 3) for i, each in requests.items()}
    told = Cohort(members=members, keys=hand_out_keys(trees, round_.ids[1]))
    with pytest.raises(ProtocolError, match=r"small order|usable"):
        round_.devices[1].share(told)
