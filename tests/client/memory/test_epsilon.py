"""Epsilons against two others: the dp-accounting library's, and what the Gaussian mechanism exactly has."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from archipel import bundle as b
from archipel.bundle import roles
from archipel.client.memory.privacy import epsilon, noise_for, noise_of

# dp-accounting 0.6.0: RdpAccountant(orders=[1 + 10 ** (k / 200) for k in range(-600, 1000)]) after
# compose(GaussianDpEvent(multiplier), count).
LIBRARY = [
    (1.0, 1, 1e-6, 5.22154),
    (1.0, 1, 1e-3, 3.53658),
    (1.0, 10, 1e-6, 20.55195),
    (0.5, 20, 1e-6, 85.22916),
    (2.0, 100, 1e-6, 37.42181),
    (8.0, 3, 1e-6, 0.97963),
    (8.0, 3, 1e-3, 0.58198),
    (0.3, 1, 1e-6, 21.97573),
]


def exact(multiplier: float, count: int, delta: float) -> float:
    """Balle and Wang 2018, theorem 8; `count` Gaussian mechanisms are one with a smaller multiplier."""
    shift = np.sqrt(count) / multiplier

    def excess(candidate: float) -> float:
        tail = norm.logcdf(-shift / 2 - candidate / shift)
        return float(norm.cdf(shift / 2 - candidate / shift) - np.exp(candidate + tail) - delta)

    return float(brentq(excess, 0.0, 500.0))


@pytest.mark.parametrize(("multiplier", "count", "delta", "expected"), LIBRARY)
def test_epsilon_is_that_of_others(multiplier: float, count: int, delta: float, expected: float) -> None:
    found = epsilon(count / (2 * multiplier**2), delta)
    assert found == pytest.approx(expected, rel=1e-4)
    assert exact(multiplier, count, delta) < found < 1.2 * exact(multiplier, count, delta)


@pytest.mark.parametrize(("multiplier", "count", "delta", "target"), LIBRARY)
def test_the_noise_for_an_epsilon(multiplier: float, count: int, delta: float, target: float) -> None:
    found = noise_for(target, count, delta)
    assert found == pytest.approx(multiplier, rel=1e-4)
    assert epsilon(count / (2 * found**2), delta) <= target


@pytest.mark.parametrize(("target", "passes"), [(0.0, 1), (float("inf"), 1), (1.0, 0)])
def test_an_epsilon_that_no_noise_has(target: float, passes: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        noise_for(target, passes)


def test_nothing_spent_has_no_epsilon() -> None:
    assert epsilon(0.0) == 0.0
    assert 0 <= epsilon(1e-12) < 1e-4
    assert epsilon(1e5) > 1e5


X = roles.Example(name="x", dtype="float32", shape=("n", 3))
OUT = roles.Update(
    name="o", tensor="o", kind="value", weighting="uniform", range=1.0, bits=8, dtype="float32", shape=()
)


def noise(multiplier: float, name: str = "z") -> roles.Noise:
    return roles.Noise(
        name=name, dtype="int32", shape=(3,), distribution="discrete_gaussian", scale=9.0, multiplier=multiplier
    )


def manifest(*phases: b.Phase, finish: tuple[roles.Noise, ...] = (), **programs: b.Program) -> b.Manifest:
    ending = b.Program(kind="finish", file="f", inputs=finish, outputs=(OUT,))
    return b.Manifest(
        format=1, name="m", programs={"finish": ending, **programs}, parameters=(), files={}, schedule=phases,
        limits=b.Limits(peak_bytes=1, flops_per_example=1, upload_bytes=1),
        privacy=b.PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=16),
    )  # fmt: skip


def train(*noises: roles.Noise) -> b.Program:
    return b.Program(kind="train", file="t", inputs=(X, *noises), outputs=())


def test_each_pass_releases_an_example_once() -> None:
    epochs = b.Phase(program="train", batch_size=4, epochs=3)
    noisy = manifest(epochs, train=train(noise(2.0), noise(1.5, "other")))
    assert noise_of(noisy, "training", "", 100) == ("added", pytest.approx(3 / (2 * 1.5**2)))
    # 25 minibatches are a pass over 100 examples, so of 26 steps one example may be in two.
    for steps, passes in ((1, 1), (25, 1), (26, 2), (51, 3)):
        part = manifest(b.Phase(program="train", batch_size=4, steps=steps), train=train(noise(1.0)))
        assert noise_of(part, "training", "", 100) == ("added", passes / 2)
    # A minibatch that would hold more than there is holds all, each time.
    part = manifest(b.Phase(program="train", batch_size=4, steps=7), train=train(noise(1.0)))
    assert noise_of(part, "training", "", 3) == ("added", 7 / 2)


def test_a_step_without_noise_takes_the_protection_of_the_others_away() -> None:
    phases = b.Phase(program="train", batch_size=4, epochs=1), b.Phase(program="head", batch_size=4, epochs=1)
    both = manifest(*phases, train=train(noise(1.0)), head=train(noise(2.0)))
    assert noise_of(both, "training", "", 9) == ("added", 1 / 2 + 1 / 8)
    assert noise_of(manifest(*phases, train=train(noise(1.0)), head=train()), "training", "", 9) == ("added", 0.0)
    assert noise_of(manifest(*phases, train=train(), head=train()), "training", "", 9) == ("none", 0.0)
    unstated = manifest(*phases, train=train(noise(1.0)), head=train(noise(0.0)))
    assert noise_of(unstated, "training", "", 9) == ("added", 0.0)


def test_noise_on_the_update_covers_the_training() -> None:
    phase = b.Phase(program="train", batch_size=4, epochs=5)
    assert noise_of(manifest(phase, finish=(noise(2.0),), train=train()), "training", "", 9) == ("added", 1 / 8)
    assert noise_of(manifest(phase, finish=(noise(0.0),), train=train()), "training", "", 9) == ("added", 0.0)


def test_analyses_and_evaluations_release_once() -> None:
    looks = {
        name: b.Program(kind="analyze", file="a", inputs=(X, *ports), outputs=(OUT,))
        for name, ports in (("look", (noise(4.0),)), ("stare", ()))
    }
    both = manifest(evaluate=b.Program(kind="evaluate", file="e", inputs=(X,), outputs=()), **looks)
    assert noise_of(both, "analytics", "look", 9) == ("added", 1 / 32)
    assert noise_of(both, "analytics", "stare", 9) == ("none", 0.0)
    assert noise_of(both, "evaluation", "", 9) == ("none", 0.0)
