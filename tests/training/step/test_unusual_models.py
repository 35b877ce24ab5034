"""Models that are not a plain stack of layers, and batches of one, against PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.nn import functional

from archipel import Model, training
from archipel.errors import NotDifferentiableError, TrainingError
from archipel.graph import check_model
from archipel.training import StepRunner, losses, optimizers, transforms
from archipel.training.cloud import TorchModule

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def follow(
    module: nn.Module,
    batches: list[tuple[np.ndarray, np.ndarray]],
    ours: optimizers.Optimizer,
    theirs: Make,
    loss: losses.Loss | None = None,
    torch_loss: Callable = functional.cross_entropy,
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    """The losses and all tensors of a few steps are PyTorch's."""
    model = Model.from_torch(module, torch.from_numpy(batches[0][0]))
    step = training.step_graph(model, loss or losses.cross_entropy(), ours, **options)
    check_model(step.ir)
    runner = StepRunner(step)
    found = [runner.step(batch)["loss"] for batch in batches]
    module = copy.deepcopy(module).train()
    optimizer = theirs(module.parameters())
    expected = []
    for x, y in batches:
        optimizer.zero_grad()
        output = module(torch.from_numpy(x))
        value = torch_loss(output[0] if isinstance(output, tuple) else output, torch.from_numpy(y))
        value.backward()
        optimizer.step()
        expected.append(value.item())
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    tensors = {name: value.numpy() for name, value in module.state_dict().items() if value.is_floating_point()}
    assert tensors.keys() <= runner.tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_allclose(runner.tensors[name], value, atol=10 * tolerance, err_msg=name)


def rows(
    count: int, width: int, classes: int, dtype: npt.DTypeLike = np.float32
) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((count, width)).astype(dtype), rng.integers(0, classes, count)) for _ in range(4)]


def sgd(**arguments: Any) -> tuple[optimizers.Optimizer, Make]:
    return optimizers.sgd(lr=0.1, **arguments), lambda p: torch.optim.SGD(p, lr=0.1, **arguments)


class Tied(nn.Module):
    """The decoder's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.dense = nn.Embedding(7, 5), nn.Linear(5, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(self.embedding(tokens))) @ self.embedding.weight.T


@pytest.mark.sampled(every=4)
def test_tied_weights() -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.integers(0, 7, (4, 6)), rng.integers(0, 7, (4, 6))) for _ in range(4)]
    follow(
        Tied(), batches, optimizers.adamw(lr=0.05), lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.01),
        losses.cross_entropy(axis=-1), lambda y, t: functional.cross_entropy(y.flatten(0, 1), t.flatten()),
    )  # fmt: skip


class Repeated(nn.Module):
    """A layer and its normalization, used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dense(torch.relu(self.norm(self.dense(x)))))


@pytest.mark.sampled(every=4)
def test_a_layer_used_twice() -> None:
    follow(Repeated(), rows(6, 5, 5), *sgd(weight_decay=0.1, momentum=0.9))


