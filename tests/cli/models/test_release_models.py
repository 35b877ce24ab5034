"""scripts/release_models.py, with a tiny network that `archipel train` trained."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from archipel import bundle as b
from archipel.lite_runtime import choose
from tests.support.commands import Command

ROOT = Path(__file__).parents[3]
RECIPE = """[model]
zoo = "mlp"
arguments = { features = 8, hidden = 16, classes = 2 }
[data]
train = "train.npz"
validation = "train.npz"
[train]
loss = "cross_entropy"
optimizer = { name = "adam", lr = 0.01 }
epochs = 2
batch_size = 32
[output]
folder = "trained/tiny"
"""


@pytest.mark.sampled(every=4)
def test_a_signed_release_with_sums(
    archipel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).standard_normal((128, 8), np.float32)
    np.savez("train.npz", input=x, label=(x[:, 0] > 0).astype(np.int64))
    Path("tiny.toml").write_text(RECIPE)
    archipel("train", "tiny.toml")
    key = b.generate_key()
    b.save_private_key(key, Path("publisher"))
    # In this process, which has imported PyTorch already.
    monkeypatch.setattr(sys, "argv", ["release_models.py", "trained/tiny", "--key", "publisher", "--version", "3"])
    runpy.run_path(str(ROOT / "scripts/release_models.py"), run_name="__main__")
    assert "tiny-3/float.bundle: " in capfd.readouterr().out
    trusted = [key.public_key().public_bytes_raw()]
    signed = b.open_release("dist/models/tiny-3", trusted)
    assert {each.name for each in signed.release.variants} == {"float", "int8"}
    assert all(each.accuracy is not None for each in signed.release.variants)
    card = choose("dist/models/tiny-3", trusted, cache=tmp_path / "cache").bundle.card
    assert card is not None
    assert card.recipe == RECIPE.strip()
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd="dist/models", capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count(": OK") == 4
