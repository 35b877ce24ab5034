"""A small network with a normalization, examples for it, and bundles of it by strategy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model
from archipel.bundle import Bundle, generate_key
from archipel.converter import Signing, Training, convert
from archipel.training import losses, optimizers

KEY = generate_key()
LOSS = losses.cross_entropy()
CLIP = {"clip": 1000.0}
Make = Callable[..., Bundle]


@pytest.fixture
def module() -> nn.Module:
    return _network()


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = OrderedDict(body=nn.Linear(4, 5), norm=nn.BatchNorm1d(5), relu=nn.ReLU(), head=nn.Linear(5, 3))
    return nn.Sequential(layers)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_torch(_network(), torch.zeros(2, 4))


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((12, 4), np.float32), rng.integers(0, 3, 12)


@pytest.fixture
def make(model: Model, tmp_path: Path) -> Make:
    def build(strategy: str, source: Model = model, **changes: Any) -> Bundle:
        settings: dict[str, Any] = {
            "loss": LOSS, "optimizer": optimizers.sgd(lr=0.1), "batch_size": 4, "strategy": strategy, **changes,
            "strategy_options": {**CLIP, **changes.get("strategy_options", {})},
        }  # fmt: skip
        return convert(source, tmp_path / "b", training=Training(**settings), signing=Signing(KEY))

    return build
