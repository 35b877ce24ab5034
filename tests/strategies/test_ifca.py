"""IFCA against Ghosh et al. 2020, algorithm 1, written in PyTorch, and on devices whose labels mean something else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import archipel
from archipel import strategies
from archipel.bundle import Bundle, generate_key
from archipel.converter.opened import open_model, source_model
from archipel.errors import BoundError, ConversionError
from archipel.lite_runtime import Runtime
from archipel.protocol.vector import DecodedSum
from archipel.training import optimizers
from tests.support.simulation import (
    CLASSES,
    LR,
    ROUNDS,
    SIZES,
    Client,
    Tensors,
    assert_answers,
    assert_same,
    batches,
    clients,
    dense,
    gradients,
    imported,
    simulate,
    stepped,
)

Make = Callable[..., Bundle]
OPTIONS = {"models": 3, "spread": 0.9, "seed": 5}


def turned() -> list[Client]:
    """Clients of two kinds, whose classes have other numbers."""
    return [(x, y if number % 2 else (y + 1) % CLASSES) for number, (x, y) in enumerate(clients())]


def loss_of(module: nn.Module, at: Tensors, x: np.ndarray, y: np.ndarray) -> float:
    logits = torch.func.functional_call(module.double(), at, (torch.tensor(x).double(),))
    return float(nn.functional.cross_entropy(logits, torch.tensor(y)))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_three_rounds(make: Make, decay: float) -> None:
    """Model averaging, all devices in each round: each cluster's model is the weighted mean of its devices' models."""
    optimizer = optimizers.sgd(lr=LR, weight_decay=decay)
    bundle = make("ifca", optimizer=optimizer, strategy_options=OPTIONS)
    task = simulate(bundle, turned())
    module = dense()
    first = {name: torch.tensor(value).double() for name, value in bundle.parameters().items()}
    models = [{name.removesuffix(".models"): value[j] for name, value in first.items()} for j in range(3)]
    chosen: list[int] = []
    for number in ROUNDS:
        chosen, ends = [], []
        for i, (x, y) in enumerate(turned()):
            chosen.append(int(np.argmin([loss_of(module, model, x, y) for model in models])))
            w = models[chosen[i]]
            for rows in batches(len(x), number, i, phase=1):
                g = gradients(module, w, x[rows], y[rows])
                w = stepped(w, {name: g[name] + decay * w[name] for name in w})
            ends.append(w)
        for j in set(chosen):
            mine = [i for i in range(len(SIZES)) if chosen[i] == j]
            weight = sum(SIZES[i] for i in mine)
            models[j] = {name: sum(SIZES[i] * ends[i][name] for i in mine) / weight for name in models[j]}
    assert len(set(chosen)) == 2
    assert_same(task.parameters, {f"{n}.models": torch.stack([model[n] for model in models]) for n in models[0]})
    for device, choice, (x, _) in zip(task.devices, chosen, turned(), strict=True):
        assert int(device.state.state["models/choice"]) == choice
        device.set_parameters(task.parameters)
        assert_answers(device, x, module, models[choice])
        # And as a model again, which has the names and shapes of the one that was converted.
        assert_same(source_model(device).parameters, models[choice])


@pytest.mark.sampled(every=3)
def test_the_first_models_lie_around_the_given_one(make: Make) -> None:
    given = imported(dense).parameters
    for name, found in make("ifca", strategy_options=OPTIONS).parameters().items():
        value = given[name.removesuffix(".models")]
        np.testing.assert_array_equal(found[0], value)
        assert found.shape == (3, *value.shape)
        size = np.sqrt(np.square(value).mean())
        # sqrt(1 - 0.9^2) of the given one remains, and what is added has 0.9 of its size.
        added = (found[1:] - np.sqrt(1 - 0.81) * value) / size
        assert 0.4 < added.std() < 1.5
        assert np.abs(found[1] - found[2]).max() > 0.1 * size


@pytest.mark.sampled(every=3)
def test_each_of_the_models_can_be_opened(make: Make) -> None:
    key = generate_key()
    bundle = make("ifca", strategy_options=OPTIONS, key=key)
    trusted = [key.public_key().public_bytes_raw()]
    for number in range(3):
        found = open_model(bundle.folder, trusted, number=number).parameters
        for name, array in found.items():
            np.testing.assert_array_equal(array, bundle.parameters()[f"{name}.models"][number])
    with pytest.raises(ConversionError, match=r"number: 3, but bundle .* has models 0 to 2"):
        open_model(bundle.folder, trusted, number=3)


def test_a_model_that_nobody_chose_stays_and_foreign_weights_are_refused() -> None:
    strategy = strategies.get("ifca")
    parameters = {"w.models": np.ones((3, 2), np.float32)}
    deltas = {"w.models": np.array([[3.0, 3.0], [0.0, 0.0], [0.5, 1.0]])}

    def step(weights: list[float]) -> np.ndarray:
        total = DecodedSum(deltas, {"ifca/weights": np.array(weights)}, 2.0)
        return strategy.apply(parameters, {}, total, 2, {"server_lr": 0.5})[0]["w.models"]

    np.testing.assert_allclose(step([1.5, 0.0, 0.5]), [[2.0, 2.0], [1.0, 1.0], [1.5, 2.0]])
    for wrong in ([1.5, 0.0, 0.4], [3.0, -1.0, 0.0], [float("nan"), 0.0, 2.0]):
        with pytest.raises(BoundError, match=r"the models' weights are .* add up to 2"):
            step(wrong)


@pytest.mark.sampled(every=3)
def test_a_model_that_has_diverged_is_not_chosen(make: Make) -> None:
    bundle = make("ifca", strategy_options=OPTIONS)
    parameters = {name: array.copy() for name, array in bundle.parameters().items()}
    for array in parameters.values():
        array[0] *= 1e30
    device, (x, y) = Runtime(bundle), clients()[2]
    device.local_round(x, y, seed=1, parameters=parameters)
    assert device.state.state["models/choice"] != 0


@pytest.mark.sampled(every=3)
def test_devices_find_their_cluster(make: Make) -> None:
    """Eight devices of two kinds, whose classes are numbered differently: one model cannot serve both."""
    rng, data = np.random.default_rng(0), []
    for number in range(8):
        x = rng.standard_normal((40, 6)).astype(np.float32)
        y = x[:, :CLASSES].argmax(1)
        data.append((x, (y if number % 2 else (y + 1) % CLASSES).astype(np.int64)))
    accuracy = {}
    for name in ("fedavg", "ifca"):
        bundle = make(name, strategy_options={"models": 2, "spread": 1.0} if name == "ifca" else {}, batch_size=8)
        found = archipel.simulate(bundle, data, rounds=3, client_axis="off", hyperparameters={"lr": 0.5}).parameters
        if name == "ifca":
            lanes = archipel.simulate(bundle, data, rounds=3, client_axis="on", hyperparameters={"lr": 0.5}).parameters
            for tensor, array in found.items():
                np.testing.assert_allclose(lanes[tensor], array, rtol=1e-4, atol=1e-5)
        hits = []
        for x, y in data:
            device = Runtime(bundle)
            device.local_round(x, y, seed=1, parameters=found)  # chooses
            device.set_parameters(dict(found))
            hits.append(device.evaluate(x, y)["correct"] / len(y))
        accuracy[name] = np.mean(hits)
    assert accuracy["fedavg"] < 0.6
    assert accuracy["ifca"] > 0.85


def test_what_it_refuses(make: Make) -> None:
    for models, spread in ((65, 0.5), (2, 1.1)):
        with pytest.raises(ConversionError, match=r"strategy 'ifca': (models|spread) must be"):
            make("ifca", strategy_options={"models": models, "spread": spread})
