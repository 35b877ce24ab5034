"""One small network with everything that quantization meets, and how to apply a part of a recipe to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from archipel.compression import CompressedModel, Examples
from archipel.compression.part import Part
from archipel.compression.work import Work
from archipel.graph import Model
from archipel.lite_runtime.engines.onnx_runtime import open_exact
from archipel.training.losses import Loss, cross_entropy
from tests.support.quantized_network import Apply, Network, Run, Stored


@pytest.fixture(scope="package")
def module() -> Network:
    torch.manual_seed(0)
    network = Network()
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            for tensor, (low, high) in ((part.running_var, (0.3, 2)), (part.weight, (0.3, 2)), (part.bias, (-0.5, 1))):
                nn.init.uniform_(tensor, low, high)
    return network.eval()


@pytest.fixture(scope="package")
def network(module: Network) -> Model:
    return Model.from_torch(module, torch.zeros(2, 2, 8, 8))


@pytest.fixture(scope="package")
def examples() -> Examples:
    """Pictures that lie near a plane of their space, as real ones do, and one of five labels."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((96, 10)) @ rng.standard_normal((10, 128)) / 3
    return Examples({"x": x.reshape(-1, 2, 8, 8).astype(np.float32)}, rng.integers(0, 5, 96))


@pytest.fixture(scope="package")
def apply() -> Apply:
    """(model, part, examples) -> the changed model and what the part noted."""

    def applied(
        model: Model, part: Part, given: Examples | None = None, loss: Loss | None = None
    ) -> tuple[CompressedModel, dict[str, Any]]:
        work = Work(model, loss=loss or cross_entropy(), data=given, calibration=given, validation=given)
        return part.apply(CompressedModel.of(model), work), work.facts

    return applied


@pytest.fixture(scope="package")
def run() -> Run:
    """The first output of a model, as it is written with `optimized=False`."""

    def answer(model: Model, x: np.ndarray, optimized: bool = True) -> np.ndarray:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = open_exact(model.to_bytes(), options)
        return session.run(None, {session.get_inputs()[0].name: x})[0]  # type: ignore[no-any-return]

    return answer


@pytest.fixture(scope="package")
def stored() -> Stored:
    """The initializers of a model, by name."""
    return lambda model: {n: v.const_value.numpy() for n, v in model.ir.graph.initializers.items()}
