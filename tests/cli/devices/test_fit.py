from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from archipel import bundle as b
from archipel.bundle import roles
from archipel.cli.devices.fit_table import evaluation_means, fit_table
from archipel.lite_runtime import History, load
from tests.support.commands import Command, Linear


@pytest.fixture
def data(tmp_path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((48, 4)).astype(np.float32)
    label = (x @ rng.standard_normal((4, 3))).argmax(1)
    np.savez(tmp_path / "train.npz", x=x, label=label)
    return {"x": x, "label": label}


def reference(
    linear: Linear, data: dict[str, np.ndarray], orders: list[np.ndarray], lr: float
) -> tuple[np.ndarray, list[float]]:
    """Plain SGD on half the squared error's gradient, in float64."""
    w, losses = linear.w.astype(np.float64), []
    for rows in orders:
        x = data["x"][rows]
        e = x @ w - np.eye(3)[data["label"][rows]]
        losses.append(float((e**2).mean()))
        w = w - lr * x.T @ e
    return w, losses


def test_one_batch_an_epoch_is_gradient_descent(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray]
) -> None:
    """Whole batches, so that the order of the data does not matter and NumPy can say what is right."""
    train = str(tmp_path / "train.npz")
    w, losses = reference(linear, data, [np.arange(48)] * 3, 0.004)
    options = ["--data", train, "--epochs", "3", "--batch-size", "48", "--set", "lr=0.004", "--validation", train]
    out, err = archipel("fit", *linear.arguments, *options, "--json", "--save", str(tmp_path / "mine"))
    assert err == ""
    result = json.loads(out)
    np.testing.assert_allclose(result["losses"], losses, rtol=1e-4)
    assert (result["steps"], result["examples"], result["stopped"]) == (3, 48, False)
    correct = ((data["x"] @ w).argmax(1) == data["label"]).sum()
    assert result["validation"][2] == {"accuracy": correct / 48, "count": 48}
    # The saved model is a bundle that the other commands open, with the weights that were learned.
    key = b.load_public_key(tmp_path / "k.pub")
    np.testing.assert_allclose(load(tmp_path / "mine", [key]).parameters()["w"], w, rtol=1e-3, atol=1e-5)
    out, _ = archipel("run", str(tmp_path / "mine"), *linear.arguments[1:], "--input", train, "--evaluate")
    assert f"accuracy        {correct / 48:.6g}\n" in out


def test_the_table_has_a_line_for_each_epoch(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray]
) -> None:
    train = str(tmp_path / "train.npz")
    options = ["--data", train, "--epochs", "3", "--batch-size", "20", "--validation", train]
    result = json.loads(archipel("fit", *linear.arguments, *options, "--json")[0])
    losses, validation = result["losses"], result["validation"]
    assert len(losses) == 9
    # A bundle that is one file, whose unpacked files go when the fit has ended.
    b.pack(Path(linear.arguments[0]), tmp_path / "linear.bundle")
    out, _ = archipel("fit", str(tmp_path / "linear.bundle"), *linear.arguments[1:], *options)
    lines = out.splitlines()
    assert re.split(r" {2,}", lines[0]) == ["epoch", "training loss", "validation accuracy", "validation count"]
    for epoch in range(3):
        number, loss, accuracy, count = lines[epoch + 1].split()
        assert (number, count) == (str(epoch + 1), "48")
        assert float(accuracy) == pytest.approx(validation[epoch]["accuracy"], rel=1e-5)
        assert float(loss) == pytest.approx(np.mean(losses[epoch * 3 : epoch * 3 + 3]), abs=1e-4)
    assert lines[4] == "training: of the training form (the float programs), before each step"
    assert lines[5] == "validation: means of what predict answers (float32), after each epoch"
    assert lines[6].startswith("9 steps on 48 examples in ")
    assert lines[7].startswith("not saved")


def test_no_two_columns_have_one_name() -> None:
    metrics = {"loss": [3.0, 1.0], "accuracy": [0.25, 0.75]}
    validation = [{"loss": 12.0, "correct": 6.0, "count": 8.0}]
    history = History(losses=metrics["loss"], metrics=metrics, validation=validation, steps=2, examples=8)
    ports = [roles.Metric(name=name, dtype="float32", shape=(), reduction="sum") for name in validation[0]]
    evaluate = b.Program(kind="evaluate", file="e.onnx", inputs=(), outputs=tuple(ports))
    head, row = fit_table(history, 1, [evaluation_means(evaluate, validation[0], 8)]).splitlines()
    named = dict(zip(re.split(r" {2,}", head), row.split(), strict=True))
    assert named == {
        "epoch": "1", "training loss": "2.0000", "training accuracy": "0.5000", "validation loss": "1.5",
        "validation accuracy": "0.75", "validation count": "8",
    }  # fmt: skip
    # A mean is no sum: it stays as it is.
    means = b.Program(kind="evaluate", file="e.onnx", inputs=(), outputs=(msgspec.structs.replace(
        ports[0], reduction="mean"), *ports[1:]))  # fmt: skip
    head, row = fit_table(history, 1, [evaluation_means(means, validation[0], 8)]).splitlines()
    assert dict(zip(re.split(r" {2,}", head), row.split(), strict=True))["validation loss"] == "12"


