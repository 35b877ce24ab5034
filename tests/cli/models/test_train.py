"""`archipel train`, as a user runs it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

from archipel import convert
from archipel.bundle import generate_key
from archipel.cli.main import archipel
from archipel.cli.models.train.job import EXAMPLE, read_job
from archipel.converter import Signing
from archipel.errors import CommandError
from archipel.graph import Builder, Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.training.cloud.config import parse_config

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 12)).astype(np.float32)
Y = (X[:, 0] > X[:, 1]).astype(np.int64)

SHAPES = {"first": (12, 8), "second": (8, 2)}
PARAMETERS = 12 * 8 + 8 * 2

CONFIG = """
[model]
onnx = "network.onnx"

[data]
train = "train.npz"
validation = "validation.npz"

[train]
optimizer = { name = "adam", lr = 0.1 }
schedule = "cosine"
epochs = 5
threads = 1

[output]
folder = "out"
"""

OWN = """
import numpy as np
import time
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

def make(width=2):
    return Slow(12, width)

def load():
    x = np.random.default_rng(0).normal(size=(200, 12)).astype(np.float32)
    return {"input": x, "label": (x[:, 0] > 0).astype(np.int64)}, {"input": x, "label": (x[:, 0] > 0).astype(np.int64)}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("train.npz", input=X[:150], label=Y[:150])
    np.savez("validation.npz", input=X[150:], label=Y[150:])
    Path("job.toml").write_text(CONFIG)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="network")
    op, rng = Builder(graph), np.random.default_rng(0)
    x = op.input("input", ir.DataType.FLOAT, ["batch", 12])
    first, second = (op.initializer(n, rng.normal(size=s).astype(np.float32) / 3) for n, s in SHAPES.items())
    op.name_output(op.MatMul(op.Relu(op.MatMul(x, first)), second), "logits")
    Model(ir.Model(graph, ir_version=IR_VERSION)).save("network.onnx")
    return tmp_path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(archipel, ["train", "job.toml", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.sampled(every=4)
def test_a_file_becomes_a_trained_model_with_its_metrics(folder: Path) -> None:
    out = run("--set", "metrics=['F1Score']")
    assert "epoch 5: training loss" in out
    facts = json.loads(Path("out/metrics.json").read_text())
    assert facts["finished"]
    assert len(facts["history"]) == 5
    best = facts["history"][facts["best"] - 1]
    session = onnxruntime.InferenceSession("out/model.onnx")
    (logits,) = session.run(None, {session.get_inputs()[0].name: X[150:]})
    assert best["metrics"]["accuracy"] == pytest.approx((logits.argmax(1) == Y[150:]).mean())
    assert best["metrics"]["accuracy"] > 0.8
    assert 0.8 < best["metrics"]["F1Score"] <= 1
    state = torch.load("out/state.pt", weights_only=True)
    assert sum(value.numel() for value in state.values()) == PARAMETERS
    assert Path("out/curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_network_of_the_zoo_trains_and_its_onnx_file_trains_on(folder: Path) -> None:
    zoo = 'zoo = "mlp"\narguments = { features = 12, hidden = 8, classes = 2 }'
    Path("job.toml").write_text(CONFIG.replace('onnx = "network.onnx"', zoo))
    run("--set", "epochs=1")
    before = json.loads(Path("out/metrics.json").read_text())["history"][0]
    Path("job.toml").write_text(CONFIG.replace("network.onnx", "out/model.onnx"))
    run("--set", "output.folder=more", "--set", "epochs=2")
    after = json.loads(Path("more/metrics.json").read_text())["history"]
    assert after[0]["train_loss"] < before["train_loss"]
    assert after[1]["metrics"]["accuracy"] >= before["metrics"]["accuracy"]


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir())
    out = run("--dry-run", "--set", "tensorboard=logs")
    assert f"{PARAMETERS} trained parameters, on " in out
    assert "5 minibatches of 32 in an epoch" in out
    assert sorted(folder.iterdir()) == before


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_trained_and_resume_goes_on(folder: Path) -> None:
    Path("own.py").write_text(OWN)
    text = CONFIG.replace('onnx = "network.onnx"', 'python = "own.py:make"\narguments = { width = 2 }')
    text = text.replace('train = "train.npz"\nvalidation = "validation.npz"', 'python = "own.py:load"')
    Path("job.toml").write_text(text)
    whole = run("--set", "output.folder=whole")
    command = [sys.executable, "-m", "archipel", "train", "job.toml", "--set", "checkpoint_every=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not Path("out/checkpoint/last.pt").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "go on with: archipel train job.toml --resume" in errors
    refused = CliRunner().invoke(archipel, ["train", "job.toml"])
    assert "the checkpoint of an earlier training; set resume (--resume)" in str(refused.exception)
    resumed = run("--resume")
    numbers = [json.loads(Path(f"{name}/metrics.json").read_text())["history"] for name in ("out", "whole")]
    for history in numbers:
        for epoch in history:
            epoch.pop("seconds")
    assert numbers[0] == numbers[1]
    assert whole.count("epoch") >= resumed.count("epoch")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("batch_size=0", "job.toml: train.batch_size must be a whole number of 1 or more, is 0"),
        ("epoch=1", "job.toml: train.epoch: no such setting; did you mean 'epochs'"),
        ("loss=mee", "job.toml: train.loss: no 'mee'; .* did you mean 'mse'"),
        ("optimizer.momentum=1", "job.toml: train.optimizer.momentum: adam has no such argument; it has lr"),
        ("model={zoo='nope'}", "job.toml: model.zoo: no network 'nope'; there are autoencoder"),
        (
            "model={zoo='mlp', arguments={depth=4}}",
            "job.toml: model.arguments.depth: mlp has no such",
        ),
        ("model.zoo=mlp", r"job.toml: model: give one of zoo, onnx, bundle, python, got \['zoo', 'onnx'\]"),
        ("data.foo=1", "job.toml: data: Object contains unknown field `foo`; `archipel train --help` has an example"),
        ("data.python=x.py:f", "job.toml: data: give train, a file, or python, a function"),
        ("data.train=no.npz", "no.npz"),
        ("label=y", "job.toml: train.label: the data have no field 'y' for the labels; they have input, label"),
        ("=3", "--set =3: expected KEY=VALUE"),
        ("model={python='os:system'}", r"job.toml: model.arguments: os:system needs 'command'; .*\[model.arguments\]"),
        (
            "model={python='os:getpid'}",
            "job.toml: model.python: os:getpid returned int; it must return a torch.nn.Module",
        ),
        ("output.folder=/proc/x", "job.toml: output.folder: /proc/x: No such file or directory; choose a folder"),
        ("output.folder=job.toml/x", "job.toml: output.folder: job.toml/x: Not a directory; choose a folder"),
    ],
)
def test_errors_name_the_key(setting: str, message: str) -> None:
    result: Any = CliRunner().invoke(archipel, ["train", "job.toml", "--set", setting, "--set", "epochs=1"])
    assert result.exit_code == 1

    assert re.search(message, str(result.exception)), result.exception


def test_the_example_of_the_help_is_valid(folder: Path) -> None:
    Path("example.toml").write_text(EXAMPLE)
    job = read_job(Path("example.toml"), [])
    assert parse_config(job.train).epochs == 20
    Path("example.toml").write_text("x = 1\nx = 2")
    with pytest.raises(CommandError, match=r"example\.toml: Cannot overwrite a value"):
        read_job(Path("example.toml"), [])


SPLITS = """
from types import SimpleNamespace
import numpy as np

def load(shift=0.0, parts="named"):
    def some(count):
        x = np.random.default_rng(count).normal(size=(count, 12)).astype(np.float32)
        return x + np.float32(shift), (x[:, 0] > x[:, 1]).astype(np.int64)
    train, validation, test = some(150), some(50), some(400)
    if parts == "tuple":
        return train, validation, test
    return SimpleNamespace(train=train, validation=validation, test=test)
"""


@pytest.mark.parametrize("parts", ["named", "tuple"])
@pytest.mark.sampled(every=4)
def test_the_result_is_measured_on_test_data(parts: str) -> None:
    Path("splits.py").write_text(SPLITS)
    data = f'[data]\npython = "splits.py:load"\n[data.arguments]\nparts = "{parts}"\n'
    Path("job.toml").write_text(re.sub(r"\[data\][^\[]*", data, CONFIG))
    out = run()
    found = json.loads(Path("out/metrics.json").read_text())["test"]
    assert f"test: loss {found['loss']:.4f}, accuracy {found['accuracy']:.4f}" in out
    # The same of the written model, in NumPy.
    x = np.random.default_rng(400).normal(size=(400, 12)).astype(np.float32)
    logits = onnxruntime.InferenceSession("out/model.onnx").run(None, {"input": x})[0]
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == (x[:, 0] > x[:, 1])).mean(), abs=0.003)
    shifted = run("--set", "data.arguments.shift=3.0", "--set", "output.folder=other")
    assert out.splitlines()[0] != shifted.splitlines()[0]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.arguments.width=3", r"data.arguments: are for python; files have data.options"),
        ("data.test=missing.npz", r"missing.npz"),
    ],
)
def test_wrong_test_data(setting: str, message: str) -> None:
    result = CliRunner().invoke(archipel, ["train", "job.toml", "--set", setting])
    assert result.exit_code != 0
    assert re.search(message, str(result.exception))


