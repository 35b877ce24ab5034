"""Models to look into: a bundle that is committed for the browser library, and graphs written by hand."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Bundle, open_bundle

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def cnn_file() -> Path:
    return ROOT / "web/tests/fixtures/cnn.bundle"


@pytest.fixture(scope="session")
def cnn_key() -> bytes:
    """The public half of the key that everybody knows (web/tests/make_fixtures.py)."""
    return Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()


@pytest.fixture(scope="session")
def cnn(cnn_file: Path, cnn_key: bytes, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return open_bundle(cnn_file, [cnn_key], tmp_path_factory.mktemp("cnn"))


@pytest.fixture
def written(tmp_path: Path) -> object:
    """(ONNX's text format) -> a file."""

    def write(text: str, name: str = "model.onnx") -> Path:
        onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}'), tmp_path / name)
        return tmp_path / name

    return write
