"""Files from outside: whatever the bytes are, from_onnx makes a model that can be written again, or raises
ModelImportError. The corpus has files of every kind of damage that once got further than it should."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from archipel import Model
from archipel.errors import ModelImportError
from archipel.graph.importing import comparison

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.onnx"))
VALID = [path for path in CORPUS if path.name.startswith("valid")]
DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "onnx_models"


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MAX_SECONDS", 2.0)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_corpus(path: Path) -> None:
    if path in VALID:
        Model.from_onnx(path).to_bytes()
    else:
        with pytest.raises(ModelImportError, match=path.name):
            Model.from_onnx(path)


def mutated(original: bytes, rng: np.random.Generator) -> bytes:
    """One to three changes. Most hit the ends, where small models and the structure of larger ones are."""
    data = bytearray(original)
    for _ in range(rng.integers(1, 4)):
        reach = len(data) if rng.random() < 0.4 else min(len(data), 1500)
        at = int(rng.integers(reach))
        at = at if rng.random() < 0.5 else len(data) - 1 - at
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
    return bytes(data)


def refused(original: bytes, count: int, target: Path) -> int:
    rng, found = np.random.default_rng(7), 0
    for _ in range(count):
        target.write_bytes(mutated(original, rng))
        try:
            Model.from_onnx(target).to_bytes()
        except ModelImportError:
            found += 1
    return found


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
@pytest.mark.sampled(every=6)
def test_mutations(path: Path, tmp_path: Path) -> None:
    assert refused(path.read_bytes(), 300, tmp_path / "mutated.onnx") > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("opt_mnist", 2000), ("cifar10_cnn_winml", 500), ("ultraface_rfb_320", 200)]
)
def test_mutations_of_real_models(name: str, count: int, tmp_path: Path) -> None:
    if not DATA.is_dir():
        assert os.environ.get("CI") != "true", f"{DATA} is needed in CI"
        pytest.skip(f"{DATA} is absent")
    assert refused((DATA / f"{name}.onnx").read_bytes(), count, tmp_path / "mutated.onnx") > count // 10
