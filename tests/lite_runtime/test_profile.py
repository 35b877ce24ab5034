from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import Bundle
from archipel.errors import RuntimeInputError, RuntimeProgramError
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.engines.sessions import Sessions
from archipel.lite_runtime.profile import WARMUP, Profile, Row, parse, profile_program

W = np.array([[0.5, -1.0], [0.25, 2.0], [1.0, 0.0]], np.float32)
PREDICT = """predict (float[n, 3] x, float[3, 2] w) => (float[n, 2] y) {
    [product] p = MatMul(x, w)
    [squash] y = Tanh(p)
}"""
LOOP = """train (float[n, 3] x, float[3, 2] w) => (float[3, 2] w_new) {
    count = Constant <value_int = 7> ()
    go = Constant <value_int = 1> ()
    yes = Cast <to = 9> (go)
    [again] w_new = Loop (count, yes, w) <body = body (int64 i, bool go_in, float[3, 2] before)
        => (bool go_out, float[3, 2] after) {
        go_out = Identity(go_in)
        [inner] after = Cos(before)
    }>
}"""


@pytest.fixture
def bundle(of_two_programs: Callable[[str, str, np.ndarray], Bundle]) -> Bundle:
    return of_two_programs(PREDICT, LOOP, W)


def test_every_kernel_with_its_shape_and_provider(bundle: Bundle) -> None:
    feed = {"x": np.ones((5, 3), np.float32), "w": W}
    profile = profile_program(Sessions(bundle), "predict", feed, runs=11)
    assert (profile.program, profile.runs) == ("predict", 11)
    rows = {row.node: row for row in profile.rows}
    assert set(rows) == {"product", "squash"}
    assert {row.op_type for row in profile.rows} == {"MatMul", "Tanh"}
    for row in profile.rows:
        assert (row.delegate, row.calls) == ("cpu", 1)
        assert row.output_shapes == ("float32[5, 2]",)
        assert row.output_bytes == 5 * 2 * 4
    assert sum(row.share for row in profile.rows) == pytest.approx(1)
    assert 0 < profile.total_us == pytest.approx(sum(profile.by_operator().values()))
    assert profile.total_us < profile.wall_us
    assert [row.us for row in profile.rows] == sorted((row.us for row in profile.rows), reverse=True)


@pytest.mark.sampled(every=3)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_memory_that_the_runs_took(bundle: Bundle) -> None:
    # Of 64 MiB, which the C library takes from the system anew: less might be there from what ran before.
    rows = 1 << 23
    profile = profile_program(Sessions(bundle), "predict", {"x": np.ones((rows, 3), np.float32), "w": W}, runs=1)
    column = rows * 4
    assert profile.peak_bytes is not None
    assert 2 * column <= profile.peak_bytes < 30 * column  # the output alone has two columns
    assert "resident memory rose by" in profile.table()


def test_the_body_of_a_loop_counts_once(bundle: Bundle) -> None:
    feed = {"x": np.ones((1, 3), np.float32), "w": W}
    # One run each: a sum of medians over several is not bound by the median of their sums.
    for _ in range(5):
        profile = profile_program(Sessions(bundle), "train", feed, runs=1)
        rows = {row.node: row for row in profile.rows}
        assert rows["inner"].calls == 7
        assert rows["again"].op_type == "Loop"
        assert profile.total_us <= profile.wall_us


def test_a_body_whose_last_kernel_seems_to_end_after_the_loop_counts_once() -> None:
    # In truth the Loop lasts from 1.9 to 11.8 us and its last kernel from 9.1 to 11.2: the profiler rounds each down.
    inside = [event("inner", 3, 2, "Cos"), event("inner", 9, 2, "Cos"), event("again", 1, 9, "Loop")]
    after = [event("last", 11, 4, "Relu"), event("model_run", 0, 20)]
    profile = parse(json.dumps(inside + after).encode(), "train")
    assert {row.node: row.us for row in profile.rows} == {"inner": 4, "again": 5, "last": 4}


