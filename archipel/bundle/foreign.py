"""Recognizes files that people take for a model or a bundle, by their first bytes, and knows what to do with each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_HEAD = 512
_TAIL = 1 << 16
"""The bytes that are read of a file's beginning, and of the end of a zip archive, where its directory is."""
RELEASE_FILE = "release.json"
"""In the folder of a release (release.py)."""
_PICKLES = (".pkl", ".pickle", ".joblib")

EXPORT = "load it in PyTorch and write the model with torch.onnx.export(model, example, 'model.onnx')"
TORCH = f"a file of torch.save: {EXPORT}"
SCRIPT = f"a TorchScript file: {EXPORT}"
PROGRAM = "a program of torch.export: give it to `archipel convert`, named .pt2"
KERAS = (
    "a model of Keras: load it there and write model.export('model.onnx', format='onnx'), or use "
    "tf2onnx.convert.from_keras"
)
HDF5 = f"an HDF5 file, mostly {KERAS}"
SAVED_MODEL = (
    "a SavedModel of TensorFlow: python -m tf2onnx.convert --saved-model FOLDER --output model.onnx makes an ONNX file "
    "of it"
)
TFLITE = "a TensorFlow Lite model: python -m tf2onnx.convert --tflite FILE --output model.onnx makes an ONNX file of it"
PICKLE = (
    "a pickle, which can run any code and is never opened here: open it in Python, and give a scikit-learn estimator "
    "to archipel.convert(estimator, ..., example=x), or a PyTorch module to torch.onnx.export"
)
ARRAYS = "NumPy arrays and no model: give them as data, and a model here"
TENSORS = "weights alone (safetensors), without a graph: load them into the model and export that as ONNX"
ORT = "a model in ONNX Runtime's own format: give the .onnx file that it was made from"
EMPTY = "empty (0 bytes): copy or export it again"
RELEASE = (
    "a release of several bundles; name one of its .bundle files, or let `archipel run`, `archipel slots install` or "
    "lite_runtime.choose take the one that fits"
)
FOLDER = "a folder, and no bundle, since it has no manifest.json: name the file in it"

_MAGIC: Sequence[tuple[int, bytes, str]] = (
    # (offset, bytes there, what it is)
    (0, b"\x89HDF\r\n\x1a\n", HDF5),
    (4, b"TFL3", TFLITE),
    (4, b"ORTM", ORT),
    (0, b"\x93NUMPY", ARRAYS),
    (0, b"\x1f\x8b", "packed by gzip: unpack it first"),
    (0, b"GGUF", "a GGUF model of llama.cpp: export the model that it was made from as ONNX"),
    (0, b"version https://git-lfs", "a pointer of Git LFS, not the file itself: run git lfs pull"),
    (0, b"<!DOCTYPE", "a web page, not the file itself: download it again"),
    (0, b"<html", "a web page, not the file itself: download it again"),
)
# What torch.save wrote before it wrote zip archives: a pickle of this number comes first.
_OLD_TORCH = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def recognize(path: str | os.PathLike[str]) -> str | None:
    """What lies at `path` and what to do with it, such as "a pickle ...: ...", where it is of a known other kind.

    None for what may be an ONNX file or a bundle, for anything unknown, and where nothing can be read. Nothing is
    unpickled or unpacked: the first bytes are read, and the last 64 KiB of a zip archive.
    """
    path = Path(path)
    try:
        if path.is_dir():
            if (path / "saved_model.pb").exists():
                return SAVED_MODEL
            if (path / RELEASE_FILE).exists():
                return RELEASE
            return None if (path / "manifest.json").exists() else FOLDER
        if not path.is_file():
            return None
        with path.open("rb") as file:
            head = file.read(_HEAD)
        size = path.stat().st_size
        if head.startswith(b"PK\x03\x04"):
            return _zip(path, size, head)
        return _plain(head, size) or (PICKLE if path.suffix in _PICKLES else None)
    except OSError:
        return None  # whoever opens it says why it cannot be read


def _plain(head: bytes, size: int) -> str | None:
    if not size:
        return EMPTY
    for offset, magic, what in _MAGIC:
        if head[offset:].startswith(magic):
            return what
    # The length of a JSON object, and the object.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return TENSORS
    # Pickles of protocols 2 to 5 begin with that number; the others have no beginning of their own.
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return TORCH if head[2:].startswith(_OLD_TORCH) else PICKLE
    return None


def _zip(path: Path, size: int, head: bytes) -> str | None:
    with path.open("rb") as file:
        file.seek(max(0, size - _TAIL))
        names = {_name(head, 0, 26, 30), *_listed(file.read())}
    if "manifest.json" in names:
        return None
    plain = {name.rpartition("/")[2] for name in names}
    if "serialized_exported_program.json" in plain or any("/models/" in name for name in names):
        return PROGRAM
    if "constants.pkl" in plain:
        return SCRIPT
    if "data.pkl" in plain:
        return TORCH
    if "model.weights.h5" in plain:
        return KERAS
    return ARRAYS if all(name.endswith(".npy") for name in names) else None


def _listed(tail: bytes) -> Iterator[str]:
    """Names in the directory at the end of a zip archive (APPNOTE 4.3.12), as far as it is in `tail`."""
    at = tail.find(b"PK\1\2")
    while at >= 0:
        yield _name(tail, at, 28, 46)
        at = tail.find(b"PK\1\2", at + 46)


def _name(data: bytes, at: int, length: int, start: int) -> str:
    """The name in a record at `at`, whose length and beginning are at these offsets."""
    size = int.from_bytes(data[at + length : at + length + 2], "little")
    return data[at + start : at + start + size].decode(errors="replace")
