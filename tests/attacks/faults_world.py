"""A fleet on a real server in this process, some of whose devices spoil the rounds that they are in."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np

from archipel.protocol.messages import Complaints
from archipel.protocol.vector import pack
from tests.support.devices import ANSWERED, Device
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    bundle_maker,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.tiny_bundle import LENGTH
from tests.support.world import World

Misbehaves = Callable[[Device, str], bool]
"""Of a device and a phase: whether it did something else there, so that it does not answer as it should."""


def upload_noise(device: Device) -> None:
    """Random numbers of the right size in place of the masked update; with everything else it does what it should."""
    device.participant.mask(device.vector, device.ask("GET", f"{device.round}/complaints", Complaints))
    numbers = np.frombuffer(secrets.token_bytes(4 * LENGTH), np.uint32)
    modulus = np.uint32(2**device.plan.modulus_bits - 1)
    device.upload(pack(numbers & modulus, device.plan.modulus_bits))


def noise_from(*spoilers: Device) -> Misbehaves:
    """They send random numbers in every round."""

    def misbehaves(device: Device, phase: str) -> bool:
        if phase != "masking" or device not in spoilers:
            return False
        upload_noise(device)
        return True

    return misbehaves


def play(world: World, task_id: str, devices: Sequence[Device], misbehaves: Misbehaves, *, rounds: int = 200) -> None:  # noqa: F811
    """All devices take part in everything until the task ends, in so many rounds at most."""
    for _ in range(rounds):
        if world.task(task_id)["state"] != "running":
            return
        play_round(world, devices, misbehaves)
    raise AssertionError(f"the task did not end within {rounds} rounds")


def play_round(world: World, devices: Sequence[Device], misbehaves: Misbehaves) -> list[Device]:  # noqa: F811
    """One round, and who was in it. Where too few wait for a whole cohort it begins at its deadline."""
    for device in devices:
        device.check_in()
    world.settle()
    here = [device for device in devices if device.join()]
    if not here:
        world.clock.now += 61
        return play_round(world, devices, misbehaves)
    for phase in ANSWERED:
        for device in here:
            if not misbehaves(device, phase):
                device.answer(phase)
        world.settle()
    return here
