"""Devices give wrong secret shares, so that a round's sum cannot be unmasked, or so that another device is blamed.

One reveals wrong shares of everybody's seed: with enough others the round succeeds without its answer, the fault is its
own, and after three it is set aside. Another one deals one wrong share to one peer, each time to the same, so that the
peer's honest answer does not fit and the peer is blamed: nobody can tell which of the two lies, so neither is. Two
bend their shares of all seeds so that they fit those of all others but one: its true shares then seem to be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel.protocol.messages import Confirmations, Receipt
from archipel.protocol.secagg import shamir
from tests.attacks.faults_world import (  # noqa: F401  (fixtures)
    ANSWERED,
    bundle_file,
    bundle_maker,
    data_folder,
    empty_database,
    keys,
    play_round,
    server_settings,
    world,
)
from tests.support.devices import Device
from tests.support.world import World


def shown(world: World, device: Device) -> dict[str, Any]:  # noqa: F811
    return world.operator("GET", f"/v1/devices/{device.id}")[1]


@pytest.mark.sampled(every=4)
def test_whoever_reveals_wrong_shares_is_set_aside(world: World) -> None:  # noqa: F811
    task = world.create_task(rounds=4, cohort=6, min_cohort=4, threshold=4)
    devices = world.add_devices(7)
    liar = devices[2]

    def lies(device: Device, phase: str) -> bool:
        if device is not liar or phase != "unmasking":
            return False
        answer = device.participant.unmask(device.ask("GET", f"{device.round}/confirmations", Confirmations))
        shares = [each.share for each in answer.self_seeds]
        # Each a share, but of another device's seed.
        wrong = [msgspec.structs.replace(each, share=shares[i - 1]) for i, each in enumerate(answer.self_seeds)]
        device.ask("PUT", f"{device.round}/unmasking", Receipt, msgspec.structs.replace(answer, self_seeds=wrong))
        return True

    in_rounds = 0
    while shown(world, liar)["quarantine"] is None and in_rounds < 3:
        in_rounds += liar in play_round(world, [liar, *devices[:2], *devices[3:6]], lies)
    assert shown(world, liar)["quarantine"]["detail"] == "3 faults: 3 x wrong unmasking shares"
    # Nobody lost a round by it, and the last one has another device in its place.
    assert liar not in play_round(world, devices, lies)
    assert [each["phase"] for each in world.rounds(task["task_id"])] == ["committed"] * 4
    assert [each["faults"] for each in world.rounds(task["task_id"])] == [
        *([[{"device_id": liar.id, "reason": "wrong unmasking shares"}]] * 3),
        [],
    ]


@pytest.mark.sampled(every=8)
def test_whoever_deals_a_wrong_share_does_not_get_its_recipient_blamed(
    world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = world.create_task(rounds=4, cohort=6, min_cohort=4, threshold=4)
    devices = world.add_devices(6)
    dealer, victim = devices[0], devices[1]
    place = sorted(device.id for device in devices).index(victim.id)
    honest = shamir.split

    def one_wrong(*arguments: Any) -> list[bytes]:
        shares = list(honest(*arguments))
        shares[place] = shares[place - 1]
        return shares

    def frames(device: Device, phase: str) -> bool:
        if device is not dealer or phase != "sharing":
            return False
        with monkeypatch.context() as patch:
            patch.setattr(shamir, "split", one_wrong)
            device.sharing()
        return True

    for _ in range(4):
        play_round(world, devices, frames)
    after = world.task(task["task_id"])
    assert (after["state"], after["rounds_committed"]) == ("completed", 4)
    assert [shown(world, device)["faults"] for device in devices] == [0] * 6
    assert all(shown(world, device)["quarantine"] is None for device in devices)


@pytest.mark.sampled(every=3)
def test_whoever_deals_wrong_shares_to_all_is_blamed_when_it_drops_out(
    world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It deals a key that is not the one that it advertised, and sends no vector: its masks cannot be taken off."""
    task = world.create_task(rounds=1, cohort=6, min_cohort=4, threshold=4)
    devices = world.add_devices(6)
    dealer = devices[0]
    honest = shamir.split

    def another_secret(secret: bytes, *arguments: Any) -> list[bytes]:
        return list(honest(bytes(reversed(secret)), *arguments))

    def spoils(device: Device, phase: str) -> bool:
        if device is not dealer or phase in ("advertising", "complaining"):
            return False
        if phase == "sharing":
            with monkeypatch.context() as patch:
                patch.setattr(shamir, "split", another_secret)
                device.sharing()
        return True

    world.start_round(devices)
    for phase in ANSWERED:
        for device in devices:
            if not spoils(device, phase):
                device.answer(phase)
        world.settle()
        if phase == "masking":
            world.clock.now += 61
            world.settle()
    (found,) = world.rounds(task["task_id"])
    assert (found["phase"], found["spoiled"]) == ("failed", False)
    assert found["faults"] == [{"device_id": dealer.id, "reason": "dealt wrong shares"}]
    assert world.task(task["task_id"])["failed_rounds"] == 0


@pytest.mark.sampled(every=4)
def test_two_that_bend_their_shares_do_not_get_a_third_blamed(
    world: World,  # noqa: F811
    bundle_maker: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    """They add a polynomial that is zero where all honest devices but the victim are, and not at the victim's."""
    bundle = bundle_maker(tmp_path, world.keys.publisher, name="two", policy={"colluders": 0.3}).read_bytes()
    digest = world.operator("POST", "/v1/bundles", bundle)[1]["digest"]
    task = world.create_task(bundle=digest, cohort=7, min_cohort=5, threshold=5)
    devices = sorted(world.add_devices(7), key=lambda device: device.id)
    victim, liars = devices[0], devices[5:]
    zeros = (2, 3, 4, 5)  # positions in secret sharing, from 1, in the order of the ids

    def bends(device: Device, phase: str) -> bool:
        if device not in liars or phase != "unmasking":
            return False
        answer = device.participant.unmask(device.ask("GET", f"{device.round}/confirmations", Confirmations))
        x = devices.index(device) + 1
        added = math.prod(x - zero for zero in zeros)
        bent = [
            msgspec.structs.replace(
                each,
                share=((int.from_bytes(each.share, "big") + added) % shamir.PRIME).to_bytes(shamir.SHARE_BYTES, "big"),
            )
            for each in answer.self_seeds
        ]
        device.ask("PUT", f"{device.round}/unmasking", Receipt, msgspec.structs.replace(answer, self_seeds=bent))
        return True

    play_round(world, devices, bends)
    (found,) = world.rounds(task["task_id"])[:1]
    # The seeds are wrong, so the sum is spoiled. Who did it is left to counting.
    assert (found["phase"], found["spoiled"], found["faults"]) == ("failed", True, [])
    assert shown(world, victim)["faults"] == 0