def test_the_seed_decides_the_order(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray]
) -> None:
    runs = [
        json.loads(
            archipel("fit", *linear.arguments, "--data", str(tmp_path / "train.npz"), "--batch-size", "8", "--json",
                     "--seed", seed)[0]
        )["losses"]
        for seed in ("1", "1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--set", "lr"], "--set lr: expected NAME=NUMBER"),
        (["--set", "lr=fast"], "expected NAME=NUMBER"),
        (["--set", "=1"], "expected NAME=NUMBER"),
        (["--set", "lr=nan"], "expected NAME=NUMBER"),
        (["--set", "lr=7"], "hyperparameter 'lr' must be from 0 to 1, got 7"),
        (["--set", "momentum=0.9"], "hyperparameter 'momentum' is not one of this bundle's: lr"),
        (["--seed", "5000000000"], "seed must be from 0 to 4294967295"),
        (["--validation", "nowhere.npz"], "nowhere.npz: No such file"),
    ],
)
def test_mistakes_are_one_line(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray], options: list[str], text: str
) -> None:
    _, err = archipel("fit", *linear.arguments, "--data", str(tmp_path / "train.npz"), *options, code=1)
    assert text in err
    assert err.count("\n") == 1


def test_data_must_have_every_field(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray]
) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, x=data["x"])
    _, err = archipel("fit", *linear.arguments, "--data", str(path), code=1)
    assert f"{path}: no entry 'label' (int64[n]); it has x" in err
    np.savez(path, x=data["x"], label=data["label"].astype(np.int32))
    _, err = archipel("fit", *linear.arguments, "--data", str(path), code=1)
    assert "entry 'label' must be int64[n], is int32[48]; save it as x.astype('int64')" in err
    np.savez(path, x=data["x"], label=data["label"][:7])
    _, err = archipel("fit", *linear.arguments, "--data", str(path), code=1)
    assert "7 examples" in err


@pytest.mark.sampled(every=8)
def test_ctrl_c_leaves_a_checkpoint_and_the_same_command_goes_on(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    options = ["--data", str(tmp_path / "train.npz"), "--batch-size", "4", "--seed", "3", "--json"]
    command = ["fit", *linear.arguments, *options, "--epochs", "1500", "--checkpoint", str(checkpoint)]
    process = subprocess.Popen(
        [sys.executable, "-m", "archipel", *command, "--checkpoint-every", "0.02"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not checkpoint.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert f"the checkpoint is in {checkpoint}; run the same command again to go on from it" in err
    assert "Traceback" not in err
    made = json.loads(b.read_weights(checkpoint)["header"].tobytes())
    assert 0 < made["steps"] < 1500 * 12
    assert not made["complete"]
    rest = json.loads(archipel(*command)[0])
    whole = json.loads(archipel("fit", *linear.arguments, *options, "--epochs", "1500")[0])
    assert rest["losses"] == whole["losses"]


def test_ctrl_c_without_a_checkpoint_says_so(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray]
) -> None:
    before = signal.getsignal(signal.SIGINT)

    def press() -> None:
        while signal.getsignal(signal.SIGINT) is before:
            time.sleep(0.02)
        time.sleep(0.3)  # into the middle of training
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    _, err = archipel("fit", *linear.arguments, "--data", str(tmp_path / "train.npz"), "--epochs", "10000000", code=130)
    thread.join()
    assert "nothing was kept; with --checkpoint FILE an interrupted fit can go on" in err
    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_is_replaced_unless_it_is_forced(
    linear: Linear, archipel: Command, tmp_path: Path, data: dict[str, np.ndarray]
) -> None:
    """And it is said before the first step: a fit may take hours."""
    mine, train = tmp_path / "mine", ["--data", str(tmp_path / "train.npz")]
    given = ["fit", *linear.arguments, *train, "--save", str(mine)]
    archipel(*given)
    learned = (mine / "learned.safetensors").read_bytes()
    err = archipel(*given, "--epochs", "100000", code=1)[1]
    assert f"{mine}: exists already; choose another name, or replace it with --force" in err
    assert (mine / "learned.safetensors").read_bytes() == learned
    archipel(*given, "--force", "--epochs", "2")
    assert (mine / "learned.safetensors").read_bytes() != learned
    for path in (tmp_path / "file", tmp_path / "folder"):
        path.write_bytes(b"mine") if path.name == "file" else path.mkdir()
        err = archipel(*given[:-1], str(path), "--force", "--epochs", "100000", code=1)[1]
        assert f"{path}: holds something else; choose another name, or remove it first" in err
    assert (tmp_path / "file").read_bytes() == b"mine"
