"""`archipel train` with [[preprocess]]: a network that learns from raw bytes, and takes them in the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

from archipel import Model
from archipel.cli.main import archipel
from archipel.errors import CommandError
from archipel.preprocessing import describe

NETWORK = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
"""
CONFIG = """
[model]
python = "network.py:make"

[data]
train = "train.npz"
validation = "train.npz"

[[preprocess]]
kind = "random_flip"

[[preprocess]]
kind = "scale"

[[preprocess]]
kind = "normalize"

[[preprocess]]
kind = "layout"
source = "NHWC"
target = "NCHW"

[train]
optimizer = { name = "adam", lr = 0.01 }
epochs = 6
batch_size = 16
threads = 1

[output]
folder = "out"
"""


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    label = np.arange(64) % 2
    x = rng.integers(0, 120, (64, 6, 6, 3), dtype=np.uint8)
    x[label == 1, :, :, 0] += 60  # redder
    np.savez("train.npz", image=x, label=label)
    Path("network.py").write_text(NETWORK)
    Path("job.toml").write_text(CONFIG)
    body = "{ f = Flatten (x) h = MatMul (f, w) y = Add (h, b) }"
    text = f'<ir_version: 10, opset_import: ["" : 21]> net (float[n, 3, 6, 6] x) => (float[n, 2] y) {body}'
    proto = onnx.parser.parse_model(text)
    for name, shape in (("w", (108, 2)), ("b", (2,))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name))
    Model.from_proto(proto).save("network.onnx")
    return x


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("network", ["onnx", pytest.param("python", marks=pytest.mark.slow)])
def test_the_trained_network_takes_bytes(network: str, pictures: np.ndarray) -> None:
    if network == "onnx":
        Path("job.toml").write_text(CONFIG.replace('python = "network.py:make"', 'onnx = "network.onnx"'))
    done = CliRunner().invoke(archipel, ["train", "job.toml"])
    assert done.exit_code == 0, done.output
    model = Model.from_onnx("out/model.onnx")
    assert [(info.name, info.dtype, info.shape) for info in model.inputs] == [("image", "uint8", ("batch", 6, 6, 3))]
    kinds = [table["kind"] for table in describe(model)]
    assert kinds == ["raw", "random_flip", "scale", "normalize", "layout"]
    measured = describe(model)[3]
    np.testing.assert_allclose(measured["mean"], pictures.mean(axis=(0, 1, 2)) / 255, rtol=1e-5)
    session = onnxruntime.InferenceSession("out/model.onnx", providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {"image": pictures})
    assert (answer.argmax(axis=1) == np.arange(64) % 2).mean() > 0.9


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('kind = "scale"', 'kind = "scales"', "job.toml: [[preprocess]] 2: kind is one of raw, "),
        ('"NHWC"', '"NHW"', "job.toml: [[preprocess]] 4 (layout): 'NHW' and 'NCHW' have not the same letters"),
        ('kind = "scale"', 'kind = "resize"\nsize = [2, 2]', "job.toml: [[preprocess]]: Sequential does not run on"),
        ('kind = "normalize"', 'kind = "log_mel"', "job.toml: [[preprocess]]: transform 3 of image: log_mel: expected"),
    ],
)
def test_what_does_not_fit_is_said(pictures: np.ndarray, old: str, new: str, problem: str) -> None:
    Path("job.toml").write_text(CONFIG.replace(old, new))
    done = CliRunner().invoke(archipel, ["train", "job.toml", "--dry-run"])
    assert isinstance(done.exception, CommandError)
    assert problem in str(done.exception)
