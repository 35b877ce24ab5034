"""One of three devices sends a packed update that no program of its bundle makes.

Who: a device that may send any bytes. What it wants: the server's memory, another's place in a vector, or the model.
The bundle's network has 53 elements, so a rotated update is one block of 64. With a clip of 1 an element's range is
4 / sqrt(64) = 1/2; 4 bits have 7 steps in it, of 1/14 each. What stops the device: the bytes of each update have one
size; places grow and are in the vector; numbers are finite and in their range; and the norm is at most the clip and
what rounding by chance can add, 1/14 (sqrt(64) / 2 + 12) = 8/7 for one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from archipel.bundle import Bundle, PrivacyPolicy, pack, read_weights, write_weights
from archipel.protocol.bits import pack_bits
from archipel.protocol.messages import Complaints
from archipel.protocol.narrow import masked_size, pack_masked
from archipel.protocol.plain import encode_plain
from archipel.protocol.uploads import plan_layout
from archipel.protocol.vector import Layout
from tests.support.devices import Device, Keys
from tests.support.fixtures.server import *  # noqa: F403
from tests.support.fixtures.strategies import make as make
from tests.support.world import World

POLICY = PrivacyPolicy(
    modes=("secure", "plain"), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=24, colluders=0.0
)  # fmt: skip
ELEMENTS, BLOCK, STEP = 53, 64, 1 / 14
Begun = tuple[Bundle, list[Device], Layout, dict[str, Any]]
Begin = Callable[..., Begun]


@pytest.fixture
def begin(world: World, keys: Keys, make: Callable[..., Bundle]) -> Begin:
    """A round of three devices, whose bundle has these options, in its first phase."""

    def begun(privacy: str, **options: Any) -> Begun:
        options = {"clip": 1.0, "bits": 4, "weighting": "uniform", **options}
        bundle = make("fedavg", key=keys.publisher, privacy=POLICY, strategy_options=options)
        world.bundle_file = bundle.folder.with_suffix(".bundle")
        pack(bundle.folder, world.bundle_file)
        task = world.create_task(privacy=privacy, cohort=3, threshold=2 if privacy == "secure" else None)
        devices = world.add_devices(3)
        world.start_round(devices)
        plan = devices[0].plan
        assert plan is not None
        return bundle, devices, plan_layout(plan, bundle.manifest), task

    return begun


def nothing(layout: Layout) -> dict[str, np.ndarray]:
    return {port.name: np.zeros(tuple(map(int, port.shape)), np.float32) for port in layout.updates}


def packed(layout: Layout) -> str:
    [name] = [port.name for port in layout.updates if port.carries]
    return name


def steps_of(count: int) -> np.ndarray:
    """A rotated update of which so many elements have the largest number of steps."""
    numbers = np.zeros(BLOCK, np.int32)
    numbers[:count] = 7
    return numbers


def rotated(layout: Layout, numbers: np.ndarray) -> bytes:
    parts = dict(read_weights(encode_plain(layout, nothing(layout))))
    return write_weights({**parts, packed(layout): np.frombuffer(pack_bits(numbers.view(np.uint32), 4), np.uint8)})


def refused(device: Device, world: World, data: bytes, *words: str) -> None:
    status, answer = device.try_upload(data)
    assert status in (413, 422), answer
    assert any(each in answer["detail"] for each in words), answer
    assert world.stored("updates") == {}


@pytest.mark.sampled(every=6)
def test_the_largest_elements(begin: Begin, world: World) -> None:
    _, devices, layout, task = begin("plain", compress="top_k", share=3 / ELEMENTS)
    parts, name = read_weights(encode_plain(layout, nothing(layout))), packed(layout)

    def sent(places: Any = (4, 7, 9), values: Any = (0.5, -0.5, 0.5), **more: Any) -> bytes:
        own = {f"{name}/places": np.array(places, np.uint32), f"{name}/values": np.array(values, np.float32)}
        return write_weights({**parts, **own, **more})

    for places in ((4, 7, 53), (4, 7, 2**32 - 1), (4, 4, 7), (9, 7, 4)):
        refused(devices[0], world, sent(places), "its places must grow and be below 53")
    for value in (np.nan, np.inf, 1.1, -3e38):
        refused(devices[0], world, sent(values=(0, 0, value)), "is not a number up to 1.0")
    # Three elements of 0.6 have the norm 1.04.
    refused(devices[0], world, sent(values=(0.6, 0.6, 0.6)), "the norm of its deltas is 1.0", "1.03923")
    refused(devices[0], world, sent((4, 7, 9, 11), (0.1,) * 4), "bytes, an update of this round has")
    refused(devices[0], world, sent(extra=np.zeros(100_000, np.float32)), "bytes, an update of this round has")
    for device in devices:
        device.upload(sent())
    world.settle()
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=4)
def test_rotated_elements(begin: Begin, world: World) -> None:
    _, devices, layout, task = begin("plain", compress="rotation")
    below = steps_of(0)
    below[5] = -8
    refused(devices[0], world, rotated(layout, below), "has -8 steps, at most 7 are allowed")
    parts = dict(read_weights(rotated(layout, steps_of(0))))
    floats = write_weights({**parts, packed(layout): np.zeros(BLOCK, np.float32)})
    refused(devices[0], world, floats, "bytes, an update of this round has")
    # 7 steps are 1/2, so n of them have the norm sqrt(n) / 2. 1 + 8/7 is between those of 18 and 19.
    refused(devices[0], world, rotated(layout, steps_of(19)), "the norm of its deltas is 2.179")
    for device, count in zip(devices, (18, 0, 0), strict=True):
        device.upload(rotated(layout, steps_of(count)))
    world.settle()
    [shown] = world.rounds(task["task_id"])
    # Less than that, because what lies in the 11 elements of padding is no parameter.
    assert 0.5 < shown["step_norm"] < np.sqrt(18) / 2 / 3 + 1e-6


def run_secure(world: World, begun: Begun, rows: list[np.ndarray]) -> dict[str, Any]:
    """Masked vectors with these rotated elements, in steps. Returns the round."""
    _, devices, layout, task = begun
    world.run_to("masking", devices)
    for device, row in zip(devices, rows, strict=True):
        assert device.plan is not None
        assert device.plan.narrow
        vector = layout.encode(nothing(layout), modulus_bits=device.plan.modulus_bits, max_cohort=3)
        vector[:BLOCK] = row % 2**device.plan.modulus_bits
        masked = device.participant.mask(vector, device.ask("GET", f"{device.round}/complaints", Complaints))
        device.upload(pack_masked(layout, masked, device.plan))
    world.settle()
    for phase in ("confirming", "unmasking"):
        for device in devices:
            device.answer(phase)
        world.settle()
    [shown] = world.rounds(task["task_id"])
    return shown


HONEST = [np.tile([1, -1], BLOCK // 2), np.tile([1, 1, -1, -1], BLOCK // 4)]
OTHERS = sum(HONEST)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        # A sum of three has up to 21 steps, so an entry takes 6 bits, and their numbers are from -32 to 31.
        (31 - OTHERS, "beyond ±21, the most that 3 devices can sum to"),
        # 64 elements of 21 steps: 21/14 * 8 = 12. Three clips, and sqrt(3) 8/7 of rounding, are 4.98.
        (21 - OTHERS, "the norm of the deltas is 12, and can be 4.98"),
        # Of what lies beyond those bits nothing is left.
        (63 - OTHERS, None),
    ],
)  # fmt: skip
@pytest.mark.sampled(every=4)
def test_a_masked_vector_beyond_its_bounds(begin: Begin, world: World, row: np.ndarray, reason: str | None) -> None:
    shown = run_secure(world, begin("secure", compress="rotation"), [row, *HONEST])
    assert shown["phase"] == ("failed" if reason else "committed")
    assert reason is None or reason in shown["reason"]
    if reason is None:
        assert 4 * STEP / 3 < shown["step_norm"] <= 8 * STEP / 3  # of 64 times -1


@pytest.mark.sampled(every=4)
def test_a_masked_vector_of_another_size(begin: Begin, world: World) -> None:
    _, devices, layout, _ = begin("secure", compress="rotation")
    world.run_to("masking", devices)
    plan = devices[0].plan
    assert plan is not None
    size = masked_size(layout, 3, plan.modulus_bits, narrow=True)
    # 64 elements of 6 bits, four numbers of 16 bits, whose sums of three need 18, and a count up to 3, of 3 bits.
    assert size == 48 + 4 * 3 + 1
    for length in (size - 1, size + 1, layout.length * 4):
        refused(devices[0], world, bytes(length), f"an update of this round has {size}")
