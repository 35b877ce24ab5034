"""A linear model for `archipel up`, and the command itself as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NET = """<ir_version: 10, opset_import: ["": 21]>
net (float[n, 4] features) => (float[n, 3] logits) <float[4, 3] w = {%s}> {
    logits = MatMul(features, w)
}"""


def up(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "archipel", "up", "model.onnx", "data.npz", "--lr", "0.5", *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, env=dict(os.environ),
    )  # fmt: skip
