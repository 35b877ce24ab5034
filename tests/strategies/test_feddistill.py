"""Federated distillation against Jeong et al. 2018, algorithm 1, written in PyTorch; models stay on the devices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import archipel
from archipel import strategies
from archipel.bundle import Bundle
from archipel.converter.opened import source_model
from archipel.errors import BoundError, ConversionError, SimulationError
from archipel.protocol.vector import DecodedSum
from archipel.training import losses
from tests.support.simulation import (
    CLASSES,
    EPOCHS,
    ROUNDS,
    SIZES,
    Tensors,
    assert_answers,
    assert_same,
    batches,
    clients,
    dense,
    normalized,
    simulate,
    stepped,
    tensors,
)

Make = Callable[..., Bundle]
TABLE = "logits/mean"


def outputs(module: nn.Module, at: Tensors, x: np.ndarray) -> torch.Tensor:
    found: torch.Tensor = torch.func.functional_call(module.double(), at, (torch.tensor(x).double(),))
    return found


def distilled(
    module: nn.Module, at: Tensors, x: np.ndarray, y: np.ndarray, table: torch.Tensor, strength: float
) -> Tensors:
    """The gradient of phi(F, y) + gamma phi(F, G), G the table's row of the label, phi the cross entropy."""
    leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
    logits, label = outputs(module, leaves, x), torch.tensor(y)
    other = -(table[label].softmax(1) * logits.log_softmax(1)).sum(1)
    known = (table[label] != 0).any(1)
    loss = nn.functional.cross_entropy(logits, label) + strength * (other * known).mean()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.sampled(every=3)
def test_three_rounds(make: Make) -> None:
    strength = 0.6
    # One class is on two devices only, so that rows have means of other devices than others.
    data = [(x, y if number < 2 else y % 2) for number, (x, y) in enumerate(clients())]
    bundle = make("feddistill", strategy_options={"strength": strength})
    assert {spec.name: spec.shape for spec in bundle.manifest.parameters} == {TABLE: (CLASSES, CLASSES)}
    task = simulate(bundle, data)
    module, table = dense(), torch.zeros(CLASSES, CLASSES).double()
    own = [tensors(module) for _ in SIZES]
    for number in ROUNDS:
        sums, weights = torch.zeros_like(table), torch.zeros(CLASSES).double()
        for i, (x, y) in enumerate(data):
            for rows in batches(len(x), number, i):
                own[i] = stepped(own[i], distilled(module, own[i], x[rows], y[rows], table, strength))
            logits = outputs(module, own[i], x)
            for label in np.unique(y):
                mine = torch.tensor(y == label)
                sums[label] += mine.sum() * logits[mine].mean(0)
                weights[label] += mine.sum()
        table = torch.where(weights[:, None] > 0, sums / weights.clamp(min=1)[:, None], table)
    assert_same(task.parameters, {TABLE: table}, atol=1e-5)
    for device, w, (x, _) in zip(task.devices, own, data, strict=True):
        device.set_parameters(task.parameters)
        assert_answers(device, x, module, w)
        # Without the table, which is no part of the model.
        assert_same(source_model(device).parameters, w)


def test_a_class_that_nobody_had_keeps_its_row_and_foreign_weights_are_refused() -> None:
    parameters = {TABLE: np.ones((3, 3), np.float32)}
    deltas = {TABLE: np.array([[3.0, 3.0, 3.0], [0.0, 0.0, 0.0], [0.5, 1.0, 0.0]])}

    def step(weights: list[float]) -> np.ndarray:
        total = DecodedSum(deltas, {"feddistill/weights": np.array(weights)}, 2.0)
        return strategies.get("feddistill").apply(parameters, {}, total, 2, {"server_lr": 0.5})[0][TABLE]

    np.testing.assert_allclose(step([1.5, 0.0, 0.5]), [[2.0, 2.0, 2.0], [1.0, 1.0, 1.0], [1.5, 2.0, 1.0]])
    for wrong in ([2.1, 0.0, 0.4], [1.0, -1.0, 0.0], [float("nan"), 0.0, 2.0]):
        with pytest.raises(BoundError, match=r"the classes' weights are .* add up to 2"):
            step(wrong)


