"""Files from outside: whatever the bytes are, from_onnx makes a model or raises ModelImportError."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel import Model
from archipel.errors import ModelImportError

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.onnx"))
VALID = [path for path in CORPUS if path.name.startswith("valid")]


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_corpus(path: Path) -> None:
    if path in VALID:
        Model.from_onnx(path)
    else:
        with pytest.raises(ModelImportError, match=path.name):
            Model.from_onnx(path)


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_mutations(path: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    original = path.read_bytes()
    target = tmp_path / "mutated.onnx"
    refused = 0
    for _ in range(300):
        data = bytearray(original)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(data)))
            match rng.integers(4):
                case 0:
                    data[at] ^= 1 << int(rng.integers(8))
                case 1:
                    data[at] = int(rng.integers(256))
                case 2:
                    del data[at : at + int(rng.integers(1, 9))]
                case _:
                    data[at:at] = rng.bytes(int(rng.integers(1, 9)))
            if not data:
                data = bytearray(b"\0")
        target.write_bytes(data)
        try:
            Model.from_onnx(target)
        except ModelImportError:
            refused += 1
    assert refused > 100
