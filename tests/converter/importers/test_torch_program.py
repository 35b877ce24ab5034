"""Programs of torch.export, as objects and .pt2 files: same names and numbers as the module they came from."""

from __future__ import annotations

import warnings
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from archipel import Model
from archipel.converter.importers import torch_program
from archipel.errors import ModelImportError
from archipel.graph import check_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(18, 3)
        self.body[1].running_mean.uniform_()
        self.body[1].running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


def run(model: Model, x: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    return session.run(None, {model.inputs[0].name: x.numpy()})[0]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("mode", [pytest.param("eval", marks=pytest.mark.slow), "train"])
def test_a_file_keeps_batch_norm_and_dropout(mode: str, tmp_path: Path) -> None:
    """Exported for one batch size, in either mode: what comes in is for evaluation, of any batch, and trainable."""
    net, x = Net(), torch.randn(2, 1, 5, 5)
    program = torch.export.export(net.train(mode == "train"), (x,))
    torch.export.save(program, tmp_path / "net.pt2")
    model = Model.from_torch(tmp_path / "net.pt2")
    check_model(model.ir)
    kinds = Counter(node.op_type for node in model.ir.graph)
    assert kinds == {"Conv": 1, "BatchNormalization": 1, "Relu": 1, "Dropout": 1, "Reshape": 1, "Gemm": 1}
    state = net.state_dict()
    assert set(model.parameters) == {name for name in state if "num_batches" not in name}
    for name, value in model.parameters.items():
        np.testing.assert_array_equal(value, state[name].numpy())
    assert model.inputs[0].shape == ("batch", 1, 5, 5)
    other = torch.randn(5, 1, 5, 5)
    expected = net.eval()(other).detach().numpy()
    np.testing.assert_allclose(run(model, other), expected, rtol=1e-4, atol=1e-5)
    report = model.import_report
    assert report is not None
    assert report.deviation is not None
    assert report.deviation < 1e-5


class View(nn.Module):
    """With the batch size of the example written into it."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixed = mixed
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(0, keepdim=True) if self.mixed else x
        return self.head(x.reshape(2, 6))


@pytest.mark.sampled(every=3)
def test_a_batch_size_in_the_program() -> None:
    net = View()
    model = Model.from_torch(torch.export.export(net, (torch.randn(2, 2, 3),)))
    assert model.inputs[0].shape == ("batch", 2, 3)
    report = model.import_report
    assert report is not None
    assert report.notes == ("the batch, 2 in the program, is symbolic; checked with 3 times as many",)
    x = torch.randn(7, 2, 3)
    np.testing.assert_allclose(run(model, x), net.head(x.flatten(1)).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_batch_that_must_stay() -> None:
    model = Model.from_torch(torch.export.export(View(mixed=True), (torch.randn(2, 2, 3),)))
    assert model.inputs[0].shape == (2, 2, 3)
    report = model.import_report
    assert report is not None
    assert "the batch stays as in the program: examples of a batch influence each other" in report.notes[0]


@pytest.mark.sampled(every=3)
def test_decomposed_training_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of its own calls
        program = torch.export.export(Net().train(), (torch.randn(2, 1, 5, 5),)).run_decompositions()
    with pytest.raises(ModelImportError, match=r"decomposed in training mode; .*module\.eval\(\)"):
        Model.from_torch(program)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelImportError, match=r"no\.pt2 does not exist"):
        Model.from_torch(tmp_path / "no.pt2")
    (tmp_path / "text.pt2").write_text("text")
    with pytest.raises(ModelImportError, match=r"text\.pt2: not a program of torch\.export\.save"):
        Model.from_torch(tmp_path / "text.pt2")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "state.pt2")
    with pytest.raises(ModelImportError, match=r"state\.pt2: not a program of torch\.export\.save"):
        Model.from_torch(tmp_path / "state.pt2")
    with pytest.raises(ModelImportError, match="Linear: a torch module needs example="):
        Model.from_torch(nn.Linear(2, 2))


def test_truncated_and_inflated_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.zeros(2, 2),)), path)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for keep in (10, len(data) // 2, len(data) - 30):
        (tmp_path / "cut.pt2").write_bytes(data[:keep])
        with pytest.raises(ModelImportError, match=r"cut\.pt2: not a program"):
            torch_program.open_program(tmp_path / "cut.pt2")
    refused = 0
    for _ in range(40):
        changed = bytearray(data)
        for at in rng.integers(0, len(data), 20):
            changed[at] = rng.integers(256)
        (tmp_path / "cut.pt2").write_bytes(changed)
        try:
            torch_program.open_program(tmp_path / "cut.pt2")
        except ModelImportError:
            refused += 1
    assert refused > 20
    monkeypatch.setattr(torch_program, "_MAX_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "bomb.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data", b"\0" * (1 << 20) + b"\0")
    with pytest.raises(ModelImportError, match=r"bomb\.pt2: unpacks to 1048577 bytes; at most 1048576"):
        torch_program.open_program(tmp_path / "bomb.pt2")
