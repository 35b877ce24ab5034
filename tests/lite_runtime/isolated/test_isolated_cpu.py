"""The CPU time that a request may take in the child process, and how nice that is to others."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Phase
from archipel.errors import RuntimeInputError, RuntimeLimitError
from archipel.lite_runtime import Progress, load
from archipel.lite_runtime.isolated.runtime import IsolatedRuntime, load_isolated
from tests.support.text_bundles import Roles

MakeBundle = Callable[..., Path]
W = np.zeros(2, np.float32)
# Boxes of which none overlaps another, in one operator that compares each with all that it has kept.
ONE_OPERATOR = """predict (int64[1] x) => (int64[m, 3] y) {
    one = Constant <value_int = 1> () \n zero = Constant <value_int = 0> () \n n = Squeeze(x)
    i = Range(zero, n, one) \n f = Cast <to = 1> (i) \n h = Constant <value_float = 0.5> () \n g = Add(f, h)
    column = Constant <value_ints = [-1, 1]> () \n a = Reshape(f, column) \n b = Reshape(g, column)
    box = Concat <axis = 1> (a, a, b, b) \n first = Constant <value_ints = [0]> () \n boxes = Unsqueeze(box, first)
    ones = Constant <value_ints = [0, 1]> () \n scores = Unsqueeze(f, ones) \n y = NonMaxSuppression(boxes, scores, x)
}"""
# `w` counts the steps; each of them takes as many turns as the example says.
TRAIN = """train (int64[n] x, float[2] w) => (float[2] w_new, float loss) {
    one = Constant <value_float = 1.0> () \n yes = Constant <value = bool {1}> ()
    turns = ReduceMax <keepdims = 0> (x)
    sum = Loop (turns, yes, one) <body = turn (int64 i, bool c, float a) => (bool c_new, float a_new) {
        c_new = Identity(c) \n more = Constant <value_float = 1.0> () \n a_new = Add(a, more)
    }>
    w_new = Add(w, one) \n loss = Identity(sum)
}"""
FINISH = "finish (float[2] w, float[2] w0) => (float[2] delta) { delta = Sub(w, w0) }"
PREDICT = "predict (int64[n] x, float[2] w) => (float[2] y) { y = Identity(w) }"
N = lambda count: np.array([count], np.int64)  # noqa: E731


@pytest.fixture
def trusted(key: Ed25519PrivateKey) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


@pytest.fixture
def operator(make_bundle: MakeBundle, r: type[Roles]) -> Path:
    programs = {"predict": ("predict", ONE_OPERATOR, {"x": r.example, "y": r.output})}
    return make_bundle(programs, {"unused": W}, peak_bytes=64 << 20)


@pytest.fixture
def trainable(make_bundle: MakeBundle, r: type[Roles]) -> Path:
    w = r.parameter("w")
    programs = {
        "train": ("train", TRAIN, {"x": r.example, "w": w, "w_new": w, "loss": r.metric()}),
        "finish": ("finish", FINISH, {"w": w, "w0": r.start("w"), "delta": r.update("w")}),
        "predict": ("predict", PREDICT, {"x": r.example, "w": w, "y": r.output}),
    }
    return make_bundle(programs, {"w": W}, schedule=[Phase(program="train", epochs=1, batch_size=1)])


def used_by_ended_children() -> float:
    """Seconds, as the kernel has counted them."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def used_by(pid: int) -> float:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / os.sysconf(
        "SC_CLK_TCK"
    )


@pytest.mark.sampled(every=4)
def test_one_operator_without_end_is_stopped(operator: Path, trusted: list[bytes]) -> None:
    with load_isolated(operator, trusted, cpu_seconds=1.0) as runtime:
        np.testing.assert_array_equal(runtime.predict(N(3))[:, 2], [2, 1, 0])  # by score
        assert runtime.pid is not None
        started, before = used_by(runtime.pid), used_by_ended_children()
        with pytest.raises(RuntimeLimitError) as caught:
            runtime.predict(N(1_000_000))
        assert str(caught.value) == (
            "predict: more than the 1 seconds of CPU time allowed; the process was ended. Allow more cpu_seconds, "
            "give less data at once, or use a smaller model"
        )
        assert runtime.pid is None
        # Both counts are of scheduler ticks, which make `started` up to two tenths of a second too large.
        assert 0.7 < used_by_ended_children() - before - started < 1.8
        np.testing.assert_array_equal(runtime.predict(N(3))[:, 2], [2, 1, 0])


