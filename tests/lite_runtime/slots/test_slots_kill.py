"""SIGKILL at every step that changes the disk, and at random times, while slots are installed, switched, rolled back.

A script makes the changes in forked children. A profile hook counts the calls that reach the file system and kills the
child at a chosen one, so the product has no code for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support.scaling import SCALE
from tests.support.text_bundles import Roles

# The states that the course below goes through: active slot, status of a and b.
COURSE = [
    ["a", "good", "empty"],
    ["a", "good", "staged"],
    ["b", "good", "trying"],
    ["b", "good", "good"],
    ["b", "empty", "good"],
    ["b", "staged", "good"],
    ["a", "trying", "good"],
    ["b", "bad", "good"],
]

SCRIPT = r"""
import json, os, random, shutil, signal, sys, time
import numpy as np
from pathlib import Path
from archipel.lite_runtime.engines import onnx_runtime
from archipel.lite_runtime.slots.model_slots import Slots
from archipel.lite_runtime.slots.folder import SlotFolder

onnx_runtime.onnxruntime()
mode, base, key, seed, count = sys.argv[1], Path(sys.argv[2]), bytes.fromhex(sys.argv[3]), sys.argv[4], int(sys.argv[5])
two, three = map(Path, sys.argv[6:8])
X = np.array([[1.0, 2.0, 4.0]], np.float32)
CHANGING = {"fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "write", "fchmod", "close", "copyfileobj"}


def slots(folder, **options):
    return Slots(folder, [key], confirm_after=None, **options)


def course(folder):
    with slots(folder) as s:
        s.install(three); s.switch(); s.confirm()
        s.runtime.set_parameters({"w": np.full(3, 4, np.float32)}); s.save()
        # With other parameters than its own: never without them.
        s.install(three, {"w": np.full(3, 5, np.float32)}); s.switch(); s.rollback("no")


def endless(folder):
    s = slots(folder)
    while True:
        for bundle in (three, two):
            s.install(bundle); s.switch(); s.predict(X); s.confirm()


def in_child(function, *arguments):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def wait(pid):
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


def killed_at(folder, number, total=None):
    seen = 0

    def hook(frame, event, function):
        nonlocal seen
        if event == "c_call" and function.__name__ in CHANGING or event == "call" and frame.f_code.co_name == "open":
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(hook)
    course(folder)
    sys.setprofile(None)
    if total is not None:
        total.write_text(str(seen))


def look(folder, number):
    with SlotFolder(folder) as f:
        state = [f.state.active, f.state.a.status, f.state.b.status]
    with slots(folder) as s:
        factor = (s.predict(X) / X)[0].tolist()
        after = [s.state.active, s.state.a.status, s.state.b.status]
        names = sorted(os.listdir(folder))
        if s.state.slot(s.state.active).status == "trying":
            s.confirm()
        s.install(two); s.switch()
        assert (s.predict(X) == 2 * X).all()
    print(json.dumps({"number": number, "state": state, "after": after, "factor": factor, "names": names}))


def prepare(folder):
    with slots(folder) as s:
        s.install(two); s.switch(); s.confirm()


template = base / "template"
assert wait(in_child(prepare, template)) == 0
if mode == "steps":
    shutil.copytree(template, base / "all")
    assert wait(in_child(killed_at, base / "all", -1, base / "total")) == 0
    numbers = range(1, int((base / "total").read_text()) + 1, count)
else:
    numbers = range(count)
    random.seed(seed)
for number in numbers:
    folder = base / f"f{number}"
    shutil.copytree(template, folder)
    if mode == "steps":
        ended = wait(in_child(killed_at, folder, number))
    else:
        pid = in_child(endless, folder)
        time.sleep(random.uniform(0.0, 0.3))
        os.kill(pid, signal.SIGKILL)
        ended = wait(pid)
    assert ended == -signal.SIGKILL, (number, ended)
    assert wait(in_child(look, folder, number)) == 0, number
    shutil.rmtree(folder)
"""

Found = dict[str, Any]
"""What the script says of a folder after a kill."""
Run = Callable[[str, int], list[Found]]
"""(mode, count) -> what was found after each kill."""


@pytest.fixture
def run(make_bundle: Callable[..., Path], r: type[Roles], key: Ed25519PrivateKey, tmp_path: Path) -> Run:
    def start(mode: str, count: int = 0) -> list[Found]:
        meaning = {"x": r.example, "w": r.parameter("w"), "y": r.output}
        bundles = [
            make_bundle({"predict": ("predict", SCALE, meaning)}, {"w": np.full(3, factor, np.float32)})
            for factor in (2, 3)
        ]
        (tmp_path / "kills").mkdir()
        arguments = [mode, tmp_path / "kills", key.public_key().public_bytes_raw().hex(), "7", count, *bundles]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *map(str, arguments)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return start


def check_steps(found: list[Found]) -> set[int]:
    reached = 0
    for result in found:
        state = COURSE.index(result["state"])
        assert state >= reached, result  # every later kill finds the course further on, never back
        reached = state
        assert result["after"] == result["state"]
        assert result["names"] == [name for name in ("a", "b", "lock", "state.json") if name in result["names"]]
        # The active slot's own model; b with what it has learned (4) once that was saved.
        factor = result["factor"][0]
        assert result["factor"] == [factor] * 3
        assert factor in {"a": (2, 5), "b": (3, 4)}[result["state"][0]], result
        assert factor == 2 or state > 1
    return {COURSE.index(result["state"]) for result in found}


@pytest.mark.sampled(every=4)
def test_a_kill_at_many_steps_leaves_the_old_state_or_the_new(run: Run) -> None:
    found = run("steps", 11)
    assert len(check_steps(found)) > 4
    assert len(found) > 10


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_the_old_state_or_the_new(run: Run) -> None:
    found = run("steps", 1)
    assert check_steps(found) == set(range(len(COURSE)))
    assert len(found) > 100


def check_random(results: list[Found], count: int) -> None:
    assert len(results) == count
    for result in results:
        assert result["factor"] in ([2.0] * 3, [3.0] * 3)
        assert result["after"] == result["state"]


@pytest.mark.sampled(every=4)
def test_kills_at_random_times(run: Run) -> None:
    check_random(run("random", 5), 5)


@pytest.mark.slow
def test_many_kills_at_random_times(run: Run) -> None:
    check_random(run("random", 50), 50)
