from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Phase
from archipel.errors import (
    CheckpointError,
    NonFiniteLossError,
    RuntimeInputError,
    RuntimeLimitError,
    RuntimeProgramError,
)
from archipel.lite_runtime import Control, History, ModelRuntime, Progress, Runtime, load
from archipel.lite_runtime.isolated.runtime import IsolatedRuntime, load_isolated
from archipel.lite_runtime.isolated.starter import Starter
from archipel.lite_runtime.slots.model_slots import Slots
from tests.support.text_bundles import Roles

W = np.array([[0.5, -1.0], [0.25, 2.0], [1.0, 0.0]], np.float32)
PREDICT = "predict (float[n, 3] x, float[3, 2] w) => (float[n, 2] q) { q = MatMul(x, w) }"
EVALUATE = """evaluate (float[n, 2] q, float[n, 2] y) => (float error) {
    e = Sub(q, y) \n s = Mul(e, e) \n error = ReduceMean <keepdims = 0> (s)
}"""
# Least squares with momentum; `count` counts the rounds on the device, `p` is personal and follows the loss.
TRAIN = """train (float[n, 3] x, float[n, 2] y, float[3, 2] w, float[3, 2] m, float[2] p, float lr)
  => (float[3, 2] w_new, float[3, 2] m_new, float[2] p_new, float loss) {
    q = MatMul(x, w) \n e = Sub(q, y) \n g = Gemm <transA = 1> (x, e)
    half = Constant <value_float = 0.5> ()
    old = Mul(m, half) \n m_new = Add(old, g) \n move = Mul(m_new, lr) \n w_new = Sub(w, move)
    s = Mul(e, e) \n loss = ReduceMean <keepdims = 0> (s) \n p_new = Add(p, loss)
}"""
FINISH = """finish (float[3, 2] w, float[3, 2] w0, float c) => (float[3, 2] delta, float c_new) {
    delta = Sub(w, w0) \n one = Constant <value_float = 1.0> () \n c_new = Add(c, one)
}"""
# The sum of a tensor of ones with the shape that the example says: as large as whoever asks wants it to be.
LARGE = """predict (int64[1] x) => (float[1] y) {
    one = Constant <value_float = 1.0> () \n all = Expand(one, x) \n y = ReduceSum <keepdims = 1> (all)
}"""
# Takes as many turns as the example says.
LONG = """predict (int64[1] x) => (float[1] y) {
    turns = Squeeze(x) \n yes = Constant <value = bool {1}> () \n zero = Constant <value_floats = [0.0]> ()
    y = Loop (turns, yes, zero) <body = turn (int64 i, bool c, float[1] a) => (bool c_new, float[1] a_new) {
        c_new = Identity(c) \n one = Constant <value_float = 1.0> () \n a_new = Add(a, one)
    }>
}"""

rng = np.random.default_rng(5)
X = rng.standard_normal((22, 3)).astype(np.float32)
Y = rng.standard_normal((22, 2)).astype(np.float32)
N = lambda count: np.array([count], np.int64)  # noqa: E731

MakeFolder = Callable[..., Path]


@pytest.fixture
def trusted(key: Ed25519PrivateKey) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


@pytest.fixture
def folder(make_bundle: MakeFolder, r: type[Roles]) -> Path:
    w, m, p = r.parameter("w"), r.state("m", "round"), r.personal("p", "p0")
    c = r.state("c", "device")
    programs = {
        "predict": ("predict", PREDICT, {"x": r.example, "w": w, "q": r.output}),
        "evaluate": ("evaluate", EVALUATE, {"q": r.prediction("q"), "y": r.label, "error": r.metric()}),
        "train": (
            "train",
            TRAIN,
            {"x": r.example, "y": r.label, "w": w, "m": m, "p": p, "lr": r.hyper(0.01, 0.0, 1e6), "w_new": w,
             "m_new": m, "p_new": p, "loss": r.metric()},
        ),
        "finish": ("finish", FINISH, {"w": w, "w0": r.start("w"), "c": c, "delta": r.update("w"), "c_new": c}),
    }  # fmt: skip
    schedule = [Phase(program="train", epochs=2, batch_size=4)]
    return make_bundle(programs, {"w": W}, {"p0": np.zeros(2, np.float32)}, schedule)


