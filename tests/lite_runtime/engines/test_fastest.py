"""A choice by measurement, between sessions of ONNX Runtime: one with other weights stands for an engine that errs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import open_bundle
from archipel.lite_runtime.engines.fastest import FastestSession, difference, measure
from archipel.lite_runtime.engines.sessions import Sessions
from tests.support.text_bundles import Roles

W = np.array([[0.5, -1.0], [0.25, 2.0], [1.0, 0.0]], np.float32)
GRAPH = "predict (float[n, 3] x) => (float[n, 2] y) <float[3, 2] w> { y = MatMul(x, w) }"
X = np.ones((4, 3), np.float32)


@pytest.fixture
def sessions(make_bundle: Callable[..., Path], key: Ed25519PrivateKey, r: type[Roles]) -> Sessions:
    programs = {"predict": ("predict", GRAPH, {"x": r.example, "y": r.output})}
    graph = programs["predict"][1].replace("<float[3, 2] w>", "<float[3, 2] w = {0.5, -1, 0.25, 2, 1, 0}>")
    programs["predict"] = ("predict", graph, programs["predict"][2])
    programs["four"] = (
        "predict",
        "four (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }",
        {"x": r.example, "y": r.output},
    )
    return Sessions(open_bundle(make_bundle(programs, {"w": W}), [key.public_key().public_bytes_raw()]))


@pytest.mark.parametrize("bound", [False, True])
def test_what_answers_otherwise_is_left_out_however_fast_it_is(
    sessions: Sessions, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "archipel.lite_runtime.engines.fastest.measure", lambda calls: {n: float(n == "cpu") for n in calls}
    )
    wrong, right = sessions.open("predict", {"w": W * 1.01}), sessions.open("predict")
    decided: list[str] = []
    session = FastestSession({"cpu": sessions.get("predict"), "wrong": wrong, "right": right}, decided.append)
    y = np.zeros((4, 2), np.float32)
    if bound:
        runs = [session.bind({"x": X}, {"y": y}) for _ in range(2)]  # as a training has two sets of buffers
        for run in runs:
            y[...] = 0
            run()
            np.testing.assert_array_equal(y, X @ W)
    else:
        np.testing.assert_array_equal(session.run(["y"], {"x": X})[0], X @ W)
    assert decided == ["right"]
    reasons = {each.delegate: each.reason for each in session.skipped()}
    assert "answers differ by 0.01" in reasons["wrong"]
    assert reasons["cpu"].startswith("slower here: 1e+03 ms a run, right 0 ms")


@pytest.mark.parametrize("bound", [False, True])
def test_what_fails_is_left_out(sessions: Sessions, bound: bool) -> None:
    decided: list[str] = []
    failing = sessions.get("four")  # as an engine that cannot plan for these shapes
    session = FastestSession({"cpu": sessions.get("predict"), "failing": failing}, decided.append)
    y = np.zeros((4, 2), np.float32)
    if bound:
        session.bind({"x": X}, {"y": y})()
    else:
        [y] = session.run(["y"], {"x": X})
    np.testing.assert_array_equal(y, X @ W)
    assert decided == ["cpu"]
    [skipped] = session.skipped()
    assert skipped.delegate == "failing"
    assert "cannot be run" in skipped.reason


def test_a_run_without_examples_decides_nothing(sessions: Sessions) -> None:
    decided: list[str] = []
    session = FastestSession({"cpu": sessions.get("predict"), "other": sessions.open("predict")}, decided.append)
    assert session.run(["y"], {"x": X[:0]})[0].shape == (0, 2)
    assert decided == []
    session.run(["y"], {"x": X})
    assert len(decided) == 1


def test_numbers_that_are_not_finite_must_be_the_same_ones(sessions: Sessions) -> None:
    """NaN says nothing about the other numbers, and may not hide them."""
    decided: list[str] = []
    wrong = sessions.open("predict", {"w": W * 1.01})
    session = FastestSession({"cpu": sessions.get("predict"), "wrong": wrong}, decided.append)
    x = X.copy()
    x[0, 0] = np.nan
    session.run(["y"], {"x": x})
    assert decided == ["cpu"]
    assert difference([np.array([1.0, 2.0])], [np.array([np.nan, 2.0])]) == np.inf
    assert difference([np.array([3])], [np.array([4])]) == np.inf
    assert difference([np.array([np.nan, 2.0])], [np.array([np.nan, 2.5])]) == 0.2


def test_the_time_is_that_of_a_call_in_turns() -> None:
    order: list[str] = []

    def call(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            time.sleep(seconds)

        return run

    times = measure({"slow": call("slow", 0.01), "fast": call("fast", 0.001)})
    assert order[:8] == ["slow"] * 2 + ["fast"] * 2 + ["slow"] * 2 + ["fast"] * 2
    assert times["slow"] > times["fast"] > 0.0009
