"""Training in a recipe on PyTorch: the parameters of ONNX Runtime after the same steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model
from archipel.bundle import ModelCard, generate_key
from archipel.compression import (
    CompressedModel,
    Distil,
    FineTune,
    PruneChannels,
    QuantizationAware,
    StaticInt8,
    compress,
)
from archipel.compression.part import Part
from archipel.converter import Compression, Signing, Training, convert, open_model
from archipel.errors import CompressionError, TrainingError
from archipel.graph.model_card import card_of, set_card
from archipel.training import losses, optimizers

TUNE = FineTune(steps=4, batch_size=16, augment="shift")
RNG = np.random.default_rng(0)
DATA = RNG.standard_normal((48, 1, 8, 8), np.float32), RNG.integers(0, 4, 48)


@pytest.fixture(scope="module")
def network() -> Model:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # Without a bias before the normalization: its gradient is 0, of which Adam would make steps by rounding alone.
    layers = [
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 4),
    ]
    return Model.from_torch(nn.Sequential(*layers).eval(), torch.zeros(2, 1, 8, 8))


def parameters(model: CompressedModel) -> dict[str, np.ndarray]:
    return (model.training_form or model).parameters


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param([PruneChannels(flops=0.4, fine_tune=TUNE)], marks=pytest.mark.slow),
        [Distil(fine_tune=TUNE)],
        [StaticInt8(), QuantizationAware(TUNE)],
    ],
    ids=["after pruning", "distillation", "with rounding"],
)
@pytest.mark.sampled(every=4)
def test_it_trains_as_onnx_runtime_does(network: Model, recipe: list[Part]) -> None:
    expected, found = (
        compress(network, recipe, data=DATA, validation=DATA, engine=engine) for engine in ("onnxruntime", "torch:cpu")
    )
    assert parameters(found[0]).keys() == parameters(expected[0]).keys()
    for name, array in parameters(expected[0]).items():
        np.testing.assert_allclose(parameters(found[0])[name], array, atol=1e-4, err_msg=name)
    before, after = expected[1].steps[-1].after.loss, found[1].steps[-1].after.loss
    assert before is not None
    assert after == pytest.approx(before, abs=1e-4)


@pytest.mark.sampled(every=4)
def test_a_run_goes_on_with_its_own_engine_only(network: Model, tmp_path: Path) -> None:
    calls = 0

    def stop(progress: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    whole, _ = compress(network, [TUNE], data=DATA, engine="torch:cpu")
    with pytest.raises(KeyboardInterrupt):
        compress(network, [TUNE], data=DATA, engine="torch:cpu", folder=tmp_path / "run", on_progress=stop)
    with pytest.raises(CompressionError, match="another model, recipe, seed, data or engine"):
        compress(network, [TUNE], data=DATA, folder=tmp_path / "run")
    resumed, _ = compress(network, [TUNE], data=DATA, engine="torch:cpu", folder=tmp_path / "run")
    for name, array in whole.parameters.items():
        assert array.tobytes() == resumed.parameters[name].tobytes(), name


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("engine", "said"), [("tensorflow", "choose from onnxruntime, torch"), ("torch:tpu", "tpu")])
def test_other_engines(network: Model, engine: str, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        compress(network, [TUNE], data=DATA, engine=engine)


@pytest.mark.sampled(every=4)
def test_convert_trains_on_it_too(network: Model, tmp_path: Path) -> None:
    key = generate_key()
    expected, _ = compress(network, [TUNE, StaticInt8()], DATA, engine="torch:cpu")
    recipe = Compression([TUNE, StaticInt8()], data=DATA, engine="torch:cpu")
    training = Training(losses.cross_entropy(), optimizers.sgd(lr=0.1))
    convert(network, tmp_path / "m.bundle", training=training, compression=recipe, signing=Signing(key))
    found = open_model(tmp_path / "m.bundle", [key.public_key().public_bytes_raw()]).parameters
    for name, array in parameters(expected).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.sampled(every=3)
def test_the_card_of_a_smaller_file_counts_its_parameters(network: Model, tmp_path: Path) -> None:
    made = Model(network.ir.clone())
    set_card(
        made.ir,
        ModelCard(
            name="stripes", description="Two stripes.", task="image classification", licence="MIT", parameters=10**6
        ),
    )
    small, _ = compress(made, [PruneChannels(flops=0.5, fine_tune=FineTune(steps=1, batch_size=16))], DATA)
    small.save(tmp_path / "small.onnx")
    card = card_of(Model.from_onnx(tmp_path / "small.onnx").ir)
    assert card is not None
    channels = small.parameters["0.weight"].shape[0]
    assert channels < 8
    # Convolution without a bias, two of the normalization, and the last layer with one.
    assert card.parameters == 9 * channels + 2 * channels + (9 * channels + 1) * 4
