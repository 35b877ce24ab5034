"""Interrupting a fit: pause, cancel, checkpoints, kill -9. A resumed run must end where an uninterrupted one does."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from archipel import convert, training
from archipel.bundle import generate_key, load_public_key, open_bundle, read_weights, save_public_key
from archipel.converter import Signing, Training
from archipel.errors import CheckpointError, NonFiniteLossError, RuntimeInputError
from archipel.lite_runtime import Control, History, Progress, Runtime, load

ARGUMENTS: dict[str, Any] = {"epochs": 3, "batch_size": 8, "seed": 5, "hyperparameters": {"lr": 0.05}}
STEPS = 3 * 8  # of 60 examples


class Net(torch.nn.Module):
    """State of every kind: momentum of the round, running statistics of the device, masks from seed and step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(6, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.drop = torch.nn.Dropout(0.3)
        self.b = torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(torch.relu(self.norm(self.a(x)))))


def data(count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, 6)).astype(np.float32), rng.integers(0, 3, count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = generate_key()
    root = tmp_path_factory.mktemp("fitting")
    convert(
        Net(), root / "net", example=torch.zeros(2, 6),
        training=Training(training.losses.cross_entropy(), training.optimizers.sgd(momentum=0.9)), signing=Signing(key),
    )  # fmt: skip
    save_public_key(key, root / "key.pub")
    return root


@pytest.fixture
def rt(folder: Path) -> Runtime:
    return load(folder / "net", [load_public_key(folder / "key.pub")])


def everything(rt: Runtime) -> dict[str, np.ndarray]:
    return {**rt.parameters(), **{f"state {name}": array for name, array in rt.state.state.items()}}


class Whole(NamedTuple):
    """What a run of its own comes to."""

    tensors: dict[str, np.ndarray]
    history: History


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    """The uninterrupted run."""
    rt = load(folder / "net", [load_public_key(folder / "key.pub")])
    x, y = data()
    history = rt.fit(x, y, validation=(x, y), **ARGUMENTS)
    assert history.steps == STEPS
    return Whole(everything(rt), history)


def assert_same(rt: Runtime, history: History, whole: Whole) -> None:
    assert history == whole.history
    for name, array in whole.tensors.items():
        np.testing.assert_array_equal(everything(rt)[name], array, err_msg=name)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("last", [0, 4, 7, 8, STEPS - 1])
@pytest.mark.sampled(every=6)
def test_goes_on_after_any_step(rt: Runtime, folder: Path, whole: Whole, tmp_path: Path, last: int) -> None:
    x, y = data()

    def fail(progress: Progress) -> None:
        if progress.step == last:
            raise Interrupted

    options = {"validation": (x, y), "checkpoint": tmp_path / "c", "checkpoint_every": 0.0}
    with pytest.raises(Interrupted):
        rt.fit(x, y, callbacks=[fail], **ARGUMENTS, **options)
    assert (tmp_path / "c").exists() == (last > 0)
    seen: list[int] = []
    other = load(folder / "net", [load_public_key(folder / "key.pub")])
    history = other.fit(x, y, callbacks=[lambda p: seen.append(p.step)], **ARGUMENTS, **options)
    # The step that was interrupted was not acknowledged, so it is made again, and only that one.
    assert seen == list(range(last, STEPS))
    assert_same(other, history, whole)


def test_a_complete_fit_is_not_repeated_but_its_result_is_there(
    rt: Runtime, folder: Path, whole: Whole, tmp_path: Path
) -> None:
    x, y = data()
    rt.fit(x, y, validation=(x, y), checkpoint=tmp_path / "c", **ARGUMENTS)
    other = load(folder / "net", [load_public_key(folder / "key.pub")])
    seen: list[Progress] = []
    history = other.fit(x, y, validation=(x, y), checkpoint=tmp_path / "c", callbacks=[seen.append], **ARGUMENTS)
    assert not seen
    assert_same(other, history, whole)
    # From where it ended the same call is another fit.
    assert other.fit(x, y, checkpoint=tmp_path / "c", **ARGUMENTS).losses[0] < history.losses[0]


def test_another_fit_does_not_overwrite_one_that_is_not_complete(rt: Runtime, tmp_path: Path) -> None:
    x, y = data()
    options: dict[str, Any] = {"checkpoint": tmp_path / "c", "checkpoint_every": 0.0}

    def fail(progress: Progress) -> None:
        if progress.step == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        rt.fit(x, y, callbacks=[fail], **ARGUMENTS, **options)
    for change in ({"seed": 6}, {"epochs": 4}, {"hyperparameters": {"lr": 0.06}}, {"shuffle": False}):
        with pytest.raises(CheckpointError, match="of another fit that is not complete"):
            rt.fit(x, y, **{**ARGUMENTS, **options, **change})
    with pytest.raises(CheckpointError, match="of another fit"):
        rt.fit(x + 1, y, **ARGUMENTS, **options)
    with pytest.raises(RuntimeInputError, match="in a folder that exists"):
        rt.fit(x, y, **{**ARGUMENTS, **options, "checkpoint": tmp_path / "no" / "c"})


def test_a_damaged_checkpoint_is_an_error(rt: Runtime, tmp_path: Path) -> None:
    x, y = data()
    path = tmp_path / "c"
    rt.fit(x, y, checkpoint=path, **ARGUMENTS)
    rt.reset("parameters")
    rt.reset("state")
    good = path.read_bytes()
    assert "header" in read_weights(good)
    start = 8 + int.from_bytes(good[:8], "little")
    rng = random.Random(0)
    refused = 0
    for _ in range(60):
        broken = bytearray(good)
        if rng.random() < 0.2:
            del broken[rng.randrange(len(broken)) :]
        else:
            broken[rng.randrange(start)] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        try:
            rt.fit(x, y, checkpoint=path, **ARGUMENTS)
        except CheckpointError as error:
            refused += str(path) in str(error)
        rt.reset("parameters")
        rt.reset("state")
    assert refused > 50


def test_a_loss_that_is_not_finite_leaves_no_checkpoint(rt: Runtime, tmp_path: Path) -> None:
    x, y = data()
    options: dict[str, Any] = {"checkpoint": tmp_path / "c", "checkpoint_every": 0.0}
    x[40] = np.inf
    with pytest.raises(NonFiniteLossError):
        rt.fit(x, y, **ARGUMENTS, **options)
    assert all(np.isfinite(array).all() for array in rt.parameters().values())
    assert not (tmp_path / "c").exists()


def test_cancel_keeps_what_was_learned(rt: Runtime) -> None:
    x, y = data()
    control = Control()

    def at_four(progress: Progress) -> None:
        if progress.step == 4:
            control.cancel()

    before = rt.parameters()
    history = rt.fit(x, y, control=control, callbacks=[at_four], **ARGUMENTS)
    assert history.stopped
    assert control.cancelled
    assert history.steps == len(history.losses) == 5
    assert not np.array_equal(rt.parameters()["b.weight"], before["b.weight"])


def test_pause_holds_between_steps_and_leaves_a_checkpoint(rt: Runtime, whole: Whole, tmp_path: Path) -> None:
    x, y = data()
    control = Control()
    seen: list[int] = []

    def watch(progress: Progress) -> None:
        seen.append(progress.step)
        if progress.step == 9:
            control.pause()

    result: list[History] = []
    options = {"validation": (x, y), "checkpoint": tmp_path / "c", "control": control, "callbacks": [watch]}
    thread = threading.Thread(target=lambda: result.append(rt.fit(x, y, **ARGUMENTS, **options)))
    thread.start()
    until(lambda: control.waiting)
    assert (tmp_path / "c").exists()
    time.sleep(0.1)
    assert seen[-1] == 9
    control.resume()
    thread.join(30)
    assert not control.waiting
    assert_same(rt, result[0], whole)


def test_cancel_ends_a_pause(rt: Runtime) -> None:
    x, y = data()
    control = Control()
    control.pause()
    result: list[History] = []
    thread = threading.Thread(target=lambda: result.append(rt.fit(x, y, control=control, **ARGUMENTS)))
    thread.start()
    until(lambda: control.waiting)
    control.cancel()
    thread.join(30)
    assert result[0].steps == 1


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


CHILD = """
import sys, time
from pathlib import Path
import numpy as np
from archipel.bundle import load_public_key
from archipel.lite_runtime import load
root, out = Path(sys.argv[1]), Path(sys.argv[2])
rng = np.random.default_rng(0)
x, y = rng.standard_normal((60, 6)).astype(np.float32), rng.integers(0, 3, 60)
rt = load(root / "net", [load_public_key(root / "key.pub")])
print("ready", flush=True)
history = rt.fit(x, y, validation=(x, y), epochs=3, batch_size=8, seed=5, hyperparameters={"lr": 0.05},
                 checkpoint=out / "c", checkpoint_every=0.0, callbacks=[lambda p: time.sleep(0.01)])
rt.save(out / "slot")
print("done", history.steps, flush=True)
"""


def killed_until_done(folder: Path, out: Path, rng: random.Random, kills: int) -> int:
    """Kill the fit at random times, at most `kills` times, and let it finish then. Returns how often it was killed."""
    done = 0
    while True:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), str(out)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process:
            assert process.stdout.readline() == "ready\n"
            if done < kills:
                time.sleep(rng.uniform(0.0, 0.3))
                process.send_signal(signal.SIGKILL)
                if process.wait() == -signal.SIGKILL:
                    done += 1
                    continue
            assert process.stdout.readline() == f"done {STEPS}\n"
            assert process.wait() == 0
        return done


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.sampled(every=4)
def test_killed_at_random_times(folder: Path, whole: Whole, tmp_path: Path, kills: int) -> None:
    rng = random.Random(kills)
    left, round_number = kills, 0
    while left > 0:
        out = tmp_path / f"{round_number}"
        out.mkdir()
        left -= killed_until_done(folder, out, rng, min(left, 5))
        round_number += 1
        rt = load(out / "slot", [load_public_key(folder / "key.pub")])
        for name, array in whole.tensors.items():
            np.testing.assert_array_equal(everything(rt)[name], array, err_msg=name)
        assert sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) == ["c", "slot"]


