"""Every network of archipel.models trains, as a module and as a graph, to the same losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from archipel import Model, models
from archipel.training import optimizers
from archipel.training.cloud import TrainConfig, train

RNG = np.random.default_rng(0)
COUNT = 16


def picture(channels: int, height: int, width: int) -> np.ndarray:
    return RNG.random((COUNT, channels, height, width), dtype=np.float32)


def classes(count: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, count, (COUNT, *shape))


PLACES = {"name": "cross_entropy", "axis": -1}
TOKENS = classes(80, 16)
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "autoencoder": ({}, {"pixels": picture(1, 28, 28)}, {"loss": "mse", "label": "pixels"}),
    "char_rnn": ({"hidden": 16, "layers": 1}, (TOKENS, np.roll(TOKENS, -1, 1)), {"loss": PLACES}),
    "cnn_1d": ({}, (picture(6, 128, 1)[..., 0], classes(6)), {}),
    "digits_cnn": ({}, (picture(1, 28, 28), classes(10)), {}),
    "ds_cnn": ({"filters": 8, "blocks": 1}, (picture(1, 49, 10), classes(12)), {}),
    "fedavg_cnn": ({}, (picture(1, 28, 28), classes(10)), {}),
    "lenet": ({}, (picture(1, 28, 28), classes(10)), {}),
    "mlp": ({}, (picture(1, 1, 784)[:, 0, 0], classes(10)), {}),
    "mobilenet_v2": ({"width": 0.25}, (picture(3, 32, 32), classes(10)), {"optimizer": optimizers.sgd(lr=0.02)}),
    "resnet8": ({}, (picture(3, 32, 32), classes(10)), {}),
    "transformer": ({"layers": 1, "width": 16, "heads": 2}, {"tokens": TOKENS}, {"next_token": True}),
    "unet": ({"width": 4}, (picture(1, 16, 16), classes(2, 16, 16)), {}),
}
SHORT = ("transformer",)


def test_all_of_them_are_here() -> None:
    new = {"bc_resnet", "bert", "deep_conv_lstm", "gpt", "resnet18", "resnet50"}  # have tests of their own training
    assert set(CASES) >= {name for name in models.__all__ if name.islower() and callable(getattr(models, name))} - new


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else pytest.mark.slow) for n in CASES])
def test_a_network_trains_as_module_and_as_graph(name: str) -> None:
    arguments, data, settings = CASES[name]
    settings = {"optimizer": optimizers.sgd(momentum=0.9, lr=0.02), **settings}
    config = TrainConfig(batch_size=8, epochs=4, threads=1, device="cpu", **settings)
    module = getattr(models, name)(0, **arguments)
    first = next(iter(data.values())) if isinstance(data, dict) else data[0]
    graph = Model.from_torch(module, first[:2, :-1] if settings.get("next_token") else first[:2])
    losses = [[epoch.train_loss for epoch in train(each, data, config).history] for each in (graph, module)]
    assert losses[0][-1] < losses[0][0]
    if not any(isinstance(part, torch.nn.Dropout) and part.p for part in module.modules()):
        # Its last normalizations divide by the deviation of eight numbers, which amplifies rounding.
        np.testing.assert_allclose(losses[0], losses[1], rtol=0.05 if name == "mobilenet_v2" else 2e-3)
