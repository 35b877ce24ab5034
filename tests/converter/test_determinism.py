"""The same input gives the same bundle, to the byte: in one process, and in processes that hash strings differently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib, sys, warnings
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

warnings.simplefilter("ignore")
from archipel import Model, training
from archipel.compression import StaticInt8
from archipel.converter import Compression, Signing, Training, convert

kind, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(2, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Conv1d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8 * 16, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.last(self.drop(torch.relu(self.second(x)) + x).flatten(1))


examples = np.random.default_rng(0).standard_normal((16, 2, 16)).astype(np.float32)


def source():
    torch.manual_seed(0)
    network = Network()
    if kind != "onnx":
        return network
    path = folder / "network.onnx"
    if not path.exists():
        Model.from_torch(network, examples[:2]).save(path)
    return path


compression = Compression([StaticInt8()], calibration={"x": examples}) if kind == "int8" else None
for name in ("once", "again"):
    bundle = convert(
        source(), folder / f"{kind}-{name}-{sys.argv[3]}", name="network", example=examples[:2],
        training=Training(training.losses.cross_entropy(), training.optimizers.sgd(lr=0.1), strategy="scaffold",
                          batch_size=4),
        compression=compression, signing=Signing(Ed25519PrivateKey.from_private_bytes(bytes(range(32)))),
    )
    print(bundle.digest, " ".join(f"{f}:{hashlib.sha256((bundle.folder / f).read_bytes()).hexdigest()[:16]}"
          for f in sorted(bundle.manifest.files)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "onnx", "int8"])
def test_a_bundle_is_the_same_every_time(kind: str, tmp_path: Path) -> None:
    lines = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, kind, str(tmp_path), seed],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines += done.stdout.splitlines()
    assert len(lines) == 4
    assert len(set(lines)) == 1, "\n".join(lines)
