"""examples/vision: every command of its README on fewer pictures, from training in the cloud to a federation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import Command
from tests.support.development import place_development_key

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "vision"
PICTURES = ROOT.parent / "shared" / "data" / "fashion_mnist"


@pytest.mark.slow
def test_the_whole_line(tmp_path: Path, archipel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    if not PICTURES.is_dir():
        pytest.skip(f"{PICTURES} is not there")
    place_development_key(tmp_path / "config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    made = [sys.executable, str(FOLDER / "data.py"), str(PICTURES), "--collected", "4000", "--devices", "900"]
    subprocess.run(made, check=True)
    with np.load("vision/devices.npz") as devices, np.load("vision/train.npz") as train:
        assert devices["x"].shape == (900, 1, 28, 28)
        # No picture is both on a device and in the cloud.
        assert {x.tobytes() for x in devices["x"]}.isdisjoint({x.tobytes() for x in train["x"]})
    archipel("train", str(FOLDER / "train.toml"), "--set", "epochs=3")
    common = ["--recipe", str(FOLDER / "recipe.toml"), "--data", "vision/train.npz"]
    common += ["--validation", "vision/validation.npz"]
    archipel("compress", "vision/trained/model.onnx", "-o", "vision/small.onnx", *common)
    assert Path("vision/small.onnx").stat().st_size < Path("vision/trained/model.onnx").stat().st_size / 8
    archipel(
        "convert", "vision/trained/model.onnx", "-o", "vision/clothes.bundle", *common,
        "--loss", "cross_entropy", "--lr", "0.003", "--momentum", "0.9", "--policy-option", "min_cohort=3",
    )  # fmt: skip
    shown, _ = archipel("inspect", "vision/clothes.bundle")
    assert "of Fashion-MNIST, test, before compression" in " ".join(shown.split())
    up = [sys.executable, "-m", "archipel", "up", "vision/clothes.bundle", "vision/devices.npz"]
    up += ["--devices", "4", "--rounds", "2", "--folder", "vision/federation"]
    done = subprocess.run(up, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 2 of 2: 4 devices" in done.stdout
    assert Path("vision/federation/weights.safetensors").exists()
