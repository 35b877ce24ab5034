"""A server wants sums of devices that add noise themselves with less noise, or none.

It asks for less, for finer steps (which make the same noise smaller), for a round that needs fewer devices, or for the
update of one device twice with two noises, whose mean has less. What stops it: the publisher signed how much noise a
sum has at least; the device computes from the plan alone what its round will have, and leaves; and it draws noise once
for a round, which is on the disk before anything is sent, so that a device that was killed sends that vector or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.errors import PolicyError
from archipel.protocol.messages import NoiseShare, RoundPlan
from archipel.protocol.noised.layout import NoisedLayout
from archipel.protocol.noised.shares import choose_share, noise_multiplier
from archipel.protocol.policy import check_plan, noisy_devices
from archipel.protocol.uploads import plan_layout
from tests.client.rounds.neighbours.server import digests
from tests.client.rounds.neighbours.test_left import file, vault
from tests.client.rounds.neighbours.world import NeighbourWorld, opened

# Over neighbours three devices hide each other by the policy, whatever the plan says. For a vector of 4 entries and a
# clip of 1000 steps, D is the root of 1000^2 + 4/4 + 1000 + 2/2.
ENOUGH = NoiseShare(deviation=math.ceil(math.sqrt((1000**2 + 1 + 1000 + 1) / 3)), steps=1000)
EVALUATION = {
    "kind": "evaluation", "metrics": {"mse": 1.0}, "min_contributors": 3, "protocol": "complete", "neighbours": 0,
    "partners": 0,
}  # fmt: skip
EVENTS = ("trained", "advertised", "shared", "masked", "uploaded", "confirmed", "unmasked")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[NeighbourWorld]:
    """The policy asks for a noise multiplier of 1."""
    with opened(tmp_path, weighting="uniform", noise_multiplier=1.0) as made:
        yield made


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"noise": None}, "devices add no noise"),
        ({"noise": NoiseShare(deviation=ENOUGH.deviation - 1, steps=1000)}, "the policy wants 1 times or more"),
        ({"noise": NoiseShare(deviation=ENOUGH.deviation, steps=1001)}, "the policy wants 1 times or more"),
        # More devices in the plan are none that a device can count.
        ({"noise": NoiseShare(deviation=500, steps=1000), "min_cohort": 6}, "the policy wants 1 times or more"),
        ({"noise": ENOUGH, "staleness_exponent": 0.5}, "synchronous"),
        ({"noise": ENOUGH, **EVALUATION}, "trainings"),
    ],
)
def test_a_device_leaves_before_it_sends_anything(world: NeighbourWorld, plan: dict[str, Any], reason: str) -> None:
    outcome = world.round(**plan)
    assert outcome.kind == "refused"
    assert reason in outcome.reason
    assert world.asked("member") == world.asked("update") == 0


def test_a_device_takes_part_with_enough_noise(world: NeighbourWorld) -> None:
    assert world.round(noise=ENOUGH).kind == "took_part"


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.sampled(every=6)
def test_a_device_that_was_killed_draws_no_second_noise(world: NeighbourWorld, event: str) -> None:
    begin = world.server.begin
    world.server.begin = lambda: begin(noise=ENOUGH)  # type: ignore[method-assign]
    drawn: list[bytes] = []
    world.killed_at(event)
    if event in ("advertised", "shared"):
        drawn.append(vault(world).read(file(world, ".vector")) or b"")
        assert len(drawn[0]) == 4 * world.server.layout.length
    world.finish()
    assert {step: len(found) for step, found in digests(world.server).items() if len(found) > 1} == {}
    assert world.agent.rounds[-1].result == "took_part"
    # Its peers send zeros, so the sum is what it drew.
    total = world.server.total
    assert total is not None
    if drawn:
        assert total.astype("<u4").tobytes() == drawn[0]
    world.check_erased()


def complete(**changes: Any) -> RoundPlan:
    values: dict[str, Any] = {
        "round_id": "a" * 32, "task_id": "b" * 32, "number": 1, "bundle": "c" * 64, "weights": "d" * 64,
        "privacy": "secure", "min_cohort": 6, "max_cohort": 9, "threshold": 7, "modulus_bits": 32, "colluders": 3,
        **changes,
    }  # fmt: skip
    return RoundPlan(**values)


@pytest.mark.parametrize(
    ("changes", "honest"),
    [({}, 4), ({"threshold": 8}, 5), ({"min_cohort": 9}, 6), ({"max_cohort": 8, "colluders": 2}, 5)],
)
def test_over_the_complete_graph_it_counts_the_fewest_survivors_less_the_colluders(
    world: NeighbourWorld, changes: dict[str, Any], honest: int
) -> None:
    manifest = world.server.opened.manifest
    policy = msgspec.structs.replace(manifest.privacy, colluders=1 / 3)

    def check(deviation: float) -> None:
        plan = complete(noise=NoiseShare(deviation=int(deviation), steps=100_000), **changes)
        check_plan(plan, policy, plan_layout(plan, manifest))

    needed = math.sqrt((100_000**2 + 100_000 + 2) / honest)
    check(math.ceil(needed))
    with pytest.raises(PolicyError, match=f"the noise of {honest} devices"):
        check(math.floor(needed))


def test_a_plain_round_has_the_noise_of_one_device(world: NeighbourWorld) -> None:
    manifest = world.server.opened.manifest
    policy = msgspec.structs.replace(manifest.privacy, modes=("secure", "plain"))

    def check(noise: NoiseShare | None) -> None:
        plan = complete(privacy="plain", colluders=0, noise=noise)
        check_plan(plan, policy, plan_layout(plan, manifest))

    for less in (None, ENOUGH, NoiseShare(deviation=1000, steps=1000)):
        with pytest.raises(PolicyError, match=r"devices add no noise|the noise of 1 devices"):
            check(less)
    check(NoiseShare(deviation=1001, steps=1000))


@pytest.mark.sampled(every=4)
def test_the_vector_has_noise_and_its_metrics_stay(world: NeighbourWorld) -> None:
    """What leaves the device: the same update, encoded twice, differs by the noise of two draws."""
    plan = complete(noise=ENOUGH)
    layout = plan_layout(plan, world.server.opened.manifest)
    arrays = {"dw": np.array([0.5, -0.5, 1.0], np.float32), "archipel/training/loss": np.array(3.0, np.float32)}
    encode: Callable[[], np.ndarray] = lambda: layout.encode(arrays, modulus_bits=24, max_cohort=9).astype(np.int64)  # noqa: E731
    draws = np.array([encode() - encode() for _ in range(400)])
    draws = (draws + 2**23) % 2**24 - 2**23
    assert draws.shape == (400, 4)
    assert draws.std() == pytest.approx(math.sqrt(2) * ENOUGH.deviation, rel=5 / math.sqrt(2 * draws.size))


@pytest.mark.parametrize("multiplier", [0.5, 2.0])
@pytest.mark.sampled(every=4)
def test_a_server_with_colluders_tells_no_better_than_the_account_allows(
    world: NeighbourWorld, multiplier: float
) -> None:
    """It sees the sum of six survivors before any noise of its own, knows what five of them changed, and has the noise
    of three that work with it. No test of whether the sixth changed anything can have a rate of true positives above
    that of false ones by more than 2 Phi(1 / (2 z)) - 1 (Dong, Roth and Su 2022, corollary 2.13)."""
    manifest, trials, generator = world.server.opened.manifest, 400, Random(7)
    share = choose_share(multiplier, 4, 3)
    plan = complete(noise=share, min_cohort=6, threshold=6)
    planned = plan_layout(plan, manifest)
    assert isinstance(planned, NoisedLayout)
    layout = NoisedLayout(planned.updates, noise=share, seed=planned.seed, randomness=generator.randbytes)
    longest = {"dw": np.full(3, 2 / math.sqrt(3), np.float32)}
    nothing = {"dw": np.zeros(3, np.float32)}
    direction = layout._rotated(layout.check(longest))

    def seen(update: dict[str, np.ndarray]) -> float:
        sent = [layout.encode(each, modulus_bits=32, max_cohort=9) for each in (update, nothing, nothing)]
        whole = np.sum(sent, axis=0, dtype=np.uint32).view(np.int32).astype(np.float64)
        return float(whole @ direction)

    half = float(direction @ direction) / 2
    present, absent = (np.array([seen(each) for _ in range(trials)]) > half for each in (longest, nothing))
    advantage, spread = present.mean() - absent.mean(), 4 * math.sqrt(0.5 / trials)
    z = noise_multiplier(share, layout.length, noisy_devices(plan, manifest.privacy))
    assert z == pytest.approx(multiplier, rel=0.04)
    assert advantage < 2 * NormalDist().cdf(1 / (2 * z)) - 1 + spread
    # The attack is a good one: with half of the noise it would break the bound.
    assert advantage > 2 * NormalDist().cdf(0.8 / (2 * z)) - 1 - spread
