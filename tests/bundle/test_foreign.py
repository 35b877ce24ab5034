"""Files that are no model and no bundle are recognized by their content, and nothing in them is run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import parser
from safetensors.numpy import save

from archipel.bundle import foreign
from archipel.bundle.foreign import recognize


class _Runs:
    """Makes a folder if somebody unpickles it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._folder),)


def _saved(write: object, *arguments: object, **options: object) -> bytes:
    buffer = io.BytesIO()
    write(*arguments, buffer, **options)  # type: ignore[operator]
    return buffer.getvalue()


def _program() -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(4, 3), (torch.zeros(2, 4),)), buffer)
    return buffer.getvalue()


LINEAR = torch.nn.Linear(4, 3)
FILES = {
    "state.pt": (lambda: _saved(torch.save, LINEAR.state_dict()), foreign.TORCH),
    "module.bin": (lambda: _saved(torch.save, LINEAR), foreign.TORCH),
    "old.pt": (lambda: _saved(torch.save, {"a": 1}, _use_new_zipfile_serialization=False), foreign.TORCH),
    "script.pt": (lambda: _saved(torch.jit.save, torch.jit.script(LINEAR)), foreign.SCRIPT),
    "program.onnx": (_program, foreign.PROGRAM),
    "model.onnx": (lambda: pickle.dumps({"a": 1}), foreign.PICKLE),
    "model.pkl": (lambda: pickle.dumps({"a": 1}, protocol=0), foreign.PICKLE),
    "model.joblib": (lambda: b"x\x9cno magic of its own", foreign.PICKLE),
    "model.tflite": (lambda: struct.pack("<L4s", 28, b"TFL3") + bytes(40), foreign.TFLITE),
    "model.h5": (lambda: b"\x89HDF\r\n\x1a\n" + bytes(40), foreign.HDF5),
    "x.npy": (lambda: _saved(lambda array, file: np.save(file, array), np.ones(3)), foreign.ARRAYS),
    "x.npz": (lambda: _saved(lambda array, file: np.savez(file, x=array), np.ones(3)), foreign.ARRAYS),
    "w.safetensors": (lambda: save({"w": np.ones(3, np.float32)}), foreign.TENSORS),
    "empty.onnx": (lambda: b"", foreign.EMPTY),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
# PyTorch warns that TorchScript is deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.sampled(every=6)
def test_a_file_of_another_kind(tmp_path: Path, name: str) -> None:
    make, expected = FILES[name]
    (tmp_path / name).write_bytes(make())
    assert recognize(tmp_path / name) == expected


def test_folders(tmp_path: Path) -> None:
    assert recognize(tmp_path) == foreign.FOLDER
    (tmp_path / "saved_model.pb").touch()
    assert recognize(tmp_path) == foreign.SAVED_MODEL
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").touch()
    assert recognize(tmp_path / "bundle") is None


def test_what_may_be_a_model_or_a_bundle_is_left_to_its_reader(tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Relu (x) }'
    )
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "text").write_bytes(b"not a model")
    with zipfile.ZipFile(tmp_path / "b.bundle", "w") as archive:
        archive.writestr("manifest.json", "{}")
        archive.writestr("data.pkl", "")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.npy", "")
        archive.writestr("a.txt", "")
    (tmp_path / "damaged.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    for name in ("m.onnx", "text", "b.bundle", "other.zip", "damaged.zip", "nowhere"):
        assert recognize(tmp_path / name) is None, name


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    torch.save({"w": _Runs(tmp_path / "ran")}, tmp_path / "evil.pt")
    assert recognize(tmp_path / "evil.pkl") == foreign.PICKLE
    assert recognize(tmp_path / "evil.pt") == foreign.TORCH
    assert not (tmp_path / "ran").exists()


def test_of_a_huge_archive_only_both_ends_are_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", "")
        for number in range(2000):
            archive.writestr(f"x/data/{number}", "")
    assert recognize(tmp_path / "x.pt") == foreign.TORCH
