"""A federated task in miniature: small PyTorch models, four clients, and rounds by the device's own runtime."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn

from archipel import strategies
from archipel.bundle import Bundle, Program
from archipel.bundle.roles import Update
from archipel.graph import Model
from archipel.lite_runtime import DeviceState, Runtime
from archipel.lite_runtime.noise import Randomness
from archipel.permutations import permutation
from archipel.protocol.vector import DecodedSum
from archipel.strategies.running_statistics import combine_statistics, shared_statistics, split_statistics

LR, BATCH, EPOCHS, CLASSES = 0.2, 4, 2, 3
ROUNDS = range(3)
SIZES = (7, 11, 15, 19)  # the last batch has three examples, so that a variance over it is no accident

Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]
Client = tuple[np.ndarray, np.ndarray]


def dense() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(OrderedDict(body=nn.Linear(6, 5), tanh=nn.Tanh(), head=nn.Linear(5, CLASSES)))


def normalized() -> nn.Module:
    torch.manual_seed(4)
    layers = OrderedDict(body=nn.Linear(6, 5), norm=nn.BatchNorm1d(5), relu=nn.ReLU(), head=nn.Linear(5, CLASSES))
    return nn.Sequential(layers)


def convolutional() -> nn.Module:
    torch.manual_seed(5)
    layers = OrderedDict(
        conv=nn.Conv2d(2, 4, 3, padding=1, groups=2), relu=nn.ReLU(), flat=nn.Flatten(), head=nn.Linear(64, CLASSES)
    )
    return nn.Sequential(layers)


@cache
def imported(make: Callable[[], nn.Module], shape: tuple[int, ...] = (6,)) -> Model:
    return Model.from_torch(make(), torch.zeros(2, *shape))


def clients(shape: tuple[int, ...] = (6,)) -> list[Client]:
    """Each with classes of its own preference."""
    found = []
    for number, size in enumerate(SIZES):
        rng = np.random.default_rng(10 + number)
        y = np.minimum(rng.integers(0, CLASSES, size) + (rng.random(size) < 0.3), CLASSES - 1)
        x = rng.standard_normal((size, *shape)) + 0.5 * number + 0.3 * y.reshape(-1, *([1] * len(shape)))
        found.append((x.astype(np.float32), y.astype(np.int64)))
    return found


def round_seed(number: int, client: int) -> int:
    return 1000 * number + client


def batches(size: int, number: int, client: int, *, epochs: int = EPOCHS, phase: int = 0) -> Iterator[np.ndarray]:
    """The rows of each batch, in the order that the runtime documents."""
    for epoch in range(epochs):
        order = permutation(size, round_seed(number, client), phase, epoch)
        yield from (order[first : first + BATCH] for first in range(0, size, BATCH))


@dataclass
class Task:
    """What is left after the simulated rounds."""

    bundle: Bundle
    devices: list[Runtime]
    parameters: Arrays
    server_state: Arrays


def simulate(
    bundle: Bundle,
    data: list[Client],
    rounds: int = len(ROUNDS),
    randomness: Callable[[int, int], Randomness] | None = None,
    server: Mapping[str, float] | None = None,
) -> Task:
    """Rounds of all clients: the sum of their updates goes to the server half as it comes, in floating point.

    `server` are the server half's hyperparameters.
    """
    strategy = strategies.get(bundle.manifest.strategy)
    parameters: Mapping[str, np.ndarray] = bundle.parameters()
    state = first_state(bundle)
    devices = [Runtime(bundle, state=DeviceState()) for _ in data]
    for number in range(rounds):
        updates = [
            device.local_round(
                x, y, seed=round_seed(number, client), parameters=parameters, broadcast=strategy.broadcast(state),
                randomness=None if randomness is None else randomness(number, client),
            ).arrays
            for client, (device, (x, y)) in enumerate(zip(devices, data, strict=True))
        ]  # fmt: skip
        total = added_up(bundle.program("finish"), updates)
        parameters, state = server_step(bundle, parameters, state, total, len(data), server)
    return Task(bundle, devices, dict(parameters), state)


def first_state(bundle: Bundle) -> Arrays:
    """The state of the strategy's server half in the first round."""
    trained, _ = split_statistics(bundle.parameters(), shared_statistics(bundle.manifest))
    return strategies.get(bundle.manifest.strategy).init(trained)