@pytest.fixture
def turns(trainable: Path, trusted: list[bytes]) -> int:
    """So many turns take a step about 0.1 s of CPU time."""
    runtime = load(trainable, trusted)
    runtime.fit(N(1))
    turns, took = 1000, 0.0
    while took < 0.05:
        turns *= 2
        before = time.process_time()
        runtime.fit(N(turns))
        took = time.process_time() - before
    return int(turns * 0.1 / took)


@pytest.mark.sampled(every=8)
def test_a_round_has_its_time_in_all_and_each_request_its_own(
    trainable: Path, trusted: list[bytes], turns: int
) -> None:
    steps: list[int] = []
    with load_isolated(trainable, trusted, cpu_seconds=1.0) as runtime:
        requests = 0
        while runtime.pid is None or used_by(runtime.pid) < 1.5:
            runtime.fit(N(turns))
            requests += 1
            assert requests < 500

        def predict(progress: Progress) -> None:
            steps.append(progress.step)
            runtime.predict(N(1))  # belongs to the round, and does not give it more time

        with pytest.raises(RuntimeLimitError, match="local_round: more than the 1 seconds of CPU time allowed"):
            runtime.local_round(np.full(120, turns), seed=1, callbacks=[predict])
        assert 2 < len(steps) < 60
        np.testing.assert_array_equal(runtime.parameters()["w"], [requests, requests])


@pytest.mark.sampled(every=8)
def test_a_fit_goes_on_from_its_checkpoint(trainable: Path, trusted: list[bytes], tmp_path: Path, turns: int) -> None:
    options: dict[str, Any] = {"batch_size": 1, "checkpoint": tmp_path / "c", "checkpoint_every": 0.0}
    with load_isolated(trainable, trusted, cpu_seconds=0.5) as runtime:
        with pytest.raises(RuntimeLimitError, match=r"fit: .*CPU time"):
            runtime.fit(np.full(20, turns), **options)
        for _ in range(10):
            with contextlib.suppress(RuntimeLimitError):
                history = runtime.fit(np.full(20, turns), **options)
                break
        assert history.steps == 20
        np.testing.assert_array_equal(runtime.parameters()["w"], [20, 20])


@pytest.mark.sampled(every=3)
def test_all_threads_are_nice(trainable: Path, trusted: list[bytes]) -> None:
    here = os.nice(0)
    with load_isolated(trainable, trusted, niceness=7, threads=2) as runtime:
        runtime.predict(N(1))
        stats = [
            path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{runtime.pid}/task").glob("*/stat")
        ]
    busy = [int(fields[16]) for fields in stats]
    assert min(here + 7, 19) in busy
    assert os.nice(0) == here


@pytest.mark.sampled(every=3)
def test_what_cannot_be_a_limit(trainable: Path, trusted: list[bytes]) -> None:
    for wrong in (0, -1.0, float("inf"), float("nan"), 1e10):
        with pytest.raises(RuntimeInputError, match="cpu_seconds must be above 0 and at most 1000000000, got"):
            load_isolated(trainable, trusted, cpu_seconds=wrong)
    for wrong in (-1, 20):
        with pytest.raises(RuntimeInputError, match=f"niceness must be from 0 to 19, got {wrong}"):
            load_isolated(trainable, trusted, niceness=wrong)
    for name, value in (("cpu_seconds", 1.0), ("niceness", 5)):
        with pytest.raises(RuntimeInputError, match=f"{name}: has an effect only on a child process"):
            load(trainable, trusted, **{name: value})
    with load(trainable, trusted, isolated=True, cpu_seconds=0.5, niceness=1) as runtime:
        assert isinstance(runtime, IsolatedRuntime)
        np.testing.assert_array_equal(runtime.predict(N(1)), W)


@pytest.mark.sampled(every=4)
def test_a_signal_that_the_parent_ignores_still_ends_the_child(operator: Path, trusted: list[bytes]) -> None:
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    try:
        with (
            load_isolated(operator, trusted, cpu_seconds=0.5, seconds=60.0) as runtime,
            pytest.raises(RuntimeLimitError, match="CPU time"),
        ):
            runtime.predict(N(1_000_000))
    finally:
        signal.signal(signal.SIGPROF, before)
