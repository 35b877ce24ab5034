"""Devices that deal or show wrong shares in a round over neighbours: who lies is named, and nobody else can be.

A dealer commits to every share. So a holder that shows another one is found at once, its answer is left out, and the
sum stays. Shares that all fit their commitments and give no secret are their dealer's fault. Of an envelope that does
not open nobody can tell who garbled it: its dealer leaves the round when too few hold its shares, and has no fault.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.protocol.secagg_plus import messages as packed
from archipel.protocol.secagg_plus import participant
from archipel.protocol.secagg_plus.envelope import DEALT_BYTES
from archipel.protocol.secagg_plus.shares import PRIME
from tests.support.devices import ANSWERED
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.neighbour_devices import NeighbourDevice, add_devices, create_task
from tests.support.world import World


@pytest.fixture
def begun(world: World, tmp_path: Path) -> tuple[World, dict[str, Any], list[NeighbourDevice]]:  # noqa: F811
    """A round of ten devices in phase advertising."""
    task, policy = create_task(world, tmp_path)
    devices = add_devices(world, 10, policy)
    world.start_round(devices)
    return world, task, devices


def finish(world: World, devices: list[NeighbourDevice], phases: tuple[str, ...]) -> None:  # noqa: F811
    for phase in phases:
        for device in devices:
            device.answer(phase)
        world.settle()


@pytest.mark.sampled(every=4)
def test_who_dealt_garbage_is_out_and_the_others_go_on(begun: Any) -> None:
    world, task, devices = begun  # noqa: F811
    finish(world, devices, ANSWERED[:1])
    liar = devices[3]
    for device in devices:
        dealt = device.over.deal(device.draw())
        if device is liar:
            dealt = msgspec.structs.replace(dealt, dealt=bytes(DEALT_BYTES) * len(dealt.places))
        device.put("dealt", dealt)
    world.settle()
    for phase in ANSWERED[2:]:
        for device in devices:
            if device is not liar or phase == "complaining":
                device.answer(phase)
        if phase == "complaining":
            world.settle()
            status, answer = liar.try_fetch("GET", "partners")
            assert status == 410
            assert b"too few hold its shares" in answer
            assert liar.check_in() is None
        world.settle()
    assert world.task(task["task_id"])["state"] == "completed"
    (info,) = world.rounds(task["task_id"])
    assert info["survivors"] == sorted(device.id for device in devices if device is not liar)
    assert info["faults"] == []


@pytest.mark.sampled(every=4)
def test_who_shows_wrong_shares_is_named_and_the_sum_stays(begun: Any) -> None:
    world, task, devices = begun  # noqa: F811
    finish(world, devices, ANSWERED[:5])
    # Of each secret as many shares are used as the threshold, the first ones.
    first = devices[0].over._state.neighbours[0]
    liar = sorted(devices, key=lambda device: device.id)[first]
    for device in devices:
        answer = device.last_answer()
        if device is liar:
            seeds = np.frombuffer(answer.seeds, "<u4") ^ 1
            answer = msgspec.structs.replace(answer, seeds=seeds.tobytes())
        device.put("answer", answer)
    world.settle()
    assert world.task(task["task_id"])["state"] == "completed"
    (info,) = world.rounds(task["task_id"])
    assert info["faults"] == [{"device_id": liar.id, "reason": "wrong unmasking shares"}]


@pytest.mark.sampled(every=4)
def test_wrong_signatures_of_some_do_not_stop_the_others(begun: Any) -> None:
    world, task, devices = begun  # noqa: F811
    finish(world, devices, ANSWERED[:4])
    for index, device in enumerate(devices):
        device.question = device.fetch("GET", "question", packed.Question)
        confirmed = device.over.confirm(device.question)
        if index in (2, 6):
            confirmed = packed.Confirmed(signatures=bytes(len(confirmed.signatures)))
        device.put("inclusions", confirmed)
    world.settle()
    for device in devices:
        device.answer("unmasking")
    world.settle()
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=4)
def test_whoever_deals_shares_of_no_secret_is_named(begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fit their commitments, so no holder is to blame. The sum cannot be unmasked; the task is not held liable."""
    world, task, devices = begun  # noqa: F811
    liar = devices[4]
    finish(world, devices, ANSWERED[:1])
    real = participant.shares.split

    def random_shares(secret: bytes, threshold: int, holders: int, randomness: Any) -> list[bytes]:
        drawn = np.frombuffer(secrets.token_bytes(36 * holders), "<u4") % np.uint32(PRIME)
        return [row.astype("<u4").tobytes() for row in drawn.reshape(holders, 9)]

    for device in devices:
        monkeypatch.setattr(participant.shares, "split", random_shares if device is liar else real)
        device.answer("sharing")
    monkeypatch.undo()
    world.settle()
    finish(world, devices, ANSWERED[2:])
    (info,) = world.rounds(task["task_id"])
    assert info["phase"] == "failed"
    assert info["faults"] == [{"device_id": liar.id, "reason": "dealt wrong shares"}]
    assert world.task(task["task_id"])["failed_rounds"] == 0