@pytest.mark.sampled(every=3)
def test_the_card_goes_into_the_bundle() -> None:
    """What a training has measured is in its ONNX file's card, and in the bundle's without another word."""
    card = '\n[card]\ntask = "sorting"\nlicence = "MIT"\n[[card.data]]\nname = "drawn"\nuse = "validation"\n'
    Path("job.toml").write_text(CONFIG + card)
    run("--set", "epochs=2", "--set", f"data.train={Path('train.npz').resolve()}")
    best = json.loads(Path("out/metrics.json").read_text())
    key = generate_key()
    bundle = convert("out/model.onnx", "out/b", signing=Signing(key))
    found = bundle.card
    assert found is not None
    assert (found.name, found.task, found.licence, found.parameters) == ("job", "sorting", "MIT", PARAMETERS)
    assert {each.name: each.value for each in found.metrics} == best["history"][best["best"] - 1]["metrics"]
    assert {(each.data, each.examples, each.command) for each in found.metrics} == {
        ("drawn", 50, "archipel train job.toml --set epochs=2")
    }
    assert found.recipe == CONFIG.strip()


@pytest.mark.parametrize(
    ("card", "message"),
    [("colour = 1", "card: Object contains unknown field `colour`"), ("metrics = []", "card.metrics: are measured")],
)
def test_a_wrong_card_is_refused_before_training(card: str, message: str) -> None:
    Path("job.toml").write_text(f"{CONFIG}\n[card]\n{card}\n")
    result = CliRunner().invoke(archipel, ["train", "job.toml"])
    assert result.exit_code != 0
    assert message in str(result.exception)
    assert not Path("out").exists()


