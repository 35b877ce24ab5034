"""Packed updates in ONNX Runtime on the desktop and in ONNX Runtime Web: the same places, signs and steps."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from archipel.bundle import Bundle
from archipel.bundle.roles import Largest, Update
from archipel.protocol.bounds import step
from tests.support.fixtures.strategies import make  # noqa: F401
from tests.web.test_step_in_node import RUNNER, node, tensor  # noqa: F401


@pytest.mark.parametrize("compress", ["random_k", pytest.param("top_k", marks=pytest.mark.slow)])
@pytest.mark.sampled(every=8)
def test_both_runtimes_pack_alike(
    make: Callable[..., Bundle],  # noqa: F811
    node: str,  # noqa: F811
    tmp_path: Path,
    compress: str,
) -> None:
    bundle = make("fedavg", strategy_options={"clip": 1.0, "bits": 8, "compress": compress, "share": 0.5})
    finish, rng = bundle.program("finish"), np.random.default_rng(2)
    feeds: dict[str, np.ndarray] = {}
    for port in finish.inputs:
        shape = tuple(int(dim) for dim in port.shape)
        feeds[port.name] = np.asarray(rng.normal(0, 0.1, shape) if shape else 11).astype(port.dtype)
    (packed,) = [port for port in finish.outputs if isinstance(port, Update) and port.carries]
    # Whole: a bundle keeps large constants in its weights.
    graph = tmp_path / "finish.onnx"
    onnx.save(onnx.load(bundle.folder / finish.file), graph)
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    (expected,) = session.run([packed.name], feeds)
    job = {
        "graph": str(graph), "initial": {}, "feeds": [{name: tensor(array) for name, array in feeds.items()}],
        "carried": {}, "metric": packed.name,
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run([node, RUNNER, tmp_path / "job.json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    found = np.array(json.loads(done.stdout)["losses"])
    if isinstance(packed.carries, Largest):
        assert np.array_equal(found != 0, expected != 0)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        return
    steps, others = (np.rint(array / step(packed)) for array in (found, expected))
    # The products of matrices add up in another order, which can turn a draw at the very edge.
    assert np.mean(steps == others) > 0.9
    assert np.abs(steps - others).max() <= 1
    assert np.unique(others).size > 5