def test_a_fit_leaves_its_buffers_without_the_help_of_the_collector(rt: Runtime) -> None:
    x, y = data()
    gc.collect()
    gc.disable()
    try:
        rt.fit(x, y, validation=(x, y), control=Control(), callbacks=[lambda progress: None], **ARGUMENTS)
        buffer = weakref.ref(rt.parameters()["a.weight"])
        rt.fit(x, y, **ARGUMENTS)
        assert buffer() is None
    finally:
        gc.enable()


def test_save_and_load(rt: Runtime, folder: Path, tmp_path: Path) -> None:
    keys = [load_public_key(folder / "key.pub")]
    x, y = data()
    rt.fit(x, y, **ARGUMENTS)
    rt.save(tmp_path / "slot")
    other = load(tmp_path / "slot", keys)
    np.testing.assert_array_equal(other.predict(x), rt.predict(x))
    rt.fit(x, y, **ARGUMENTS)
    rt.save(tmp_path / "slot")
    np.testing.assert_array_equal(load(tmp_path / "slot", keys).predict(x), rt.predict(x))
    for name, array in everything(load(tmp_path / "slot", keys)).items():
        np.testing.assert_array_equal(array, everything(rt)[name])
    # The bundle in it is the signed one.
    assert open_bundle(tmp_path / "slot" / "bundle", keys).digest == rt.bundle.digest
    with pytest.raises(RuntimeInputError, match="holds something else"):
        rt.save(folder)
    assert not [path for path in tmp_path.iterdir() if path.name != "slot"]


def test_save_is_durable_before_it_returns(rt: Runtime, tmp_path: Path) -> None:
    synced: list[str] = []
    events: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    os.fsync = fsync
    try:
        rt.save(tmp_path / "slot")
    finally:
        os.fsync = real
    events = [name.rpartition("/")[2] for name in synced]
    assert any(name.startswith(".learned.safetensors") for name in events)
    assert synced[-1] == str(tmp_path)