def server_step(
    bundle: Bundle,
    parameters: Mapping[str, np.ndarray],
    state: Arrays,
    total: DecodedSum,
    cohort: int,
    hyperparameters: Mapping[str, float] | None = None,
) -> tuple[Arrays, Arrays]:
    """The parameters with their running statistics, and the state, after a round."""
    pairs = shared_statistics(bundle.manifest)
    trained, statistics = split_statistics(parameters, pairs)
    strategy = strategies.get(bundle.manifest.strategy)
    moved, following = strategy.apply(trained, state, total, cohort, hyperparameters or {})
    return {**moved, **combine_statistics(statistics, total, cohort, pairs)}, following


def added_up(finish: Program, updates: list[Arrays]) -> DecodedSum:
    sums = {
        port: np.sum([update[port.name].astype(np.float64) for update in updates], axis=0) for port in ports(finish)
    }
    weights = [value for port, value in sums.items() if port.kind == "weight"]

    def kinds(*wanted: str) -> Arrays:
        return {port.tensor: value for port, value in sums.items() if port.kind in wanted}

    return DecodedSum(
        deltas=kinds("delta"),
        values=kinds("value"),
        weight=float(weights[0]) if weights else None,
        moments=kinds("mean", "variance"),
    )


def ports(finish: Program) -> list[Update]:
    return [port for port in finish.outputs if isinstance(port, Update)]


# --- references, in float64 and from PyTorch -------------------------------------------------------------------------


def tensors(module: nn.Module) -> Tensors:
    return {name: value.detach().double().clone() for name, value in module.named_parameters()}


def gradients(module: nn.Module, at: Tensors, x: np.ndarray, y: np.ndarray, buffers: Tensors | None = None) -> Tensors:
    """Of the mean cross entropy. `buffers` are running statistics, which move as PyTorch moves them in training."""
    module.double().train()
    leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
    logits = torch.func.functional_call(module, {**leaves, **(buffers or {})}, (torch.tensor(x).double(),))
    loss = nn.functional.cross_entropy(logits, torch.tensor(y))
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))


def stepped(at: Tensors, gradient: Tensors, rate: float = LR) -> Tensors:
    return {name: value - rate * gradient[name] for name, value in at.items()}


def descended(
    module: nn.Module,
    start: Tensors,
    number: int,
    client: int,
    change: Callable[[Tensors, Tensors], Tensors] | None = None,
    *,
    fixed: Tensors | None = None,
    buffers: Tensors | None = None,
    epochs: int = EPOCHS,
    phase: int = 0,
) -> Tensors:
    """What a client's SGD in round `number` makes of `start`; `change` makes another gradient of the gradient and of
    where it was taken. `fixed` are weights that stay."""
    end, (x, y) = start, clients()[client]
    for rows in batches(len(x), number, client, epochs=epochs, phase=phase):
        gradient = gradients(module, {**end, **(fixed or {})}, x[rows], y[rows], buffers)
        end = stepped(end, gradient if change is None else change(gradient, end))
    return end


def averaged_rounds(start: Tensors, local: Callable[[int, int, Tensors], Tensors]) -> Tensors:
    """Rounds whose model is the weighted mean of the clients' models; `local` makes one, given round, client, model."""
    for number in ROUNDS:
        start = averaged(start, [local(number, client, start) for client in range(len(SIZES))])
    return start


def averaged(start: Tensors, ends: list[Tensors], weights: tuple[float, ...] = SIZES) -> Tensors:
    """The weighted mean of the clients' models."""
    total = sum(weights)
    return {
        name: torch.stack([w * end[name] for w, end in zip(weights, ends, strict=True)]).sum(0) / total
        for name in start
    }


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-4, atol=atol, err_msg=name)


def assert_answers(device: Runtime, x: np.ndarray, module: nn.Module, weights: Tensors) -> None:
    """The device answers as the PyTorch module with these weights."""
    expected = torch.func.functional_call(module, weights, (torch.tensor(x).double(),))
    np.testing.assert_allclose(device.predict(x), expected.detach().numpy(), rtol=1e-4, atol=1e-5)
