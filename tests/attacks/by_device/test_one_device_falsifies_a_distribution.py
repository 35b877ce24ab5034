"""One of ten devices lies when devices count themselves in bins, each in that of its own accuracy.

Who: a device that may send any numbers. What it wants: a histogram of its own making, and with it other deciles and
another worst tenth. What stops it: counts that are not whole, below 0, or with another sum than the number of devices
that count themselves are refused, of a plain round in the device's own update, of a secure round in the sum. So it
moves one count, as a device that lies about its accuracy does.

What does not: in a secure round nobody sees whether a device adds 2 to one bin and takes 1 from another in which others
are. SECURITY.md says so.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import open_bundle, write_weights
from archipel.errors import BoundError, MessageError, ProtocolError
from archipel.protocol.messages import Bins
from archipel.protocol.plain import decode_plain
from archipel.protocol.sealed import public_bytes
from archipel.protocol.uploads import BINS, CONTRIBUTORS, metric_arrays, upload_layout
from archipel.protocol.vector import DecodedSum, Layout, Vector
from tests.support.devices import Device, Keys
from tests.support.fixtures.server import *  # noqa: F403
from tests.support.world import World

RANGES = {"accuracy": 1.0}
TEN = {"accuracy": Bins(low=0.0, high=1.0, count=10)}
ENTRY = BINS + "accuracy"
HONEST = [0.55] * 4 + [0.75] * 6  # in bins 6 and 8: before the first bin there is a count of those below it


@pytest.fixture(scope="module")
def layout(bundle_file: Path, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    cache = tmp_path_factory.mktemp("cache")
    manifest = open_bundle(bundle_file, [public_bytes(keys.publisher)], cache).manifest
    return upload_layout(manifest, "evaluation", "", RANGES, distributions=TEN)


def encode(layout: Layout, accuracy: float) -> Vector:
    arrays = metric_arrays({"accuracy": accuracy}, RANGES, 10, 1000, TEN)
    return layout.encode(arrays, modulus_bits=layout.modulus_bits(10), max_cohort=10)


def lie(layout: Layout, vector: Vector, counts: dict[int, int], contributors: int) -> Vector:
    """The vector with these counts by bin, modulo that of the round."""
    places, start = {}, 0
    for port in layout.updates:
        places[port.name] = start
        start += int(np.prod(port.shape, dtype=int))
    changed, modulus = vector.copy(), 1 << layout.modulus_bits(10)
    changed[places[ENTRY] : places[ENTRY] + 12] = 0
    for place, count in counts.items():
        changed[places[ENTRY] + place] = count % modulus
    changed[places[CONTRIBUTORS]] = contributors
    return changed


def checked_sum(layout: Layout, vectors: list[Vector]) -> DecodedSum:
    """What the server makes of the sum that unmasking gives it."""
    bits = layout.modulus_bits(10)
    total = (np.sum(vectors, axis=0, dtype=np.uint64) % (1 << bits)).astype(np.uint32)
    decoded = layout.decode_sum(total, cohort=10, modulus_bits=bits)
    layout.check_sum(decoded, 10)
    return decoded


@pytest.mark.parametrize(
    ("counts", "contributors", "reason"),
    [
        ({6: 1, 7: 1}, 1, "counts 11 devices"),
        ({6: 7}, 1, "counts 16 devices"),
        ({1: 2, 2: -1}, 1, "and -1 in one of its bins"),
        ({}, 1, "counts 9 devices"),
        # It may say that it is two devices; then there are more than are in the round.
        ({6: 2}, 2, "beyond ±10, the most that 10 devices can sum to"),
        ({6: 13}, 1, "beyond ±10, the most that 10 devices can sum to"),
    ],
)
def test_sums_that_honest_devices_cannot_send_are_rejected(
    layout: Layout, counts: dict[int, int], contributors: int, reason: str
) -> None:
    vectors = [encode(layout, accuracy) for accuracy in HONEST]
    assert checked_sum(layout, vectors).values[ENTRY].tolist() == [0, 0, 0, 0, 0, 0, 4, 0, 6, 0, 0, 0]
    vectors[0] = lie(layout, vectors[0], counts, contributors)
    with pytest.raises((BoundError, ProtocolError), match=reason):
        checked_sum(layout, vectors)


def test_a_lie_within_the_bounds_moves_one_count(layout: Layout) -> None:
    vectors = [encode(layout, accuracy) for accuracy in HONEST]
    vectors[0] = lie(layout, vectors[0], {10: 1}, 1)
    assert checked_sum(layout, vectors).values[ENTRY].tolist() == [0, 0, 0, 0, 0, 0, 3, 0, 6, 0, 1, 0]


@pytest.mark.parametrize(
    "counts",
    [{6: 1.0, 7: 1.0}, {6: 0.5, 7: 0.5}, {6: 2.0}, {6: 1.0, 7: 1.0, 8: -1.0}, {}, {6: float("nan")}],
)
def test_a_plain_update_counts_its_device_once(layout: Layout, counts: dict[int, float]) -> None:
    arrays = metric_arrays({"accuracy": 0.55}, RANGES, 10, 1000, TEN)
    assert decode_plain(write_weights(arrays), layout)[ENTRY][6] == 1
    wrong = np.zeros(12, np.float32)
    for place, count in counts.items():
        wrong[place] = count
    with pytest.raises(MessageError, match=r"rejected: .* counts|is not a number up to 1"):
        decode_plain(write_weights({**arrays, ENTRY: wrong}), layout)


def test_half_a_device_counts_nothing(layout: Layout) -> None:
    arrays = metric_arrays({"accuracy": 0.55}, RANGES, 10, 1000, TEN)
    half = {ENTRY: arrays[ENTRY] / 2, CONTRIBUTORS: np.array(0.5, np.float32)}
    with pytest.raises(MessageError, match="rejected"):
        decode_plain(write_weights({**arrays, **half}), layout)


def run(world: World, layout: Layout, vectors: list[Vector]) -> tuple[dict[str, object], bytes]:
    """A secure round with these vectors, and all that the server had stored when every device had sent its own."""
    task = world.create_task(
        kind="evaluation", metrics=RANGES, cohort=10, min_cohort=10, threshold=None, max_examples=1000,
        distributions={"accuracy": {"low": 0, "high": 1, "count": 10}}, min_contributors=10,
    )  # fmt: skip
    devices: list[Device] = world.add_devices(10)
    world.start_round(devices)
    for device, vector in zip(devices, vectors, strict=True):
        assert device.plan is not None
        assert device.plan.modulus_bits == layout.modulus_bits(10)
        device.vector = vector
    world.run_to("unmasking", devices)
    stored = b"".join(world.stored("").values())
    for device in devices:
        device.answer("unmasking")
    world.settle()
    [shown] = world.rounds(task["task_id"])
    return shown, stored


@pytest.mark.slow
def test_the_server_keeps_nothing_of_a_spoiled_histogram(world: World, layout: Layout) -> None:
    vectors = [encode(layout, accuracy) for accuracy in HONEST]
    shown, _ = run(world, layout, [lie(layout, vectors[0], {6: 1, 7: 1}, 1), *vectors[1:]])
    assert (shown["phase"], shown["spoiled"], shown["result"]) == ("failed", True, None)


@pytest.mark.sampled(every=3)
def test_the_server_is_told_how_many_and_not_who(world: World, layout: Layout) -> None:
    vectors = [encode(layout, accuracy) for accuracy in HONEST[::-1]]
    shown, stored = run(world, layout, vectors)
    assert shown["result"]["distributions"]["accuracy"]["counts"] == [0, 0, 0, 0, 0, 0, 4, 0, 6, 0, 0, 0]  # type: ignore[index]
    width = layout.modulus_bits(10) // 8
    for vector in vectors:
        unmasked = vector.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
        assert unmasked not in stored, "a vector lies there without its mask"