@pytest.fixture
def here(folder: Path, trusted: list[bytes]) -> Runtime:
    return load(folder, trusted)


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    made = Starter(60.0)
    yield made
    made.close()


@pytest.fixture
def there(folder: Path, trusted: list[bytes], starter: Starter) -> Iterator[IsolatedRuntime]:
    """In a process that was forked; tests that load it themselves have one that was started anew."""
    with load_isolated(folder, trusted, starter=starter) as runtime:
        yield runtime


def one_program(make_bundle: MakeFolder, r: type[Roles], graph: str) -> Path:
    return make_bundle({"predict": ("predict", graph, {"x": r.example, "y": r.output})}, {"unused": W})


def same(first: ModelRuntime, second: ModelRuntime) -> None:
    for a, b in (
        (first.parameters(), second.parameters()),
        (first.state.personal, second.state.personal),
        (first.state.state, second.state.state),
    ):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def children() -> list[int]:
    """Process ids of this process's children, zombies included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(path.parent.name))
    return found


def wait_until(what: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    try:
        return not re.search(r"^State:\s+[ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- the same as in this process ----------------------------------------------------------------------------------


@pytest.mark.sampled(every=3)
def test_everything_is_bit_for_bit_what_a_runtime_in_this_process_gives(
    here: Runtime, there: IsolatedRuntime, tmp_path: Path, trusted: list[bytes]
) -> None:
    np.testing.assert_array_equal(there.predict(X), X @ W)
    np.testing.assert_array_equal(there.predict({"x": X})["q"], here.predict(X))
    np.testing.assert_array_equal(there.predict(X[::-2]), here.predict(X[::-2]))  # not contiguous
    answers = there.predict(iter([X[:1], X[1:]]))
    np.testing.assert_array_equal(np.concatenate(list(answers)), here.predict(X))
    answer = there.predict(X)
    answer += 1  # the caller's own
    assert there.evaluate(X, Y, batch_size=5) == here.evaluate(X, Y, batch_size=5)
    options: dict[str, Any] = {
        "epochs": 3, "batch_size": 4, "seed": 9, "hyperparameters": {"lr": 0.05}, "validation": (X[:4], Y[:4])
    }  # fmt: skip
    ours, theirs = here.fit(X, Y, **options), there.fit(X, Y, **options)
    assert len(ours.losses) == 18
    assert ours == theirs
    same(here, there)
    np.testing.assert_array_equal(there.predict(X), here.predict(X))
    assert not np.array_equal(there.predict(X), X @ W)
    first, second = here.local_round(X, Y, seed=4), there.local_round(X, Y, seed=4)
    np.testing.assert_array_equal(first.arrays["delta"], second.arrays["delta"])
    np.testing.assert_array_equal(first.parameters["w"], second.parameters["w"])
    assert (first.losses, first.metrics, first.steps, first.examples) == (
        second.losses, second.metrics, second.steps, second.examples
    )  # fmt: skip
    assert there.state.state["c"] == 1
    same(here, there)
    given = {"w": W + 1}
    first, second = (rt.local_round(X, Y, seed=5, parameters=given) for rt in (here, there))
    np.testing.assert_array_equal(first.arrays["delta"], second.arrays["delta"])
    there.save(tmp_path / "saved")
    again = load(tmp_path / "saved", trusted)
    same(again, here)
    with load_isolated(tmp_path / "saved", trusted) as isolated:
        same(isolated, here)
        np.testing.assert_array_equal(isolated.predict(X), here.predict(X))
        assert isolated.fit(X, Y, **options) == here.fit(X, Y, **options)


def test_parameters_state_and_reset_reach_the_child(here: Runtime, there: IsolatedRuntime) -> None:
    there.set_parameters({"w": W * 2})
    np.testing.assert_array_equal(there.predict(X), X @ (W * 2))
    with pytest.raises(RuntimeInputError, match="parameter 'v' is not one of"):
        there.set_parameters({"v": W})
    there.fit(X, Y)
    there.reset("parameters")
    np.testing.assert_array_equal(there.predict(X), X @ W)
    there.reset("personal")
    assert there.state.personal == {}
    assert there.fit(X, Y) == here.fit(X, Y)
    same(here, there)
    there.state.personal["p"] = here.state.personal["p"] = np.full(2, 7, np.float32)
    for runtime in (here, there):
        runtime.fit(X, Y)
    same(here, there)


def test_the_callers_mistakes_have_the_same_words(here: Runtime, there: IsolatedRuntime) -> None:
    calls: list[Callable[[Any], object]] = [
        lambda rt: rt.predict(X.astype(np.float64)),
        lambda rt: rt.predict({"z": X}),
        lambda rt: rt.predict({}),
        lambda rt: rt.evaluate(X, Y[:3]),
        lambda rt: rt.evaluate(X, Y, batch_size=0),
        lambda rt: rt.fit(X, Y, epochs=0),
        lambda rt: rt.fit(X, Y, hyperparameters={"lr": 1e9}),
        lambda rt: rt.fit(X, Y, moves=["z"]),
        lambda rt: rt.fit(X, Y, seed=-1),
        lambda rt: rt.local_round(X, Y, seed=1, parameters={}),
        lambda rt: rt.reset("all"),
    ]
    for call in calls:
        with pytest.raises(RuntimeInputError) as ours:
            call(here)
        with pytest.raises(RuntimeInputError) as theirs:
            call(there)
        assert str(ours.value) == str(theirs.value)
    child = there.pid
    for wrong in ([[1.0, 2.0, 3.0]], None, X.astype(">f4"), X.astype(object)):
        with pytest.raises(RuntimeInputError, match="x"):
            there.predict(wrong)
    with pytest.raises(RuntimeInputError, match="leave out randomness"):
        there.local_round(X, Y, seed=1, randomness=os.urandom)
    with pytest.raises(RuntimeInputError, match="seconds must be above 0"):
        IsolatedRuntime(there.bundle, [], seconds=0)
    assert there.pid == child  # none of that has cost a process


def test_a_loss_that_is_not_finite_keeps_the_last_good_weights(here: Runtime, there: IsolatedRuntime) -> None:
    for runtime in (here, there):
        with pytest.raises(NonFiniteLossError, match="training stopped"):
            runtime.fit(X, Y, epochs=50, hyperparameters={"lr": 1e5})
    same(here, there)
    assert np.isfinite(there.parameters()["w"]).all()
    np.testing.assert_array_equal(there.predict(X), here.predict(X))


# --- callbacks, control, checkpoints ------------------------------------------------------------------------------


def test_callbacks_run_in_the_parent(here: Runtime, there: IsolatedRuntime) -> None:
    ours: list[Progress] = []
    theirs: list[Progress] = []
    seen: list[np.ndarray] = []
    here.fit(X, Y, batch_size=4, callbacks=[ours.append, lambda p: p.step == 3])
    history = there.fit(
        X,
        Y,
        batch_size=4,
        callbacks=[theirs.append, lambda p: seen.append(there.predict(X[:1])), lambda p: p.step == 3],
    )
    assert history.stopped
    assert len(history.losses) == 4
    assert ours == theirs
    for answer in seen:  # as it was before the fit
        np.testing.assert_array_equal(answer, X[:1] @ W)
    same(here, there)


def test_an_error_of_a_callback_leaves_everything_as_it_was(here: Runtime, there: IsolatedRuntime) -> None:
    class Mine(Exception):
        pass

    def fail(progress: Progress) -> None:
        if progress.step == 2:
            raise Mine("no more")

    child = there.pid
    with pytest.raises(Mine, match="no more"):
        there.fit(X, Y, batch_size=4, callbacks=[fail])
    same(here, there)
    with pytest.raises(Mine):
        there.local_round(X, Y, seed=1, callbacks=[fail])
    same(here, there)
    with pytest.raises(RuntimeInputError, match="callbacks can only predict and evaluate"):
        there.fit(X, Y, callbacks=[lambda p: there.fit(X, Y)])
    with pytest.raises(RuntimeInputError, match="a round cannot end early"):
        there.local_round(X, Y, seed=1, callbacks=[lambda p: True])
    assert there.pid == child
    assert there.fit(X, Y, batch_size=4) == here.fit(X, Y, batch_size=4)


def test_pause_and_cancel(there: IsolatedRuntime, tmp_path: Path) -> None:
    control = Control()
    found: list[History] = []

    def train() -> None:
        found.append(there.fit(X, Y, epochs=10_000_000, control=control, checkpoint=tmp_path / "c"))

    thread = threading.Thread(target=train)
    thread.start()
    assert wait_until(lambda: there.pid is not None)
    time.sleep(0.3)
    assert not (tmp_path / "c").exists()
    control.pause()
    assert wait_until(lambda: control.waiting)
    assert (tmp_path / "c").exists()  # written before it stands still
    control.cancel()
    thread.join(20)
    assert found[0].stopped
    assert found[0].steps > 0


def test_a_fit_whose_process_is_killed_goes_on_from_its_checkpoint(
    here: Runtime, there: IsolatedRuntime, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "epochs": 4, "batch_size": 4, "seed": 2, "checkpoint": tmp_path / "c", "checkpoint_every": 0.0
    }  # fmt: skip

    def kill(progress: Progress) -> None:
        if progress.step == 11:
            assert there.pid is not None
            os.kill(there.pid, signal.SIGKILL)

    with pytest.raises(RuntimeLimitError, match=r"fit: .*SIGKILL"):
        there.fit(X, Y, **options, callbacks=[kill])
    np.testing.assert_array_equal(there.parameters()["w"], W)
    steps: list[int] = []
    history = there.fit(X, Y, **options, callbacks=[lambda p: steps.append(p.step)])
    assert steps[0] in (11, 12)  # not from the start
    assert history.losses == here.fit(X, Y, epochs=4, batch_size=4, seed=2).losses
    same(here, there)
    (tmp_path / "c").write_bytes(b"\0" * 64)
    with pytest.raises(CheckpointError, match="cannot go on"):
        there.fit(X, Y, **options)


# --- limits -------------------------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.sampled(every=4)
def test_a_graph_that_takes_more_memory_than_it_says_is_stopped(
    make_bundle: MakeFolder, r: type[Roles], trusted: list[bytes]
) -> None:
    folder = one_program(make_bundle, r, LARGE)  # its manifest says 1000 bytes
    with load_isolated(folder, trusted) as runtime:
        np.testing.assert_array_equal(runtime.predict(N(1000)), [1000.0])
        before = resident()
        for count in (1 << 25, 1 << 28, 1 << 40, 1 << 61):  # 128 MiB, 1 GiB, 4 TiB, more than there are addresses
            with pytest.raises(RuntimeLimitError, match=r"predict: .*1000 bytes that its manifest claims") as caught:
                runtime.predict(N(count))
            assert "Raise memory_limit" in str(caught.value)
            np.testing.assert_array_equal(runtime.predict(N(1000)), [1000.0])  # and it goes on
        assert resident() - before < 32 << 20
    with load_isolated(folder, trusted, memory_limit=200 << 20) as runtime:
        np.testing.assert_array_equal(runtime.predict(N(1 << 24)), [1 << 24])  # 64 MiB
        with pytest.raises(RuntimeLimitError, match=r"209715200 bytes"):
            runtime.predict(N(1 << 27))  # 512 MiB
    with pytest.raises(RuntimeLimitError, match="needs up to 1000 bytes"):
        load_isolated(folder, trusted, memory_limit=999)


@pytest.mark.sampled(every=3)
def test_the_limit_is_for_the_model_and_not_for_the_data(
    make_bundle: MakeFolder, r: type[Roles], trusted: list[bytes]
) -> None:
    graph = "predict (float[n] x) => (float[1] y) { y = ReduceMax <keepdims = 1> (x) }"
    with load_isolated(one_program(make_bundle, r, graph), trusted, memory_limit=1000) as runtime:
        x = np.arange(24 << 20, dtype=np.float32)  # 96 MiB, the limit is 16 MiB
        np.testing.assert_array_equal(runtime.predict(x), [x[-1]])


@pytest.mark.sampled(every=4)
def test_a_graph_that_takes_forever_is_stopped(make_bundle: MakeFolder, r: type[Roles], trusted: list[bytes]) -> None:
    with load_isolated(one_program(make_bundle, r, LONG), trusted, seconds=1.0) as runtime:
        np.testing.assert_array_equal(runtime.predict(N(5)), [5.0])
        child = runtime.pid
        assert child is not None
        start = time.monotonic()
        with pytest.raises(RuntimeLimitError, match="predict: no answer within the 1 seconds allowed"):
            runtime.predict(N(1 << 60))
        assert time.monotonic() - start < 10
        assert runtime.pid is None
        assert not alive(child)
        np.testing.assert_array_equal(runtime.predict(N(7)), [7.0])


@pytest.mark.slow
def test_training_may_take_longer_than_the_limit_of_a_step(folder: Path, trusted: list[bytes]) -> None:
    with load_isolated(folder, trusted, seconds=0.8) as runtime:
        runtime.predict(X)
        start = time.monotonic()
        history = runtime.fit(X, Y, epochs=120, callbacks=[lambda p: time.sleep(0.01)])
        assert time.monotonic() - start > 1.0
        assert history.steps == 120
        assert runtime.fit(X, Y, epochs=120).steps == 120
        assert runtime.local_round(X, Y, seed=1).steps == 12


def test_a_child_that_dies_is_replaced_and_nothing_learned_is_lost(here: Runtime, there: IsolatedRuntime) -> None:
    for runtime in (here, there):
        runtime.fit(X, Y)
        runtime.local_round(X, Y, seed=1)
    child = there.pid
    assert child is not None
    os.kill(child, signal.SIGSEGV)
    with pytest.raises(RuntimeLimitError, match=r"predict: .*SIGSEGV"):
        there.predict(X)
    assert there.pid is None
    np.testing.assert_array_equal(there.predict(X), here.predict(X))
    assert there.pid != child
    for runtime in (here, there):
        runtime.fit(X, Y)
        runtime.local_round(X, Y, seed=2)
    same(here, there)
    assert there.state.state["c"] == 2


def test_what_the_child_may_not(there: IsolatedRuntime) -> None:
    there.predict(X)
    limits = Path(f"/proc/{there.pid}/limits").read_text()
    assert re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE)
    assert re.search(r"^Max open files +256 +256 ", limits, re.MULTILINE)
    data = re.search(r"^Max data size +(\d+) +\1 ", limits, re.MULTILINE)
    status = Path(f"/proc/{there.pid}/status").read_text()
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    used = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
    assert data is not None
    assert used is not None
    assert int(data[1]) - int(used[1]) * 1024 < there.allowance


# --- processes and files ------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=4)
def test_the_child_goes_with_its_parent(make_bundle: MakeFolder, r: type[Roles], trusted: list[bytes]) -> None:
    folder = one_program(make_bundle, r, LONG)
    code = (
        "import sys, os, threading, numpy as np; from archipel.lite_runtime.isolated.runtime import load_isolated\n"
        "rt = load_isolated(sys.argv[1], [bytes.fromhex(sys.argv[2])]); rt.predict(np.array([2]))\n"
        "threading.Thread(target=lambda: rt.predict(np.array([1 << 60])), daemon=True).start()\n"
        "print(rt.pid, flush=True); import time; time.sleep(100)"
    )
    command = [sys.executable, "-c", code, str(folder), trusted[0].hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)  # deep in the loop by now
        assert alive(child)
        parent.kill()
    assert wait_until(lambda: not alive(child))


@pytest.mark.sampled(every=4)
def test_no_process_and_no_file_is_left(folder: Path, trusted: list[bytes]) -> None:
    gc.collect()
    processes, files = children(), len(os.listdir("/proc/self/fd"))
    for number in range(3):
        runtime = load_isolated(folder, trusted)
        if number != 1:  # one is closed before it was ever used
            runtime.predict(X)
        if number == 2:  # one is left to the garbage collector
            del runtime
        else:
            runtime.close()
            runtime.close()
            with pytest.raises(RuntimeInputError, match="this runtime is closed"):
                runtime.predict(X)
            assert runtime.parameters().keys() == {"w"}
    gc.collect()
    assert children() == processes
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.sampled(every=3)
def test_after_an_error_no_process_waits_for_the_garbage_collector(folder: Path, trusted: list[bytes]) -> None:
    def fail(progress: Progress) -> None:
        raise KeyError("the caller's")

    gc.collect()
    processes = children()
    gc.disable()
    try:
        runtime = load_isolated(folder, trusted)
        with pytest.raises(KeyError, match="the caller's"):
            runtime.fit(X, Y, callbacks=[fail])
        with pytest.raises(NonFiniteLossError, match="training stopped"):
            runtime.fit(X, Y, epochs=50, hyperparameters={"lr": 1e5})
        assert len(children()) == len(processes) + 1
        del runtime
        assert children() == processes
    finally:
        gc.enable()


def test_requests_of_many_threads(here: Runtime, there: IsolatedRuntime) -> None:
    wrong: list[object] = []

    def ask(index: int) -> None:
        x = X[index : index + 3]
        for _ in range(50):
            if not np.array_equal(there.predict(x), here.predict(x)):
                wrong.append(index)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


@pytest.mark.slow
def test_nothing_is_imported_from_the_working_folder(
    folder: Path, trusted: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    with load_isolated(folder, trusted) as runtime:
        np.testing.assert_array_equal(runtime.predict(X), X @ W)


def test_a_child_that_cannot_start_says_why(
    folder: Path, trusted: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RuntimeProgramError, match=r"/nowhere/python cannot be started \(No such file"):
        load_isolated(folder, trusted)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with (
        load_isolated(folder, trusted) as runtime,
        pytest.raises(RuntimeProgramError, match=r"exit code 3\): the disk is on fire"),
    ):
        runtime.predict(X)


@pytest.mark.sampled(every=4)
def test_slots_with_isolated_models(
    make_bundle: MakeFolder, r: type[Roles], trusted: list[bytes], tmp_path: Path
) -> None:
    """A model on trial that takes more than it may is given up, and its process is all that it takes down."""
    good = one_program(make_bundle, r, "predict (int64[1] x) => (float[1] y) { y = Cast <to = 1> (x) }")
    large = one_program(make_bundle, r, LARGE)
    with Slots(tmp_path / "slots", trusted, isolated=True, seconds=30.0) as slots:
        slots.install(good)
        slots.switch()
        slots.confirm()
        slots.install(large)
        assert not slots.switch().vectors
        np.testing.assert_array_equal(slots.predict(N(10)), [10.0])
        np.testing.assert_array_equal(slots.predict(N(1 << 40)), np.float32([1 << 40]))
        assert slots.state.b.status == "bad"
        assert "needs more memory than it may use" in slots.state.b.reason
        np.testing.assert_array_equal(slots.predict(N(11)), [11.0])
