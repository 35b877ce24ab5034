"""Models that fail while they serve, many threads at once among them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from archipel.errors import (
    RuntimeInputError,
    RuntimeProgramError,
)
from archipel.lite_runtime.slots.model_slots import Slots
from tests.support.scaling import LOG, TWO_ROWS, ScalingModels, X, statuses


def test_a_model_on_trial_that_fails_is_given_up_and_the_request_answered(running: Slots, model: ScalingModels) -> None:
    running.install(model(3, graph=TWO_ROWS))
    running.switch()
    np.testing.assert_array_equal(running.predict(X), X * 3)
    np.testing.assert_array_equal(running.predict(X[:1]), X[:1] * 2)  # no error, the old model's answer
    assert statuses(running) == ("a", "good", "bad")
    assert "cannot be run" in running.state.b.reason


def test_numbers_that_are_not_finite_count_as_failure(running: Slots, model: ScalingModels) -> None:
    running.install(model(3, graph=LOG, vectors=False))
    running.switch()
    np.testing.assert_allclose(running.predict(X), np.log(X + 3), rtol=1e-6)
    np.testing.assert_array_equal(running.predict(-8 * X), -16 * X)
    assert statuses(running) == ("a", "good", "bad")


def test_a_request_that_no_model_can_answer_blames_none(running: Slots, model: ScalingModels) -> None:
    running.install(model(3))
    running.switch()
    assert np.isnan(running.predict(X * np.float32(np.nan))).all()
    with pytest.raises(RuntimeInputError):
        running.predict(X.astype(np.float64))
    assert statuses(running) == ("b", "good", "trying")


def test_a_good_model_keeps_its_place(running: Slots, model: ScalingModels) -> None:
    running.install(model(3, graph=TWO_ROWS))
    running.switch()
    running.confirm()
    with pytest.raises(RuntimeProgramError):
        running.predict(X[:1])
    assert statuses(running) == ("b", "good", "good")


def test_without_a_last_good_model_the_error_reaches_the_caller(
    model: ScalingModels, trusted: list[bytes], tmp_path: Path
) -> None:
    with Slots(tmp_path / "slots", trusted) as slots:
        slots.install(model(3, graph=TWO_ROWS))
        slots.switch()
        with pytest.raises(RuntimeProgramError):
            slots.predict(X[:1])
        np.testing.assert_array_equal(slots.predict(X), X * 3)


@pytest.mark.sampled(every=8)
def test_no_request_is_lost_or_mixed_during_switches(running: Slots, model: ScalingModels) -> None:
    """Three threads ask without pause during 20 switches; each answer is one model's, as a whole."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((4, 3)).astype(np.float32) for _ in range(3)]
    stop = threading.Event()
    counts = [[0, 0] for _ in inputs]
    wrong: list[object] = []

    def ask(index: int) -> None:
        x = inputs[index]
        double, triple = x * np.float32(2), x * np.float32(3)
        while not stop.is_set():
            try:
                answer = running.predict(x)
            except BaseException as error:  # noqa: BLE001
                wrong.append(error)
                return
            if np.array_equal(answer, double):
                counts[index][0] += 1
            elif np.array_equal(answer, triple):
                counts[index][1] += 1
            else:
                wrong.append(answer)
                return

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)  # more interruptions, and in more places
    for thread in threads:
        thread.start()
    try:
        for number in range(20):
            factor = 3 - number % 2
            running.install(model(factor))
            running.switch()
            np.testing.assert_array_equal(running.predict(X), X * factor)
            running.confirm()
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join(30)
    assert wrong == []
    assert all(double and triple for double, triple in counts)


def test_many_requests_that_fail_at_once_return_once(running: Slots, model: ScalingModels) -> None:
    running.install(model(3, graph=TWO_ROWS))
    running.switch()
    barrier = threading.Barrier(8)
    answers: list[np.ndarray] = []

    def ask() -> None:
        barrier.wait()
        answers.append(running.predict(X[:1]))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 8
    for answer in answers:
        np.testing.assert_array_equal(answer, X[:1] * 2)
    assert statuses(running) == ("a", "good", "bad")
