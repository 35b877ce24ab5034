"""vmap of networks and step graphs: against torch.func.vmap, and against one client after the other."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.func import functional_call

from archipel import Model, training
from archipel.autodiff import gradient, vmap
from archipel.graph import check_model, promote
from archipel.training import losses, optimizers

CLIENTS, BATCH = 3, 4
RNG = np.random.default_rng(0)


def network(normalization: nn.Module, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), normalization, nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout),
        nn.Conv2d(4, 6, 3, stride=2), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


def run(model: Model, inputs: dict) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    return dict(zip([port.name for port in model.outputs], session.run(None, inputs)))


def several(array: np.ndarray, count: int = CLIENTS) -> np.ndarray:
    """The array once for each client, each time a little different; variances stay positive."""
    return np.stack([array * (1 + i / 10) + (0.01 * i) for i in range(count)]).astype(array.dtype)


@pytest.mark.parametrize(
    "normalization",
    [
        nn.BatchNorm2d(4),
        pytest.param(nn.GroupNorm(2, 4), marks=pytest.mark.slow),
        pytest.param(nn.InstanceNorm2d(4, affine=True), marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(every=8)
def test_an_ensemble_equals_torch_func_vmap(normalization: nn.Module) -> None:
    module = network(normalization).eval()
    model = Model.from_torch(module, torch.zeros(2, 2, 8, 8))
    weights = {name: several(value) for name, value in model.parameters.items()}
    promote(model.ir, list(weights))
    data = RNG.standard_normal((CLIENTS, BATCH, 2, 8, 8)).astype(np.float32)
    for x, axis in ((data, 0), (data[0], None)):  # data of their own, the same for all
        mapped = vmap(model, over=[*weights] if axis is None else ["input", *weights], size=CLIENTS)
        check_model(mapped.ir)
        found = run(mapped, {"input": x, **weights})["output"]
        expected = torch.func.vmap(lambda values, each: functional_call(module, values, (each,)), in_dims=(0, axis))(
            {name: torch.from_numpy(value) for name, value in weights.items()}, torch.from_numpy(x)
        )
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("size", "steps"),
    [(CLIENTS, 1), pytest.param(None, 1, marks=pytest.mark.slow), pytest.param(CLIENTS, 2, marks=pytest.mark.slow)],
)
@pytest.mark.sampled(every=4)
def test_a_step_graph_trains_many_clients(size: int | None, steps: int) -> None:
    """With BatchNormalization in training mode, Dropout from each client's own seed, and momentum; also several
    minibatches in one graph, which is a Scan."""
    model = Model.from_torch(network(nn.BatchNorm2d(4), dropout=0.4).train(), torch.zeros(2, 2, 8, 8))
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(momentum=0.9), steps=steps)
    shared = {"lr": np.array(0.1, np.float32), "step": np.array(3)}
    over = [port.name for port in step.inputs if port.name not in shared]
    mapped = vmap(step, over=over, size=size)
    check_model(mapped.ir)
    assert {name: value.shape[1:] for name, value in mapped.initial.items()} == (
        {name: value.shape for name, value in step.initial.items()} if size else {}
    )
    batch = (BATCH,) if steps == 1 else (steps, BATCH)
    feed: dict[str, np.ndarray] = {
        "input": RNG.standard_normal((CLIENTS, *batch, 2, 8, 8)).astype(np.float32),
        "label": RNG.integers(0, 3, (CLIENTS, *batch)),
        "seed": np.array([7, 8, 9], np.uint32),
    }
    for port in step.inputs:
        if port.name not in feed and port.name in over:
            start = step.initial.get(port.name)
            feed[port.name] = several(np.zeros(port.shape, np.float32) if start is None else start)
    given = {name: value for name, value in shared.items() if name in {port.name for port in step.inputs}}
    together = run(mapped, feed | given)
    alone = [run(step, {name: np.asarray(value[i]) for name, value in feed.items()} | given) for i in range(CLIENTS)]
    for name, value in together.items():
        np.testing.assert_allclose(value, np.stack([client[name] for client in alone]), atol=1e-5)
    assert "seed" in over
    assert not np.allclose(together["loss"][0], together["loss"][1])


@pytest.mark.sampled(every=8)
def test_per_example_gradients_and_an_ensemble_of_them() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1), nn.Tanh())
    model = Model.from_torch(module, torch.zeros(1, 2, 3), dynamic_batch=False)
    names = list(model.parameters)
    pulled = gradient(model, of="output", wrt=names)
    promote(pulled.ir, names)
    x = RNG.standard_normal((CLIENTS, BATCH, 1, 2, 3)).astype(np.float32)
    weights = {name: several(value) for name, value in model.parameters.items()}
    # Inner vmap: examples, which share the weights. Outer: models, each with data of its own.
    mapped = vmap(vmap(pulled, over=["input"]), over=["input", *names])
    found = run(mapped, {"input": x, **weights})

    def of_example(values: dict, data: torch.Tensor) -> torch.Tensor:
        return functional_call(module, values, (data,)).sum()

    expected = torch.func.vmap(torch.func.vmap(torch.func.grad(of_example), in_dims=(None, 0)))(
        {name: torch.from_numpy(value) for name, value in weights.items()}, torch.from_numpy(x)
    )
    for name in names:
        np.testing.assert_allclose(found[f"{name}.grad"], expected[name].numpy(), atol=1e-5)
