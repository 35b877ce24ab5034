"""'An index is out of range, somewhere in the data of a thousand clients.'"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from tests.support.commands import Command

NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
network (float[n, 4] x) => (float[n, 3] logits)
<float[4, 3] w = {1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1}> { logits = MatMul(x, w) }
"""
FILE = """
rounds = 1
cohort = 3
model = {{ onnx = "network.onnx" }}
training = {{ optimizer = {{ name = "sgd", lr = 0.2 }}, batch_size = 8 }}
data = {{ python = "mine.py:devices" }}
run = {{ client_axis = "{axis}" }}
"""
MINE = """
import numpy as np

def devices():
    found = np.load({path!r})
    return [dict(x=found["x"][at * 8:at * 8 + 8], y=found["y"][at * 8:at * 8 + 8]) for at in range(3)]
"""


@pytest.mark.parametrize("axis", ["off", "on"])
@pytest.mark.sampled(every=6)
def test_client_and_example_are_named(archipel: Command, tmp_path: Path, axis: str) -> None:
    onnx.save(parser.parse_model(NETWORK), tmp_path / "network.onnx")
    x, y = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32), np.arange(24) % 3
    y[8 + 5] = 99  # the sixth example of the second device
    np.savez(tmp_path / "data.npz", x=x, y=y)
    (tmp_path / "mine.py").write_text(MINE.format(path=str(tmp_path / "data.npz")))
    (tmp_path / "federation.toml").write_text(FILE.format(axis=axis))
    said = archipel("simulate", str(tmp_path / "federation.toml"), code=1)[1]
    assert re.search(
        "client 1, round 1: field '.*' has a class number that the model does not have, in row 5: 99;", said
    )
