"""Equal weights that torch.onnx.export merged: running statistics of BatchNormalization are tensors of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from archipel.bundle import generate_key
from archipel.converter import Signing, Training, convert
from archipel.graph import Model
from archipel.training import losses, optimizers

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.onnx.export's own


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


@pytest.fixture
def file(tmp_path: Path, module: torch.nn.Module) -> Path:
    """Of a module that nobody has trained, with the exporter's defaults."""
    path = tmp_path / "m.onnx"
    batch = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(module.eval(), (torch.zeros(2, 8),), path, dynamic_shapes=batch, verbose=False)
    shared = [node.input[1] == node.input[4] for node in onnx.load(path).graph.node if node.op_type.startswith("Batch")]
    assert any(shared), "the exporter merges nothing any more"
    return path


@pytest.mark.sampled(every=4)
def test_each_layer_has_its_own(file: Path, module: torch.nn.Module) -> None:
    model = Model.from_onnx(file)
    layers = [list(node.inputs)[1:] for node in model.ir.graph if node.op_type == "BatchNormalization"]
    names = [value.name for layer in layers for value in layer if value is not None]
    assert len(names) == len(set(names)) == 4 * len(layers)
    assert names[:4] == ["0.weight", "0.bias", "0.running_mean", "0.running_var"]
    report = model.import_report
    assert report is not None
    assert any("had merged are apart again: 0.running_mean, 0.running_var" in note for note in report.notes)
    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    model.save(file.with_name("again.onnx"))
    session = onnxruntime.InferenceSession(file.with_name("again.onnx"), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        np.testing.assert_allclose(session.run(None, {"input": x})[0], module(torch.from_numpy(x)), atol=1e-5)


@pytest.mark.sampled(every=8)
def test_devices_can_train_it(file: Path, tmp_path: Path) -> None:
    training = Training(losses.cross_entropy(), optimizers.sgd())
    bundle = convert(file, tmp_path / "bundle", training=training, signing=Signing(generate_key()))
    assert {"0.running_mean", "0.running_var"} <= {spec.name for spec in bundle.manifest.parameters}
