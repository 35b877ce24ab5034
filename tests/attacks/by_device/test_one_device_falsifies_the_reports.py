"""One of ten devices of a secure round lies in what it reports beside its update: its loss, and whether it clipped.

The server sees sums alone, so the device may mask any numbers. It wants the curves to show nonsense, or the clip, which
follows from how many devices say that they clipped, to leave its bounds: so large that its own updates count for more,
or so small that nobody's count. What stops it: a sum of reports that ten devices which run the signed program cannot
have sent is rejected, and no sum moves the clip beyond what the publisher signed. Within these bounds it can lie.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import Bundle
from archipel.protocol.metrics.training_metrics import CLAMPED, CLIPPED, TRAINING, UPDATE_CLIP
from archipel.protocol.metrics.training_metrics import DEVICES as COUNTS
from archipel.protocol.uploads import clip_input, plan_layout
from tests.attacks.bounds_federation import *  # noqa: F403
from tests.attacks.bounds_federation import DEVICES, LARGEST, TASK, Digits, make_bundle
from tests.support.devices import Keys
from tests.support.world import World

LOSS_RANGE = 64.0


@pytest.fixture(scope="session")
def made(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    """The server adapts the clip."""
    return make_bundle(tmp_path_factory.mktemp("adapting") / "digits", keys.publisher, clip=None)


def place(digits: Digits, name: str) -> int:
    """Where the entry is among a device's reports, counted from their end."""
    plan = digits.devices[0].plan
    assert plan is not None
    names = [port.name for port in plan_layout(plan, digits.bundle.manifest).updates]
    return names.index(name) - len(names)


def others(digits: Digits, at: int) -> int:
    return int(sum(report[at] for report in digits.reports[1:]))


def honest_step(digits: Digits, vectors: list[np.ndarray]) -> float:
    """The norm of the weighted mean of the deltas, from the vectors: their step is the range's over LARGEST."""
    [delta, *others, weight] = digits.layout.updates
    assert all(each.kind == "delta" and each.range == delta.range for each in others)
    total = sum(vectors).astype(float)
    return float(np.linalg.norm(total[:-1] * delta.range) / (total[-1] * weight.range))


@pytest.mark.parametrize(
    ("name", "lie", "reason"),
    [
        (COUNTS + CLIPPED, -DEVICES, "'archipel/devices/update/clipped' is -10, and no device has less than 0 of it"),
        (CLAMPED + "loss", -LARGEST, "'archipel/clamped/loss' is -1, and no device has less than 0 of it"),
        (COUNTS + CLIPPED, DEVICES + 1, "is beyond ±10, the most that 10 devices can sum to"),
        (TRAINING + "loss", DEVICES * LARGEST, "an entry of 'archipel/training/loss' is 640, and can be"),
        (TRAINING + "accuracy", -DEVICES * LARGEST, "an entry of 'archipel/training/accuracy' is 10, and can be"),
    ],
)
@pytest.mark.sampled(every=6)
def test_sums_that_honest_devices_cannot_send_are_rejected(
    world: World, bundle: Bundle, name: str, lie: int, reason: str
) -> None:
    digits = Digits(bundle, world)
    task = world.create_task(**TASK)
    vectors = digits.begin(task)
    at = place(digits, name)
    digits.reports[0][at] = lie - others(digits, at)
    shown = digits.finish(vectors)
    assert shown["phase"] == "failed", shown["result"]
    assert reason in shown["reason"]
    assert world.task(task["task_id"])["model"] == shown["weights_in"]


@pytest.mark.sampled(every=8)
def test_within_its_bounds_a_lie_moves_no_weight_and_no_curve_beyond_its_range(world: World, bundle: Bundle) -> None:
    """The first round tells of ten clipped updates and the largest loss, the second of none: what one device can do."""
    port = clip_input(bundle.program("finish"))
    assert port is not None
    assert (port.default, port.maximum) == (1.0, 1.0)
    digits = Digits(bundle, world)
    task = world.create_task(**{**TASK, "rounds": 3})
    clips = []
    for clipped in (DEVICES, 0, None):
        vectors = digits.begin(task)
        clips.append(digits.devices[0].plan.hyperparameters[UPDATE_CLIP])  # type: ignore[union-attr]
        if clipped is None:
            break
        counted, loss = place(digits, COUNTS + CLIPPED), place(digits, TRAINING + "loss")
        digits.reports[0][counted] = clipped - others(digits, counted)
        weights = int(sum(vector[-1] for vector in vectors))
        digits.reports[0][loss] = weights - others(digits, loss)
        shown = digits.finish(vectors)
        assert shown["phase"] == "committed", shown["reason"]
        assert shown["result"]["clipped"] == clipped
        assert shown["result"]["metrics"]["training loss"] == pytest.approx(LOSS_RANGE, rel=1e-6)
        # The updates are honest, and they alone make the weights.
        assert digits.step(shown) == pytest.approx(honest_step(digits, vectors), rel=1e-3)
    # The largest clip is signed, so it stays; and without clipped updates it falls by a tenth.
    assert clips == pytest.approx([1.0, 1.0, np.exp(-0.1)])
