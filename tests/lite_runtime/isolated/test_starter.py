"""Isolated processes that are forked from a helper: the same runtime, how children end, and deaths of each process.

`children` and `processes` count zombies as well.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.errors import RuntimeLimitError
from archipel.lite_runtime.isolated import starter as starting
from archipel.lite_runtime.isolated.forking import MOST_FORKS
from archipel.lite_runtime.isolated.runtime import IsolatedRuntime, load_isolated
from archipel.lite_runtime.isolated.starter import Starter
from tests.support.forking import Helper, children, wait_until
from tests.support.text_bundles import Roles

W = np.array([[0.5, -1.0], [0.25, 2.0], [1.0, 0.0]], np.float32)
X = np.arange(12, dtype=np.float32).reshape(4, 3)
PREDICT = "predict (float[n, 3] x, float[3, 2] w) => (float[n, 2] q) { q = MatMul(x, w) }"
# Takes as many turns as the example says.
LONG = """predict (int64[1] x) => (float[1] y) {
    turns = Squeeze(x) \n yes = Constant <value = bool {1}> () \n zero = Constant <value_floats = [0.0]> ()
    y = Loop (turns, yes, zero) <body = turn (int64 i, bool c, float[1] a) => (bool c_new, float[1] a_new) {
        c_new = Identity(c) \n one = Constant <value_float = 1.0> () \n a_new = Add(a, one)
    }>
}"""
FOREVER = np.array([1 << 60])

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="child processes with limits need Linux")
Open = Callable[[], IsolatedRuntime]


@pytest.fixture
def starter() -> Iterator[Starter]:
    made = Starter(60.0)
    yield made
    made.close()
    assert made.pid is None
    assert children() == []


@pytest.fixture
def trusted(key: Ed25519PrivateKey) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


@pytest.fixture
def folder(make_bundle: Callable[..., Path], r: type[Roles]) -> Path:
    program = ("predict", PREDICT, {"x": r.example, "w": r.parameter("w"), "q": r.output})
    return make_bundle({"predict": program}, {"w": W})


@pytest.fixture
def long(make_bundle: Callable[..., Path], r: type[Roles]) -> Path:
    return make_bundle({"predict": ("predict", LONG, {"x": r.example, "y": r.output})}, {"unused": W})


@pytest.fixture
def load(folder: Path, trusted: list[bytes], starter: Starter) -> Open:
    return lambda: load_isolated(folder, trusted, starter=starter)


def answers(load: Open) -> None:
    with load() as runtime:
        np.testing.assert_array_equal(runtime.predict(X), X @ W)


def pipes_and_sockets() -> list[str]:
    """What this process has open that is no file: pidfds, too."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one with which the folder is read
            links.append(os.readlink(path))
    return sorted(link for link in links if not link.startswith("/"))


def parent_of(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.sampled(every=3)
def test_children_are_the_helpers_and_nothing_is_left_of_them(load: Open, starter: Starter) -> None:
    assert starter.pid is None  # none before it is needed
    answers(load)
    helper = starter.pid
    assert children() == [helper]
    pipes = pipes_and_sockets()
    with load() as first, load() as second:
        np.testing.assert_array_equal(first.predict(X), second.predict(X))
        assert parent_of(first.pid) == parent_of(second.pid) == helper
        assert first.pid != second.pid
    assert starter.pid == helper
    assert children(helper) == []
    assert pipes_and_sockets() == pipes
    assert len(os.listdir(f"/proc/{helper}/fd")) == 4  # three that lead nowhere, and its socket


@pytest.mark.sampled(every=4)
def test_how_a_child_ended_is_known(long: Path, trusted: list[bytes], starter: Starter) -> None:
    with load_isolated(long, trusted, cpu_seconds=0.3, starter=starter) as runtime:
        with pytest.raises(RuntimeLimitError, match=r"predict: more than the 0\.3 seconds of CPU time allowed"):
            runtime.predict(FOREVER)
        np.testing.assert_array_equal(runtime.predict(np.array([3])), [3.0])
        assert runtime.pid is not None
        os.kill(runtime.pid, signal.SIGSEGV)
        with pytest.raises(RuntimeLimitError, match=r"predict: .*SIGSEGV"):
            runtime.predict(np.array([3]))
        assert parent_of(starter.pid) == os.getpid()


@pytest.mark.sampled(every=6)
def test_the_helper_is_replaced_when_it_has_died(load: Open, starter: Starter) -> None:
    answers(load)
    first = starter.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    # Whoever started it waits for it at once, asked or not.
    assert wait_until(lambda: children() == [])
    answers(load)
    assert starter.pid not in (None, first)


@pytest.mark.sampled(every=4)
def test_a_helper_that_dies_with_a_request_is_replaced(load: Open, starter: Starter) -> None:
    answers(load)
    first = starter.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    found: list[np.ndarray] = []

    def ask() -> None:
        with load() as runtime:
            found.append(runtime.predict(X))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)  # the request is with the helper
    assert not found
    os.kill(first, signal.SIGKILL)
    thread.join(30)
    np.testing.assert_array_equal(found, [X @ W])


