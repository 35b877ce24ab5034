"""Federated transfer learning: a frozen backbone runs once for an example, and only the head or adapters travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import archipel
from archipel import models
from archipel.converter import Training
from archipel.datasets import digits_by_writer
from archipel.lite_runtime.training.features import FeatureCache
from archipel.simulation import SplitClients
from archipel.simulation.lanes import Lanes
from archipel.simulation.rounds import Rounds, RoundSettings
from archipel.simulation.states import MemoryStates
from archipel.training import losses, optimizers


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.set_num_threads(1)
    return models.digits_cnn(seed=0)


@pytest.fixture(scope="module")
def model(network: nn.Module) -> archipel.Model:
    return archipel.Model.from_torch(network, torch.zeros(2, 1, 28, 28))


@pytest.mark.parametrize(
    ("strategy", "options", "trainable", "travels"),
    [
        ("fedavg", {}, "output.*", ["output.weight", "output.bias"]),
        ("lora", {"targets": "hidden.weight", "rank": 2}, "*", ["hidden.weight.lora_a", "hidden.weight.lora_b"]),
    ],
)
@pytest.mark.sampled(every=4)
def test_only_what_is_trained_travels(
    network: nn.Module,
    model: archipel.Model,
    strategy: str,
    options: dict[str, Any],
    trainable: str,
    travels: list[str],
) -> None:
    digits = digits_by_writer()
    clients = [
        (each.inputs()[:40], each.targets()[:40])
        for each in (digits.of([writer]) for writer in digits.writers_in([4])[:2])
    ]
    training = Training(
        losses.cross_entropy(), optimizers.sgd(lr=0.1), strategy=strategy, trainable=trainable,
        strategy_options={"clip": 100.0, "bits": 24, **options}, batch_size=200,
    )  # fmt: skip
    result = archipel.simulate(model, clients, rounds=2, training=training, client_axis="off")
    for engine in ("onnxruntime", "torch:cpu"):
        at_once = archipel.simulate(result.bundle, clients, rounds=2, client_axis="on", engine=engine)
        for name, value in result.parameters.items():
            np.testing.assert_allclose(at_once.parameters[name], value, atol=1e-5, err_msg=f"{engine}: {name}")
    assert sorted(result.parameters) == sorted(travels)
    assert [row.failed for row in result.history] == ["", ""]
    # The backbone is a program of its own, which a device runs before the round's steps.
    programs = result.bundle.manifest.programs
    steps = {port.name for port in programs["train"].inputs}
    assert programs["features"].outputs
    assert not steps & {port.name for port in programs["features"].inputs}
    if strategy != "fedavg":
        return
    # By hand: one step on all of a device's examples in each round, of the last layer alone.
    network.double()
    start = {name: value.detach().clone() for name, value in network.output.named_parameters()}
    weights = [min(len(x), 100) for x, _ in clients]
    for _ in range(2):
        moves = []
        for x, y in clients:
            head = {name: value.clone().requires_grad_() for name, value in start.items()}
            full = {f"output.{name}": value for name, value in head.items()}
            logits = torch.func.functional_call(network, full, (torch.tensor(x).double(),))
            loss = nn.functional.cross_entropy(logits, torch.tensor(y))
            moves.append(dict(zip(head, torch.autograd.grad(loss, list(head.values())), strict=True)))
        start = {
            name: value - 0.1 * sum(w * g[name] for w, g in zip(weights, moves, strict=True)) / sum(weights)
            for name, value in start.items()
        }
    for name, value in start.items():
        np.testing.assert_allclose(result.parameters[f"output.{name}"], value.numpy(), atol=2e-4, err_msg=name)


@pytest.mark.sampled(every=4)
def test_the_backbone_runs_once_for_an_example(model: archipel.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all rounds and devices of one data set, also where features lie in a file and not in memory."""
    rows: list[int] = []
    compute = FeatureCache._compute

    def counting(cache: FeatureCache, indices: np.ndarray) -> list[np.ndarray]:
        rows.extend(indices.tolist())
        return compute(cache, indices)

    monkeypatch.setattr(FeatureCache, "_compute", counting)
    x, y = digits_by_writer().inputs()[:60], digits_by_writer().targets()[:60]
    clients = SplitClients({"input": x, "label": y}, [np.arange(7), np.arange(7, 30), np.arange(35, 60)])
    training = Training(
        losses.cross_entropy(), optimizers.sgd(lr=0.1), trainable="output.*", epochs=2, batch_size=8,
        strategy_options={"clip": 100.0, "bits": 24},
    )  # fmt: skip
    bundle = archipel.simulate(model, clients, rounds=1, training=training, client_axis="off").bundle
    expected = archipel.simulate(bundle, clients, rounds=3, client_axis="off")
    rows.clear()
    in_memory = archipel.simulate(bundle, clients, rounds=3, client_axis="on")
    assert sorted(rows) == [*range(30), *range(35, 60)]
    settings = RoundSettings(cohort=3)
    sealed = Lanes(bundle, clients, MemoryStates(), feature_budget=4000)
    rounds = Rounds(bundle, 3, settings, None, clients)
    for _ in range(3):
        rounds.run(sealed, 0)
    sealed.close()
    for name, value in expected.parameters.items():
        np.testing.assert_allclose(in_memory.parameters[name], value, atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(rounds.standing.parameters[name], in_memory.parameters[name])
