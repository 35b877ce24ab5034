"""What lets a rollout go on and what does not, as a table; and its states, enumerated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from archipel.errors import ServerError
from archipel.protocol.operator.registry import Gate
from archipel.protocol.operator.results import RoundResult
from archipel.server.registry.gates import Verdict, check_gate, judge
from archipel.server.registry.rollouts import RULES, Move, decide

GATE: dict[str, Any] = {"metric": "m", "range": 10.0, "better": "higher", "min_devices": 3, "max_devices": 9}


def found(value: float | None, devices: int = 3, examples: float | None = 50.0) -> RoundResult:
    return RoundResult(devices=devices, examples=examples, metrics={} if value is None else {"m": value})


def beyond(share: float) -> RoundResult:
    """As good as can be, but a bound is no measurement."""
    return RoundResult(devices=3, examples=50.0, metrics={"m": 10.0}, clamped={"m": share, "other": 1.0})


@pytest.mark.parametrize(
    ("better", "limits", "candidate", "baseline", "passes"),
    [
        ("higher", {"max_loss": 0.5}, 2.0, 2.0, True),
        ("higher", {"max_loss": 0.5}, 1.5, 2.0, True),
        ("higher", {"max_loss": 0.5}, 1.25, 2.0, False),
        ("higher", {"max_loss": 0.5}, 9.0, 2.0, True),
        ("higher", {"max_loss": 0.0}, 2.0, 2.0, True),
        ("higher", {"max_loss": 0.0}, 1.75, 2.0, False),
        ("lower", {"max_loss": 0.5}, 2.5, 2.0, True),
        ("lower", {"max_loss": 0.5}, 2.75, 2.0, False),
        ("lower", {"max_loss": 0.5}, 0.0, 2.0, True),
        ("lower", {"max_loss": 0.5}, -3.0, -2.0, True),
        ("lower", {"max_loss": 0.5}, -1.0, -2.0, False),
        ("higher", {"worst": 1.0}, 1.0, None, True),
        ("higher", {"worst": 1.0}, 0.75, None, False),
        ("lower", {"worst": 1.0}, 1.0, None, True),
        ("lower", {"worst": 1.0}, 1.25, None, False),
        # Both count.
        ("higher", {"worst": 1.0, "max_loss": 0.5}, 1.25, 1.5, True),
        ("higher", {"worst": 1.0, "max_loss": 0.5}, 1.25, 2.0, False),
        ("higher", {"worst": 1.0, "max_loss": 0.5}, 0.75, 0.5, False),
    ],
)
def test_gates_both_ways(
    better: str, limits: dict[str, float | None], candidate: float, baseline: float | None, passes: bool
) -> None:
    gate = Gate(**{**GATE, "better": better, **limits})
    verdict = judge(gate, found(candidate), None if baseline is None else found(baseline))
    assert verdict is not None
    assert verdict.passed is passes
    assert (verdict.reason == "") is passes
    assert verdict.measured is not passes


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_loss": None, "worst": None}, "neither max_loss nor worst"),
        ({"max_loss": 0.1, "worst": 1.5}, "worst 1.5 is beyond the range of 1"),
        ({"max_loss": 0.1, "worst": -1.5}, "worst -1.5 is beyond the range of 1"),
        ({"max_loss": 0.1, "min_devices": 4, "max_devices": 3}, "max_devices 3 is below min_devices 4"),
    ],
)
def test_a_gate_that_would_let_everything_pass_or_nothing(limits: dict[str, float | None], words: str) -> None:
    with pytest.raises(ServerError, match=words):
        check_gate(Gate(**{**GATE, "range": 1.0, **limits}))


@pytest.mark.parametrize("limits", [{"max_loss": 0.1}, {"worst": 1.0}, {"max_loss": 0.1, "worst": -1.0}])
def test_a_gate_that_asks_for_something(limits: dict[str, float | None]) -> None:
    check_gate(Gate(**{**GATE, "range": 1.0, "max_loss": None, "min_devices": 3, "max_devices": 3, **limits}))


def test_what_is_not_there_yet_is_waited_for_unless_it_does_not_matter() -> None:
    compared, bounded = Gate(**GATE, max_loss=0.5), Gate(**GATE, worst=1.0, max_loss=0.5)
    assert judge(compared, None, None) is None
    assert judge(compared, found(2.0), None) is None
    assert judge(compared, None, found(2.0)) is None
    assert judge(bounded, found(2.0), None) is None
    failed = judge(bounded, found(0.5), None)
    assert failed is not None
    assert not failed.passed


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (found(2.0, devices=2), "2 devices evaluated the"),
        (found(2.0, examples=19.4), "was evaluated on 19.4 examples, 20 needed"),
        (found(2.0, examples=None), "was evaluated on 0 examples"),
        (found(None), "has no number for m"),
        (found(float("nan")), "has no number for m"),
        (found(float("inf")), "has no number for m"),
        (beyond(0.25), "was beyond the range of 10 on devices with 25.0% of the examples"),
    ],
)
@pytest.mark.parametrize("which", ["candidate", "baseline"])
def test_a_result_that_says_too_little_is_none(result: RoundResult, words: str, which: str) -> None:
    gate = Gate(**GATE, max_loss=0.5, min_examples=20)
    pair = (result, found(2.0)) if which == "candidate" else (found(2.0), result)
    verdict = judge(gate, *pair)
    assert verdict is not None
    assert (verdict.passed, verdict.measured) == (False, False)
    assert words in verdict.reason
    assert which in verdict.reason


def test_a_sum_of_a_secure_round_may_lack_a_rounding_step() -> None:
    gate = Gate(**GATE, worst=0.0, min_examples=20)
    assert judge(gate, found(2.0, examples=19.6), None) == Verdict(True)


VERDICTS = (None, Verdict(True), Verdict(False, "worse", True), Verdict(False, "too few"))


@pytest.mark.parametrize("state", RULES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("verdict", VERDICTS)
def test_decide(state: str, gated: bool, late: bool, evaluated: bool, verdict: Verdict | None) -> None:
    now, ends = (100.0, 100.0) if late else (99.9, 100.0)
    step = decide(RULES[state], gated=gated, verdict=verdict, evaluated=evaluated, now=now, state_ends=ends)
    if state == "evaluating" and verdict is not None:
        expected = Move.GO_ON if verdict.passed else Move.ROLL_BACK
        assert (step.reason, step.reject) == (verdict.reason, verdict.measured)
    elif not late:
        expected = Move.COMPARE if evaluated else Move.STAY
    else:
        expected = {"soaking": Move.EVALUATE if gated else Move.GO_ON}.get(state, Move.ROLL_BACK)
        assert not step.reject
    assert step.move is expected
    assert bool(step.reason) is (expected is Move.ROLL_BACK)


def test_no_state_hangs() -> None:
    """Whatever happens or does not: at its deadline every state is left, and only for one nearer to the end."""
    for rule, gated in itertools.product(RULES.values(), (True, False)):
        step = decide(rule, gated=gated, verdict=None, evaluated=True, now=1.0, state_ends=1.0)
        assert step.move not in (Move.STAY, Move.COMPARE)
        assert step.move is not Move.EVALUATE or rule.name == "soaking"
