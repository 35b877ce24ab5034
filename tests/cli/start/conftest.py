"""A folder with a model and data for `archipel up`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from tests.support.development import place_development_key
from tests.support.small_federation import NET


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has model.onnx and data.npz, whose classes a linear model can learn, and the user's development key."""
    place_development_key(tmp_path / "config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    onnx.save(parser.parse_model(NET % ", ".join(["0"] * 12)), tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((240, 4)).astype(np.float32)
    y = (x @ rng.standard_normal((4, 3))).argmax(axis=1)
    np.savez(tmp_path / "data.npz", x=x, y=y, person=np.arange(240) % 7)
    return tmp_path