class Heads(nn.Module):
    """The loss is of the first output: it does not depend on the second head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.first(hidden), self.second(hidden)


@pytest.mark.sampled(every=6)
def test_what_has_no_influence_stays() -> None:
    """As in PyTorch, where it has no gradient: weight decay would move it."""
    follow(Heads(), rows(6, 5, 3), *sgd(weight_decay=0.3, momentum=0.9))
    follow(
        Heads(), rows(6, 5, 3), optimizers.adamw(lr=0.1, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3), transforms=[transforms.clip_by_norm(1e6)],
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"steps": 2}, {"accumulate": 2}, {"per_example": training.per_example(1.0, 1.0)}, {"precision": "mixed"}],
    ids=str,
)
@pytest.mark.sampled(every=6)
def test_what_has_no_influence_stays_in_every_kind_of_step(options: dict[str, Any]) -> None:
    model = Model.from_torch(Heads(), torch.zeros(2, 5))
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(weight_decay=0.3, momentum=0.9), **options)
    check_model(step.ir)
    runner = StepRunner(step)
    batches = rows(6, 5, 3)
    for first in range(0, 4, runner.steps):
        runner.run(batches[first : first + runner.steps])
    for name, before in step.initial.items():
        assert np.array_equal(runner.tensors[name], before) == name.startswith("second."), name
    assert not any(name.startswith("second.") and "momentum" in name for name in runner.tensors)


@pytest.mark.sampled(every=3)
def test_training_only_what_has_no_influence() -> None:
    model = Model.from_torch(Heads(), torch.zeros(2, 5))
    with pytest.raises(TrainingError, match=r"'output_0' depends on none of \['second.weight', 'second.bias'\]"):
        training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), trainable="second.*")


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.dense = nn.Parameter(torch.ones(5)), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x) + (x * self.scale).argmax(1, keepdim=True)


@pytest.mark.sampled(every=3)
def test_influence_without_a_derivative() -> None:
    model = Model.from_torch(Rounded(), torch.randn(2, 5))
    with pytest.raises(NotDifferentiableError, match=r"step_graph: .*'scale' does not exist.*ArgMax.*trainable="):
        training.step_graph(model, losses.cross_entropy(), optimizers.sgd())
    training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), trainable="dense.*")


ODD = ["a b", "ü", "x/y", "q[0]*", "losses", "const", "w:0", "x_2", "Mul"]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ODD:
            self.register_parameter(name, nn.Parameter(0.4 * torch.randn(5, 5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.parameters():
            x = torch.tanh(x @ weight)
        return x


@pytest.mark.sampled(every=4)
def test_names_with_odd_characters() -> None:
    follow(Named(), rows(6, 5, 5), optimizers.adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01))
    model = Model.from_torch(Named(), torch.zeros(2, 5))
    for name in ODD:
        step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), trainable=name)
        assert set(step.initial) == {name}


DOUBLES: dict[str, tuple[losses.Loss, Callable[..., torch.Tensor]]] = {
    "huber": (losses.huber(), functional.huber_loss),
    "l1": (losses.l1(), functional.l1_loss),
    "binary": (losses.binary_cross_entropy(), functional.binary_cross_entropy_with_logits),
}


@pytest.mark.parametrize("name", DOUBLES)
@pytest.mark.sampled(every=4)
def test_models_in_double_precision(name: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Tanh()).double()
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((4, 8)), rng.integers(0, 2, (4, 6)).astype(float)) for _ in range(4)]
    ours, theirs = DOUBLES[name]
    # A rate that float32 holds exactly, as hyperparameters are; the epsilon of LayerNormalization is float32, too.
    follow(module, batches, optimizers.sgd(0.9, lr=0.0625), lambda p: torch.optim.SGD(p, lr=0.0625, momentum=0.9),
           ours, theirs, 1e-9)  # fmt: skip


@pytest.mark.sampled(every=4)
def test_batches_of_one() -> None:
    torch.manual_seed(0)
    follow(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), rows(1, 5, 3), *sgd(momentum=0.9))
    rng = np.random.default_rng(0)
    pictures = [(rng.standard_normal((1, 1, 6, 6), np.float32), rng.integers(0, 3, 1)) for _ in range(4)]
    convolution = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    follow(convolution, pictures, *sgd(momentum=0.9))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("layers", "shape"),
    [((nn.Linear(5, 4), nn.BatchNorm1d(4)), (5,)), ((nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten()), (1, 3, 3))],
    ids=["dense", "one pixel"],
)
@pytest.mark.sampled(every=6)
def test_one_example_has_no_statistics(layers: tuple[nn.Module, ...], shape: tuple[int, ...], steps: int) -> None:
    """PyTorch refuses it in training; on a device it is what is left at the end of an epoch.

    So it is normalized by the running statistics, as PyTorch does it in evaluation, and these stay.
    """
    torch.manual_seed(0)
    native = nn.Sequential(*layers, nn.Linear(4, 3))
    native[1].running_mean.normal_()
    native[1].running_var.uniform_(0.5, 2)
    model = Model.from_torch(native, torch.zeros(2, *shape))
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1), steps=steps)
    check_model(step.ir)
    runner = StepRunner(step)
    x, y = np.random.default_rng(0).standard_normal((1, *shape)).astype(np.float32), np.zeros(1, np.int64)
    cloud = TorchModule(model)
    torch.testing.assert_close(cloud.train()(torch.from_numpy(x)), native.eval()(torch.from_numpy(x)))
    runner.run([(x, y)] * steps)
    optimizer = torch.optim.SGD(native.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(native(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    for name, value in native.state_dict().items():
        if name in runner.tensors:
            np.testing.assert_allclose(runner.tensors[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert {"1.running_mean", "1.running_var", "1.weight", "0.bias"} <= set(runner.tensors)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(cloud.state_dict()[name], native.state_dict()[name])