@pytest.mark.sampled(every=3)
def test_both_engines_and_statistics_that_stay(make: Make) -> None:
    """BatchNormalization's statistics stay on the device, and labels that are ignored count nowhere."""
    loss = losses.cross_entropy(ignore_index=-1)
    data = [(x, np.where(np.arange(len(y)) % 5 == 0, -1, y)) for x, y in clients()]
    bundle = make("feddistill", normalized, loss=loss)
    assert {port.tensor for port in bundle.program("finish").outputs if hasattr(port, "kind")} == {
        TABLE, "feddistill/weights", "feddistill/weight",
    }  # fmt: skip
    off, on = (archipel.simulate(bundle, data, rounds=3, client_axis=axis).parameters[TABLE] for axis in ("off", "on"))
    np.testing.assert_allclose(on, off, rtol=1e-3, atol=1e-3)
    assert np.abs(off).max() > 0.1


def wide() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(OrderedDict(one=nn.Linear(6, 9), relu=nn.ReLU(), two=nn.Linear(9, CLASSES)))


@pytest.mark.sampled(every=4)
def test_devices_with_different_models_share_a_table(make: Make, tmp_path: Path) -> None:
    data, modules, of = clients(), [dense(), wide()], [0, 1, 1, 0]
    bundles = [make("feddistill", maker, batch_size=32) for maker in (dense, wide)]
    settings: dict[str, Any] = {"model_of": of, "privacy": "plain", "client_axis": "off", "held_out": data}
    found = archipel.simulate(bundles, data, rounds=3, **settings)
    own, table = [tensors(modules[number]) for number in of], torch.zeros(CLASSES, CLASSES).double()
    for _ in ROUNDS:
        sums, weights = torch.zeros_like(table), torch.zeros(CLASSES).double()
        for i, (x, y) in enumerate(data):
            for _ in range(EPOCHS):
                own[i] = stepped(own[i], distilled(modules[of[i]], own[i], x, y, table, 1.0))
            has = nn.functional.one_hot(torch.tensor(y), CLASSES).double()
            sums, weights = sums + has.T @ outputs(modules[of[i]], own[i], x), weights + has.sum(0)
        table = sums / weights[:, None]
    assert_same(found.parameters, {TABLE: table}, atol=1e-5)
    # Each device's own model is measured on its examples.
    for i, (x, y) in enumerate(data):
        right = float((outputs(modules[of[i]], own[i], x).argmax(1) == torch.tensor(y)).double().mean())
        assert found.clients[i].tested["accuracy"] == pytest.approx(right)
    # In turn, in lanes, and stopped after two rounds.
    whole = archipel.simulate(bundles, data, rounds=3, client_axis="on")
    for rounds in (2, 3):
        again = archipel.simulate(bundles, data, rounds=rounds, client_axis="on", folder=tmp_path / "run")
    np.testing.assert_array_equal(again.parameters[TABLE], whole.parameters[TABLE])
    with pytest.raises(SimulationError, match="model_of: names the models of 3 clients"):
        archipel.simulate(bundles, data, model_of=[0, 1, 0], rounds=1)
    with pytest.raises(SimulationError, match="model_of: names models from 0 to 1"):
        archipel.simulate(bundles, data, model_of=[0, 1, 2, 0], rounds=1)
    with pytest.raises(SimulationError, match=r"number 1 has other parameters to share .* such as feddistill"):
        archipel.simulate([make("fedavg"), make("fedavg", wide)], data, rounds=1)


@pytest.mark.sampled(every=3)
def test_what_it_refuses(make: Make) -> None:
    def sequence() -> nn.Module:
        return nn.Sequential(OrderedDict(conv=nn.Conv1d(2, CLASSES, 3)))

    with pytest.raises(ConversionError, match=r"has to be \[batch, classes\]"):
        make("feddistill", sequence, (2, 5))
    with pytest.raises(ConversionError, match="has to be"):
        make("feddistill", loss=losses.mse())
