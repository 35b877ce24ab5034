"""How far a step may go after the steps before it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from archipel.errors import BoundError
from archipel.strategies.step_limits import History, Usual, keep_within
from archipel.strategies.strategy import StepBound


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([], math.inf),
        ([0.0, 0.0], math.inf),  # rounds in which nobody had anything to say
        ([0.1], 0.3),
        ([0.1, 0.4], 1.2),  # of two the larger
        ([0.4, 0.1], 1.2),
        ([0.4, 0.1, 0.2], 0.6),  # of three the median
        ([0.4, 0.0, 0.1, 0.2], 0.6),
        ([0.1, 0.2, 0.4, 9.0], 0.75),  # 9 counts as 0.3: median of 0.1, 0.2, 0.3, 0.4
        ([0.1, 0.2, 0.4, 0.001], 0.45),
    ],
)
def test_three_times_the_median(norms: list[float], expected: float) -> None:
    assert Usual(norms).limit == pytest.approx(expected)


def test_the_limit_after_many_rounds_is_found_quickly() -> None:
    assert Usual(np.random.default_rng(0).uniform(0.9, 1.1, 20_000)).limit == pytest.approx(3.0, rel=0.01)


def test_parameters_and_state_are_scaled_by_one_factor() -> None:
    """The state went ten times as far as usual, the parameters did not."""
    before = {"w": np.float32([1, 1])}, {"c": np.float32([0.0])}
    after = {"w": np.float32([1, 2])}, {"c": np.float32([10.0])}
    moved, state, step = keep_within(before, after, StepBound(5, 20), History([1.0] * 3, [1.0] * 3))
    np.testing.assert_allclose(moved["w"], [1, 1.3], rtol=1e-6)
    np.testing.assert_allclose(state["c"], [3.0], rtol=1e-6)
    assert (step.parameters, step.state, step.scale) == pytest.approx((0.3, 3.0, 0.3))
    assert "scaled down by 0.3" in step.note
    assert moved["w"].dtype == state["c"].dtype == np.float32


def test_a_usual_step_is_left_as_it_is() -> None:
    after = {"w": np.float32([1, 2])}, {}
    moved, _, step = keep_within(({"w": np.float32([1, 1])}, {}), after, StepBound(5), History([0.5] * 3))
    assert moved is after[0]
    assert (step.parameters, step.scale, step.note) == (1.0, 1.0, "")


def test_the_order_of_the_tensors_changes_no_bit() -> None:
    """A run that goes on reads its tensors from a file, which has them in another order."""
    rng = np.random.default_rng(0)
    before = {name: rng.normal(size=5).astype(np.float32) for name in "abcdefgh"}
    after = {name: array + rng.normal(size=5).astype(np.float32) for name, array in before.items()}
    names = [rng.permutation(list(after)) for _ in range(20)]
    steps = [
        keep_within((before, {}), ({n: after[n] for n in order}, {}), StepBound(50), History())[2] for order in names
    ]
    assert len({step.parameters for step in steps}) == 1
    assert steps[0].parameters == pytest.approx(
        math.sqrt(sum(np.linalg.norm(after[n].astype(float) - before[n]) ** 2 for n in after)), rel=1e-12
    )


@pytest.mark.parametrize(("bound", "what"), [(StepBound(0.9, 20), "parameters"), (StepBound(5, 9), "state")])
def test_a_step_beyond_the_strategys_bound_is_rejected(bound: StepBound, what: str) -> None:
    before = {"w": np.float32([1, 1])}, {"c": np.float32([0.0])}
    after = {"w": np.float32([1, 2])}, {"c": np.float32([10.0])}
    with pytest.raises(BoundError, match=f"rejected: the step of the {what}"):
        keep_within(before, after, bound, History())
