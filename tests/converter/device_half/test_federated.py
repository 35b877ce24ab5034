"""The programs that `convert` makes of a strategy's device half: roles, parts of a round, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, training
from archipel.bundle import Bundle, Phase, role_of
from archipel.errors import ArchipelError, ConversionError, TrainingError
from archipel.lite_runtime import DeviceState, Runtime
from archipel.training import optimizers, schedules, transforms

Make = Callable[..., Bundle]


def roles(bundle: Bundle, program: str) -> dict[str, set[str]]:
    """The tensors that a program reads or writes, by role and direction, such as "personal in"."""
    found: dict[str, set[str]] = {}
    for side, tensors in (("in", bundle.program(program).inputs), ("out", bundle.program(program).outputs)):
        for port in tensors:
            if hasattr(port, "tensor"):
                found.setdefault(f"{role_of(port)} {side}", set()).add(port.tensor)
    return found


BODY, HEAD = {"body.weight", "body.bias", "norm.weight", "norm.bias"}, {"head.weight", "head.bias"}
STATISTICS = {"norm.running_mean", "norm.running_var"}


@pytest.mark.sampled(every=4)
def test_parts_hold_the_other_tensors_still(make: Make) -> None:
    bundle = make("fedrep", strategy_options={"personal": "head.*", "personal_epochs": 7}, epochs=2)
    assert bundle.manifest.schedule == (
        Phase(program="train", epochs=7, batch_size=4),
        Phase(program="train.shared", epochs=2, batch_size=4),
    )
    shared = BODY | STATISTICS
    read = {"parameter in": shared, "personal in": HEAD}
    assert roles(bundle, "train") == {**read, "personal out": HEAD, "parameter out": STATISTICS}
    assert roles(bundle, "train.shared") == {**read, "parameter out": shared}
    assert {name: names for name, names in roles(bundle, "refresh").items() if name.endswith(" in")} == read
    uploaded = {*shared, "fedrep/weight"}
    assert roles(bundle, "finish") == {"start in": shared, "parameter in": shared, "update out": uploaded}
    assert {spec.name for spec in bundle.manifest.parameters} == shared


@pytest.mark.sampled(every=3)
def test_copies_have_statistics_and_optimizer_state_of_their_own(make: Make) -> None:
    bundle = make("ditto", optimizer=optimizers.sgd(momentum=0.9, lr=0.1))
    own = {f"own/{name}" for name in BODY | HEAD | STATISTICS}
    momentum = {f"{name}.momentum" for name in BODY | HEAD}
    kept = {f"train/{name}" for name in momentum}
    assert roles(bundle, "train.global")["parameter out"] == BODY | HEAD | STATISTICS
    assert roles(bundle, "train.global")["state out"] == momentum
    assert roles(bundle, "train") == {
        "personal in": own, "personal out": own, "start in": BODY | HEAD, "state in": kept, "state out": kept,
    }  # fmt: skip
    # So `predict`, and what is measured of its answers, is the device's own copy.
    assert roles(bundle, "refresh")["personal in"] == own
    assert "parameter in" not in roles(bundle, "refresh")


@pytest.mark.sampled(every=4)
def test_a_second_part_counts_its_own_steps(make: Make, module: nn.Module, data: tuple[np.ndarray, np.ndarray]) -> None:
    """Adam begins anew for the personal copy: as a new torch.optim.Adam, whatever came before in the round."""
    x, y = data
    bundle = make("ditto", optimizer=optimizers.adam(lr=0.05), epochs=3, batch_size=12)
    device = Runtime(bundle, state=DeviceState())
    device.local_round(x, y, seed=1, hyperparameters={"lambda": 0.4})
    module.train()
    first = {name: value.detach().clone() for name, value in module.named_parameters()}
    torch_adam = torch.optim.Adam(module.parameters(), lr=0.05)
    for _ in range(3):
        torch_adam.zero_grad()
        loss = nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(y))
        away = sum(((value - first[name]) ** 2).sum() for name, value in module.named_parameters())
        (loss + 0.4 / 2 * away).backward()
        torch_adam.step()
    for name, value in module.named_parameters():
        if name != "body.bias":  # the normalization takes it away: its gradient is rounding, which Adam makes large
            np.testing.assert_allclose(device.state.personal[f"own/{name}"], value.detach(), atol=1e-5, err_msg=name)
    np.testing.assert_allclose(device.state.personal["own/norm.running_var"], module.norm.running_var, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "options", "moved"),
    [("fedrep", {"personal": "head.*"}, HEAD), ("ditto", {}, {f"own/{name}" for name in BODY | HEAD | STATISTICS})],
)
@pytest.mark.sampled(every=4)
def test_learning_without_rounds_moves_what_is_personal(
    make: Make, data: tuple[np.ndarray, np.ndarray], strategy: str, options: dict, moved: set[str]
) -> None:
    bundle = make(strategy, strategy_options=options)
    device = Runtime(bundle, state=DeviceState())
    before = device.predict(data[0])
    history = device.fit(*data, epochs=30, batch_size=4)
    assert np.mean(history.losses[-3:]) < np.mean(history.losses[:3])
    assert set(device.state.personal) == moved
    # Where devices share running statistics, the layers of the shared part follow the batches that they see.
    follows = STATISTICS if strategy == "fedrep" else set()
    for name, value in bundle.parameters().items():
        assert (name in follows) != np.array_equal(device.parameters()[name], value), name
    assert np.abs(device.predict(data[0]) - before).max() > 0.05


@pytest.mark.sampled(every=3)
def test_a_bundle_carries_what_personal_tensors_begin_with(make: Make, model: Model) -> None:
    bundle = make("fedrep", strategy_options={"personal": ["head.*"]})
    np.testing.assert_array_equal(bundle.tensor("head.weight"), model.parameters["head.weight"])


# --- SCAFFOLD and FedNova: what travels beside the deltas ------------------------------------------------------------


def zeros(bundle: Bundle) -> dict[str, np.ndarray]:
    return {f"control/{name}": np.zeros_like(value) for name, value in bundle.parameters().items()}


def test_a_control_variate_is_what_was_uploaded(make: Make, data: tuple[np.ndarray, np.ndarray]) -> None:
    bundle = make("scaffold", strategy_options={"control_clip": 0.01, "control_range": 0.5})
    values = [port for port in bundle.program("finish").outputs if getattr(port, "kind", "") == "value"]
    assert {(port.range, port.clip, port.weighting) for port in values} == {(0.5, 0.01, "uniform")}
    device = Runtime(bundle, state=DeviceState())
    sums = {port.tensor: np.zeros(port.shape) for port in values}
    for number in range(3):
        arrays = device.local_round(*data, seed=number, broadcast=zeros(bundle)).arrays
        changes = [arrays[port.name] for port in values]
        assert np.sqrt(sum((change**2).sum() for change in changes)) == pytest.approx(0.01, rel=1e-3)
        for port, change in zip(values, changes, strict=True):
            sums[port.tensor] += change
    for name, total in sums.items():
        np.testing.assert_allclose(device.state.state[f"own_{name}"], total, atol=1e-6)


@pytest.mark.sampled(every=3)
def test_a_rate_of_zero_leaves_everything_finite(make: Make, data: tuple[np.ndarray, np.ndarray]) -> None:
    bundle = make("scaffold")
    device = Runtime(bundle, state=DeviceState())
    arrays = device.local_round(*data, seed=0, broadcast=zeros(bundle), hyperparameters={"lr": 0.0}).arrays
    assert all(np.isfinite(array).all() for array in arrays.values())
    # What the batches' means and variances changed does not depend on the rate.
    assert {name.removesuffix(".update") for name, array in arrays.items() if array.any()} == STATISTICS


def test_population_spreads_the_change_of_c(make: Make) -> None:
    from archipel.protocol.vector import DecodedSum
    from archipel.strategies import scaffold

    parameters = {"w": np.zeros(2, np.float32)}
    total = DecodedSum({"w": np.ones(2)}, {"control/w": np.array([2.0, 4.0])}, None)
    for population, divisor in ((0.0, 2), (1.0, 2), (8.0, 8)):
        state = scaffold.init(parameters)
        moved, control = scaffold.update(parameters, state, total, 2, {"population": population})
        np.testing.assert_allclose(control["control/w"], np.array([2.0, 4.0]) / divisor)
        np.testing.assert_allclose(moved["w"], 0.5)


@pytest.mark.sampled(every=3)
def test_steps_are_capped(make: Make, data: tuple[np.ndarray, np.ndarray]) -> None:
    bundle = make("fednova", epochs=4, strategy_options={"step_cap": 5, "weight_cap": 12})
    arrays = Runtime(bundle).local_round(*data, seed=0).arrays
    (steps,) = [port for port in bundle.program("finish").outputs if getattr(port, "kind", "") == "value"]
    assert (steps.range, float(arrays[steps.name])) == (5.0, 5.0)  # 12 were made


# --- what does not fit together --------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], type[ArchipelError], str]] = [
    (
        "scaffold",
        {"optimizer": optimizers.adam()},
        ConversionError,
        "needs the optimizer sgd at a constant rate",
    ),
    ("scaffold", {"optimizer": optimizers.sgd(0.9, nesterov=True)}, ConversionError, "counts on plain momentum"),
    (
        "fednova",
        {"optimizer": optimizers.sgd(lr=schedules.cosine(0.1, 10))},
        ConversionError,
        "'fednova': needs the optimizer sgd at a constant rate",
    ),
    ("fednova", {"optimizer": optimizers.sgd(0.9, nesterov=True)}, ConversionError, "leave nesterov and dampening out"),
    ("scaffold", {"step_options": {"accumulate": 2}}, ConversionError, "counts every batch as a step"),
    ("fednova", {"step_options": {"precision": "mixed"}}, ConversionError, "counts every batch as a step"),
    (
        "scaffold",
        {"step_options": {"transforms": [transforms.proximal(0.1, "broadcast")]}},
        ConversionError,
        "use anchor='start'",
    ),
    (
        "fedprox",
        {"step_options": {"transforms": [transforms.proximal(0.1)]}},
        TrainingError,
        "two parts of the step have a hyperparameter 'mu'",
    ),
    (
        "fedrep",
        {"strategy_options": {"personal": "tail.*"}},
        ConversionError,
        "'fedrep': personal: no parameter matches 'tail.*'; there are: body.",
    ),
    ("fedrep", {"strategy_options": {"personal": "*"}}, ConversionError, "nothing to share"),
    ("fedrep", {"strategy_options": {"personal": ()}}, ConversionError, "'train' trains the personal tensors"),
    ("fedrep", {}, ConversionError, "needs the option 'personal'"),
    (
        "fedrep",
        {
            "strategy_options": {"personal": "head.*"},
            "step_options": {"per_example": training.per_example(), "batch_norm": "frozen"},
        },
        ConversionError,
        "trains a part of the model in 'train'; leave per_example out",
    ),
    ("fedbn", {"step_options": {"batch_norm": "folded"}}, ConversionError, "no trained tensor is a weight of Batch"),
    ("fedbn", {"trainable": "head.*"}, ConversionError, "no trained tensor is a weight of BatchNormalization"),
    ("dpsgd", {}, TrainingError, "use batch_norm='frozen' or 'folded'"),
    (
        "dpsgd",
        {"step_options": {"per_example": training.per_example(), "batch_norm": "frozen"}},
        ConversionError,
        "clips single examples itself; leave per_example out",
    ),
    (
        "dpsgd",
        {"step_options": {"kernels": True}},
        ConversionError,
        "clips those of single examples; leave kernels out",
    ),
    (
        "lora",
        {"strategy_options": {"targets": "norm.*"}},
        ConversionError,
        "targets ['norm.*'] match no float32",
    ),
    ("moon", {}, ConversionError, "strategy 'moon' compares features of three models, whose BatchNormalization"),
    (
        "moon",
        {"strategy_options": {"features": "ghost"}, "step_options": {"batch_norm": "frozen"}},
        ConversionError,
        "'moon': features: the graph computes no value 'ghost'",
    ),
    (
        "moon",
        {"step_options": {"batch_norm": "frozen", "per_example": training.per_example()}},
        ConversionError,
        "strategy 'moon' compares three models; leave per_example out",
    ),
    ("ifca", {}, ConversionError, "strategy 'ifca' has several models, whose BatchNormalization"),
    (
        "ifca",
        {"step_options": {"batch_norm": "frozen", "per_example": training.per_example()}},
        ConversionError,
        "strategy 'ifca' chooses a model without noise; leave per_example out",
    ),
    (
        "ifca",
        {"strategy_options": {"compress": "rotation"}, "step_options": {"batch_norm": "frozen"}},
        ConversionError,
        "'ifca': compress spreads each device's rounding",
    ),
    ("fedasync", {"strategy_options": {"compress": "rotation"}}, ConversionError, "compress is for rounds whose"),
    ("fedsgd", {"optimizer": optimizers.adam(lr=0.1)}, ConversionError, "'fedsgd': needs the optimizer sgd"),
    ("perfedavg", {"optimizer": optimizers.sgd(lr=0.1, momentum=0.9)}, ConversionError, "needs SGD without momentum"),
    ("pfedme", {"step_options": {"accumulate": 2}}, ConversionError, "'pfedme': counts every batch as a step"),
    ("lora", {"strategy_options": {"targets": "ghost"}}, ConversionError, "'lora': targets: no parameter matches"),
    ("lora", {"strategy_options": {"full": "ghost"}}, ConversionError, "'lora': full: no parameter matches"),
]


@pytest.mark.parametrize(("strategy", "options", "error", "text"), REFUSED)
@pytest.mark.sampled(every=6)
def test_what_a_strategy_cannot_have_is_refused(
    make: Make, tmp_path: Path, strategy: str, options: dict, error: type[ArchipelError], text: str
) -> None:
    with pytest.raises(error) as caught:
        make(strategy, **options)
    assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_proximal_term_needs_a_name() -> None:
    with pytest.raises(TrainingError, match="name must be the name of a hyperparameter, is ''"):
        transforms.proximal(0.1, name="")