@pytest.mark.sampled(every=4)
def test_a_child_goes_on_without_its_helper(load: Open, starter: Starter) -> None:
    with load() as runtime:
        runtime.predict(X)
        child, helper = runtime.pid, starter.pid
        assert child is not None
        assert helper is not None
        os.kill(helper, signal.SIGKILL)
        assert wait_until(lambda: children() == [])
        np.testing.assert_array_equal(runtime.predict(X), X @ W)
        assert runtime.pid == child
        os.kill(child, signal.SIGKILL)
        with pytest.raises(RuntimeLimitError, match="died, and so did the one that would have seen how"):
            runtime.predict(X)
        np.testing.assert_array_equal(runtime.predict(X), X @ W)  # in a child of the next helper
    assert wait_until(lambda: not Path(f"/proc/{child}").exists())


DIES = """
import os, signal
from archipel.lite_runtime.isolated import forking
fork = forking.Forking._fork
def die(self, given):
    fork(self, given)
    os.kill(os.getpid(), signal.SIGKILL)
forking.Forking._fork = die
forking.main()
"""


@pytest.mark.parametrize("code", ["raise SystemExit(3)", DIES], ids=["before it serves", "before it answers"])
@pytest.mark.sampled(every=4)
def test_where_no_helper_lives_the_child_is_a_new_python(
    folder: Path, trusted: list[bytes], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(starting, "_MAIN", code)
    mark = 97.0 + os.getpid() / 1e9  # in the command line of the helper and of what it forked
    with load_isolated(folder, trusted, starter=Starter(mark)) as runtime:
        assert children() == [runtime.pid]
        np.testing.assert_array_equal(runtime.predict(X), X @ W)
        # What the helper may have forked has ended: it would read the messages to the child that took its place.
        assert wait_until(lambda: named(repr(mark)) == [])
    assert children() == []


def named(argument: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.sampled(every=4)
def test_it_ends_when_it_is_not_needed(folder: Path, trusted: list[bytes]) -> None:
    starter = Starter(0.3)
    with load_isolated(folder, trusted, starter=starter) as runtime:
        time.sleep(0.6)
        assert starter.pid is not None  # a child is at work
        np.testing.assert_array_equal(runtime.predict(X), X @ W)
    assert wait_until(lambda: children() == [])
    assert starter.pid is None
    answers(lambda: load_isolated(folder, trusted, starter=starter))


@pytest.mark.sampled(every=4)
def test_helper_and_children_go_with_the_agent(long: Path, trusted: list[bytes]) -> None:
    code = (
        "import sys, threading, numpy as np; from archipel.lite_runtime.isolated.runtime import load_isolated\n"
        "from archipel.lite_runtime.isolated.starter import Starter; starter = Starter(60.0)\n"
        "rt = load_isolated(sys.argv[1], [bytes.fromhex(sys.argv[2])], starter=starter); rt.predict(np.array([2]))\n"
        "threading.Thread(target=lambda: rt.predict(np.array([1 << 60])), daemon=True).start()\n"
        "print(rt.pid, starter.pid, flush=True); import time; time.sleep(100)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(long), trusted[0].hex()], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(0.2)  # deep in the loop by now
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        parent.kill()
    assert wait_until(lambda: not any(running(pid) for pid in pids))


def running(pid: int) -> bool:
    """Whether it runs; what is left of the children of others is init's to clear."""
    try:
        return not re.search(r"^State:\s+[ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False


@pytest.mark.sampled(every=4)
def test_a_fork_of_this_process_does_not_use_its_helper(load: Open, starter: Starter) -> None:
    """It has a copy of the socket: it would take an answer that is not for it."""
    answers(load)
    helper = starter.pid
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            answers(load)
            code = int(starter.pid == helper)
            starter.close()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    answers(load)
    assert starter.pid == helper


def test_a_child_that_ignores_the_end_of_the_agent_is_killed_by_the_helper() -> None:
    ignoring = "import signal, time; signal.signal(signal.SIGIO, signal.SIG_IGN); print('ready', flush=True)"
    with Helper(f"{ignoring}; time.sleep(100)") as helper:
        child, _ = helper.fork()
        assert helper.line() == "ready"
        helper.control.close()
        assert wait_until(lambda: not running(child))


@pytest.mark.sampled(every=3)
def test_children_share_no_random_state() -> None:
    draws = "import random, os; print(random.random(), np.random.random(), os.urandom(4).hex(), flush=True)"
    with Helper(draws, before="import random, numpy as np; np.random.random()") as helper:
        drawn = []
        for _ in range(2):
            helper.fork()
            drawn.append(helper.line().split())
    assert all(first != second for first, second in zip(*drawn, strict=True))


@pytest.mark.sampled(every=3)
def test_it_is_replaced_after_many_forks() -> None:
    with Helper("pass") as helper:
        for _ in range(MOST_FORKS):
            _, told = helper.fork()
            assert helper.status(told) == 0
        assert helper.process.wait(10) == 0
        with pytest.raises((BrokenPipeError, ConnectionResetError, EOFError)):
            helper.fork()


def test_a_request_without_descriptors_is_refused() -> None:
    with Helper("pass") as helper:
        socket.send_fds(helper.control, [b"f"], [0])
        assert helper.answer() < 0
        _, told = helper.fork()  # and it goes on
        assert helper.status(told) == 0
