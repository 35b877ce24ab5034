"""Every command that takes a model refuses what is none in one line that names the file and says what to do."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import numpy_helper, parser

from tests.support.commands import Command, Linear

COMMANDS = {
    "convert": ["{model}", "-o", "{here}/out.bundle", "--key", "{key}"],
    "inspect": ["{model}"],
    "compress": ["{model}", "-o", "{here}/out.onnx", "--calibration", "{data}"],
    "compare": ["{model}", "{mlp}", "--data", "{data}"],
    "run": ["{model}", "--key", "{key}.pub", "--input", "{data}"],
    "fit": ["{model}", "--key", "{key}.pub", "--data", "{data}", "--save", "{here}/saved"],
    "bench": ["{model}", "--key", "{key}.pub"],
    "verify": ["{model}", "--key", "{key}.pub"],
    "export": ["{model}", "--key", "{key}.pub", "-o", "{here}/out.pt"],
    "slots install": ["{here}/slots", "{model}", "--key", "{key}.pub"],
}
"""Command: its arguments. `{mlp}` is a good ONNX file."""


def _folder(path: Path) -> None:
    path.mkdir()


def _saved_model(path: Path) -> None:
    path.mkdir()
    (path / "saved_model.pb").write_bytes(b"\x08\x01")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    # name: (writes it, what every command says)
    "model.pt": (lambda path: torch.save(torch.nn.Linear(4, 3).state_dict(), path), "torch.onnx.export("),
    "model.pkl": (lambda path: path.write_bytes(pickle.dumps({})), "a scikit-learn estimator to archipel.convert("),
    "model.tflite": (lambda path: path.write_bytes(struct.pack("<L4s99x", 28, b"TFL3")), "tf2onnx.convert --tflite"),
    "model.h5": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)), "tf2onnx.convert.from_keras"),
    "empty.onnx": (lambda path: path.touch(), "empty (0 bytes): copy or export it again"),
    "empty.bundle": (lambda path: path.touch(), "empty (0 bytes): copy or export it again"),
    "folder": (_folder, "a folder, and no bundle, since it has no manifest.json: name the file in it"),
    "saved_model": (_saved_model, "tf2onnx.convert --saved-model"),
    "x.npz": (lambda path: np.savez(path, x=np.ones(3)), "NumPy arrays and no model"),
    "text.onnx": (lambda path: path.write_text("hello"), ""),
    "cut.onnx": (lambda path: path.write_bytes(_mlp()[:-9]), ""),
    "nowhere.onnx": (lambda path: None, ""),
}


def _mlp() -> bytes:
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 3] y) <float[4, 3] w>'
        "{ y = MatMul (x, w) }"
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    data: bytes = proto.SerializeToString()
    return data


@pytest.mark.parametrize("name", FILES)
def test_one_line_with_a_remedy(archipel: Command, tmp_path: Path, name: str) -> None:
    make, text = FILES[name]
    make(tmp_path / name)
    (tmp_path / "mlp.onnx").write_bytes(_mlp())
    np.savez(tmp_path / "data.npz", x=np.ones((8, 4), np.float32))
    archipel("keys", str(tmp_path / "key"))
    places = {"model": tmp_path / name, "here": tmp_path, "key": tmp_path / "key", "mlp": tmp_path / "mlp.onnx",
              "data": tmp_path / "data.npz"}  # fmt: skip
    (tmp_path / "slots").mkdir()
    before = sorted(tmp_path.iterdir())
    for command, arguments in COMMANDS.items():
        _, err = archipel(*command.split(), *(each.format(**places) for each in arguments), code=1)
        assert err.startswith("archipel: "), (command, err)
        assert err.count("\n") == 1, (command, err)
        assert name in err, (command, err)
        assert text in err, (command, err)
    assert sorted(tmp_path.iterdir()) == before  # nothing half-made is left


def test_memory_that_is_not_there_is_one_line(
    archipel: Command, linear: Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 29.8 GiB")

    monkeypatch.setattr("archipel.cli.models.inspect.bundle_facts", fail)
    _, err = archipel("inspect", *linear.arguments, code=1)
    assert err == (
        "archipel: not enough memory (Unable to allocate 29.8 GiB); give less data at once, or a smaller batch\n"
    )