def test_nothing_stays_behind(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(folder)
    profile_program(Sessions(bundle), "predict", {"x": np.ones((1, 3), np.float32), "w": W}, runs=1)
    with pytest.raises(RuntimeProgramError):
        profile_program(Sessions(bundle), "predict", {"x": np.ones((1, 9), np.float32), "w": W}, runs=1)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("runs", [0, -1, 100_000])
def test_runs_have_bounds(bundle: Bundle, runs: int) -> None:
    with pytest.raises(RuntimeInputError, match=f"runs must be from 1 to 10000, got {runs}"):
        profile_program(Sessions(bundle), "predict", {}, runs=runs)


def test_a_runtime_profiles_its_present_model(bundle: Bundle) -> None:
    runtime = Runtime(bundle)
    x = np.ones((4, 3), np.float32)
    before = runtime.predict(x)
    for given in (x, {"x": x}):
        profile = runtime.profile(given, runs=3)
        assert {row.op_type for row in profile.rows} == {"MatMul", "Tanh"}
    np.testing.assert_array_equal(runtime.predict(x), before)
    with pytest.raises(RuntimeInputError, match="must be float32"):
        runtime.profile(x.astype(np.float64))


def event(name: str, ts: int, dur: int, op: str = "", **args: Any) -> dict[str, Any]:
    if not op:
        return {"cat": "Session", "name": name, "ts": ts, "dur": dur, "ph": "X", "pid": 1, "tid": 1, "args": {}}
    more = {"op_name": op, "provider": "CPUExecutionProvider", "thread_scheduling_stats": {"any": ["thing"]}, **args}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "ph": "X", "args": more}


def run(ts: int, a: int, inner: int) -> list[dict[str, Any]]:
    """A run with node `a`, and a Loop of 100 us with two calls of `b` and an If around `c`; inner events come first."""
    shape = [{"float": [2, 3]}, {"int64": []}]
    return [
        event("a", ts + 1, a, "Relu", output_size="24", output_type_shape=shape),
        event("b", ts + 201, inner, "Cos"),
        event("b", ts + 221, inner, "Cos", provider="XnnpackExecutionProvider"),
        event("c", ts + 242, 5, "Sin"),
        event("choice", ts + 241, 9, "If"),
        event("loop", ts + 200, 100, "Loop"),
        event("SequentialExecutor::Execute", ts + 1, 390),
        event("model_run", ts, 400),
    ]


def test_times_are_medians_of_runs_without_what_is_inside() -> None:
    events = [event("session_initialization", 0, 900)]
    for number, (a, inner) in enumerate([(77, 19), (10, 4), (12, 6), (9000, 5)]):
        events += run(10_000 * (number + 1), a, inner)
    profile = parse(json.dumps(events).encode(), "predict", warmup=1)
    # Medians of a: 10, 12, 9000; of b: 4, 6, 5 for each provider; the Loop without b, b and the If; the If without c.
    assert profile.runs == 3
    assert {(row.node, row.delegate): (row.us, row.calls) for row in profile.rows} == {
        ("a", "cpu"): (12, 1), ("b", "cpu"): (5, 1), ("b", "xnnpack"): (5, 1), ("c", "cpu"): (5, 1),
        ("choice", "cpu"): (4, 1), ("loop", "cpu"): (100 - 9 - 10, 1),
    }  # fmt: skip
    assert profile.total_us == 12 + 5 + 5 + 5 + 4 + 81
    assert profile.by_operator() == {"Loop": 81, "Relu": 12, "Cos": 10, "Sin": 5, "If": 4}
    assert profile.wall_us == 400
    row = next(row for row in profile.rows if row.node == "a")
    assert (row.output_bytes, row.output_shapes) == (24, ("float32[2, 3]", "int64[]"))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[", b"[1]", b"\xff\xfe", b'[{"cat": "Node", "ts": 1}]', b'[{"cat": "Node", "name": 1}]',
        b'[{"cat": "Node", "name": "x", "ts": "soon"}]',
        b'[{"cat": "Node", "name": "x_kernel_time", "args": {"output_type_shape": [[1]]}}]',
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_another_format_is_an_error(data: bytes) -> None:
    with pytest.raises(RuntimeProgramError, match="profile cannot be read"):
        parse(data, "predict")


def test_a_profile_without_runs_is_an_error() -> None:
    events = run(0, 1, 1)
    with pytest.raises(RuntimeProgramError, match=f"no run after {WARMUP}"):
        parse(json.dumps(events).encode(), "predict", WARMUP)


def test_the_table_sums_up_what_it_leaves_out() -> None:
    rows = tuple(
        Row(f"n{us}", "Conv", "cpu", 1, float(us), us / 100, None, ("float32[1, 8]",)) for us in (50, 25, 15, 10)
    )
    lines = Profile("predict", 20, rows, 110.0).table(limit=2).splitlines()
    assert lines[1].split() == ["50.0", "50.0%", "1", "Conv", "cpu", "float32[1,", "8]", "n50"]
    assert lines[3].split() == ["25.0", "25.0%", "and", "2", "more", "kernels"]
    assert lines[4] == "predict: 100.0 us in kernels, 110.0 us in all (medians, 20 runs)"