@pytest.mark.sampled(every=3)
def test_tables_with_options_of_their_reader() -> None:
    names = ["low", "high"]
    for name, rows in (("train", range(150)), ("validation", range(150, 200))):
        lines = [",".join([*(f"{x:.6g}" for x in X[row]), names[Y[row]]]) for row in rows]
        head = ",".join([*(f"c{number}" for number in range(12)), "pay"])
        Path(f"{name}.csv").write_text("\n".join([head, *lines, "1,2"]))
    config = CONFIG.replace(".npz", ".csv").replace("epochs = 5", "epochs = 2")
    Path("job.toml").write_text(config)
    result = CliRunner().invoke(archipel, ["train", "job.toml"])
    assert "train.csv, line 152: expected 13 cells" in str(result.exception)
    columns = [f"c{number}" for number in range(12)]
    options = f'[data.options]\non_bad = "skip"\nfields = {{ x = {json.dumps(columns)}, label = "pay" }}\n'
    Path("job.toml").write_text(config.replace("[train]", f"{options}\n[train]"))
    result = CliRunner().invoke(archipel, ["train", "job.toml"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    few = Path("validation.csv").read_text().replace("low", "middle")
    Path("validation.csv").write_text(few)
    result = CliRunner().invoke(archipel, ["train", "job.toml"])
    assert re.search(
        r"data\.validation: validation\.csv: field 'label' has other classes than train\.csv \(low, middle\); name",
        str(result.exception),
    )
    Path("job.toml").write_text(config.replace("[train]", "[data.options]\nskip = 1.5\n\n[train]"))
    result = CliRunner().invoke(archipel, ["train", "job.toml"])
    assert re.search(r"train\.csv: open_csv cannot take \{'skip': 1\.5\}", str(result.exception))
