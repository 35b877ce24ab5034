"""`--delegate torch` on the command line: the answers of ONNX Runtime, and a line that says what ran them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from archipel import bundle, training
from archipel.converter import Signing, Training, convert
from tests.support.commands import Command


@pytest.fixture
def made(tmp_path: Path) -> list[str]:
    """The arguments that name a bundle of a small classifier and its key; its data are in data.npz beside it."""
    torch.set_num_threads(1)
    key = bundle.generate_key()
    (tmp_path / "key.pub").write_text(key.public_key().public_bytes_raw().hex())
    learning = Training(training.losses.cross_entropy(), training.optimizers.sgd(lr=0.1))
    example = np.zeros((2, 4), np.float32)
    convert(nn.Linear(4, 3), tmp_path / "m.bundle", example=example, training=learning, signing=Signing(key))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", input=rng.standard_normal((16, 4), np.float32), label=rng.integers(0, 3, 16))
    return [str(tmp_path / "m.bundle"), "--key", str(tmp_path / "key.pub")]


@pytest.mark.sampled(every=8)
def test_run_and_fit(archipel: Command, made: list[str], tmp_path: Path) -> None:
    data = str(tmp_path / "data.npz")
    found = {}
    for delegate in ("cpu", "torch:cpu"):
        saved = tmp_path / delegate.replace(":", "-")
        archipel("fit", *made, "--data", data, "--epochs", "2", "--delegate", delegate, "--save", str(saved))
        answers = tmp_path / f"{saved.name}.npz"
        shown = [str(saved), *made[1:], "--input", data, "--delegate", delegate]
        archipel("run", *shown, "--output", str(answers))
        out, err = archipel("run", *shown, "--evaluate")
        assert f"nodes on {delegate.partition(':')[0]}" in err
        with np.load(answers) as stored:
            found[delegate] = (out, stored[stored.files[0]])
    assert found["cpu"][0] == found["torch:cpu"][0]
    np.testing.assert_allclose(found["torch:cpu"][1], found["cpu"][1], rtol=1e-5, atol=1e-6)
    _, err = archipel("run", *made, "--input", data, "--delegate", "torch:tpu", code=1)
    assert "device 'tpu'" in err


@pytest.mark.slow
def test_bench(archipel: Command, made: list[str]) -> None:
    out, _ = archipel("bench", *made, "--delegate", "torch:cpu", "--seconds", "0.1", "--processes", "1", "--json")
    report = json.loads(out)
    assert report["nodes"]["predict"].keys() == {"torch"}
    assert report["profile"] is None
