"""Signed activations in front of what only moves numbers: ONNX Runtime opens the graph, and does what was simulated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from archipel.compression import StaticInt8, compress
from archipel.compression.deploy import deploy
from archipel.graph import Model
from archipel.lite_runtime.engines.onnx_runtime import open_exact


class Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1)


BEHIND = {
    "reshape": (nn.Flatten(),),
    "transpose": (Turned(),),
    "max pool": (nn.MaxPool2d(2),),
    "both": (nn.MaxPool2d(2), nn.Flatten()),
    "then float": (nn.Flatten(), nn.Tanh()),
    "then a layer": (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 2 * 2, 5)),
}


def answers(model: bytes | str, x: np.ndarray, optimized: bool) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = open_exact(model, options)
    [answer] = session.run(None, {session.get_inputs()[0].name: x})
    return np.asarray(answer)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("rounding", ["nearest", pytest.param("adaround", marks=pytest.mark.slow)])
@pytest.mark.parametrize("behind", BEHIND)
def test_what_only_moves_numbers_behind_a_layer(behind: str, rounding: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), *BEHIND[behind])
    x = np.random.default_rng(0).standard_normal((16, 8, 8, 8)).astype(np.float32)
    model = Model.from_torch(network.eval(), torch.from_numpy(x))
    small, _ = compress(
        model, [StaticInt8(activations="int8", rounding=rounding)], calibration={model.inputs[0].name: x}
    )
    assert small.inputs == model.inputs
    assert small.outputs == model.outputs
    small.save(tmp_path / "small.onnx")
    simulated = answers(small.to_bytes(), x, optimized=False)
    step = 2 / 127 * np.abs(simulated).max()
    for ran in (answers(str(tmp_path / "small.onnx"), x, True), answers(deploy(small).predict.to_bytes(), x, True)):
        assert np.abs(ran - simulated).max() <= step
    expected = network(torch.from_numpy(x)).detach().numpy()
    assert np.abs(simulated - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("activations", ["uint8", "int8"])
@pytest.mark.sampled(every=4)
def test_the_last_layers_answers_are_not_rounded(activations: str) -> None:
    """No layer reads them, so there is nothing to be gained by it: the sums of integers come out as they are."""
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((16, 8, 8, 8)).astype(np.float32)
    model = Model.from_torch(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.from_numpy(x))
    part = StaticInt8(activations=activations)  # type: ignore[arg-type]
    small, _ = compress(model, [part], calibration={model.inputs[0].name: x})
    assert len(np.unique(answers(small.to_bytes(), x, optimized=False))) > 1000
