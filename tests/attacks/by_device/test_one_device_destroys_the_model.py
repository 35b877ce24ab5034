"""One of ten devices of a secure round wants the model destroyed.

The server sees only the sum, so a device may mask any numbers it likes: entries far beyond what its program's clipping
gives, and a weight that cancels the others', so that the mean is divided by next to nothing. What stops it: the signed
manifest says what ten devices that keep to their program can sum to, and a sum beyond that is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import Bundle
from archipel.protocol.bounds import entries
from tests.attacks.bounds_federation import *  # noqa: F403
from tests.attacks.bounds_federation import DEVICES, LARGEST, TASK, Digits, make_bundle
from tests.support.devices import Keys
from tests.support.world import World

Attack = Callable[[np.ndarray, np.ndarray], np.ndarray]


def entries_beyond_the_range(mine: np.ndarray, others: np.ndarray) -> np.ndarray:
    """As far as the sum's own encoding allows: nine times what a device may send, in every entry."""
    attack = mine.copy()
    attack[:-1] = np.sign(mine[:-1] + 0.5) * (DEVICES - 1) * LARGEST
    return attack


def a_weight_that_cancels(mine: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The others' weights, which it can guess, with a minus: the sum of weights is one step of the encoding."""
    attack = mine.copy()
    attack[-1] = 1 - others[-1]
    return attack


def both(mine: np.ndarray, others: np.ndarray) -> np.ndarray:
    return a_weight_that_cancels(entries_beyond_the_range(mine, others), others)


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (entries_beyond_the_range, "the norm of the deltas is .*, and can be .* at most"),
        (a_weight_that_cancels, "the sum of weights is .*, which is not from"),
        (both, "the sum of weights is"),
    ],
)
@pytest.mark.sampled(every=8)
def test_a_sum_that_honest_devices_cannot_send_is_rejected(
    world: World, bundle: Bundle, attack: Attack, reason: str
) -> None:
    digits = Digits(bundle, world)
    task = world.create_task(**TASK)
    vectors = digits.begin(task)
    vectors[0] = attack(vectors[0], sum(vectors[1:]))
    shown = digits.finish(vectors)
    assert shown["phase"] == "failed", f"the model moved by {digits.step(shown):.4g}"

    assert re.search(rf"rejected: {reason}", shown["reason"])
    assert world.task(task["task_id"])["model"] == shown["weights_in"]


@pytest.mark.sampled(every=8)
def test_values_beyond_their_range_are_rejected(world: World, keys: Keys, tmp_path: Path) -> None:
    """What is no delta is bounded as well: FedNova multiplies the mean by how many steps devices say that they took."""
    bundle, world.bundle_file = make_bundle(tmp_path / "nova", keys.publisher, "fednova", weight_cap=10_000)
    digits = Digits(bundle, world)
    task = world.create_task(**TASK)
    vectors = digits.begin(task)
    starts = np.cumsum([0, *(entries(port) for port in digits.layout.updates)])
    [steps] = [place for place, port in enumerate(digits.layout.updates) if port.kind == "value"]
    vectors[0][starts[steps]] = (DEVICES - 1) * LARGEST
    shown = digits.finish(vectors)
    assert shown["phase"] == "failed", f"the model moved by {digits.step(shown):.4g}"
    assert re.search(r"rejected: an entry of 'fednova/.*' is .*, and can be .* at most", shown["reason"])
    assert world.task(task["task_id"])["model"] == shown["weights_in"]


@pytest.mark.sampled(every=4)
def test_an_honest_round_moves_the_model(world: World, bundle: Bundle) -> None:
    """The same devices without the attack: it is not the check that keeps the model where it is."""
    digits = Digits(bundle, world)
    task = world.create_task(**TASK)
    shown = digits.finish(digits.begin(task))
    assert shown["phase"] == "committed", shown["reason"]
    assert 0.001 < digits.step(shown) < 0.3
    assert shown["step_norm"] == pytest.approx(digits.step(shown), rel=1e-4)
    assert shown["step_scale"] == 1.0
