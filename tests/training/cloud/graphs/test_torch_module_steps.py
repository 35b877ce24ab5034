"""TorchModule against the native module that it was made of: fifty steps, and weights that go both ways."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from archipel import Model
from archipel.training.cloud import TorchModule
from tests.support.zoo_tasks import STEPS, TASKS, Task, torch_losses

SHORT = ("digits CNN",)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def make(task: Task) -> tuple[torch.nn.Module, Model]:
    native = task.network().train()
    return native, Model.from_torch(native, tuple(map(torch.from_numpy, task.batch(0)[:-1])))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in TASKS]
)
def test_fifty_steps(name: str) -> None:
    task = TASKS[name]
    batches = [task.batch(i) for i in range(STEPS)]
    native, model = make(task)
    module = TorchModule(model).train()
    expected = torch_losses(native, task, batches)
    found = torch_losses(module, task, batches)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    theirs, ours = native.state_dict(), module.state_dict()
    assert list(ours) == list(theirs)
    for key, tensor in theirs.items():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(ours[key], tensor, rtol=1e-3, atol=1e-4, msg=key)

    # Weights go both ways, and back into the model.
    fresh = task.network()
    fresh.load_state_dict(ours)
    other = TorchModule(model)
    other.load_state_dict(theirs)
    inputs = tuple(map(torch.from_numpy, batches[0][:-1]))
    with torch.no_grad():
        torch.testing.assert_close(fresh.eval()(*inputs), module.eval()(*inputs), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(other(*inputs), native.eval()(*inputs), rtol=1e-3, atol=1e-4)
        again = TorchModule(module.to_model())
        assert torch.equal(again(*inputs), module(*inputs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # the compiler's own
@pytest.mark.parametrize("name", TASKS)
def test_torch_compile_sees_one_graph(name: str) -> None:
    task = TASKS[name]
    inputs = tuple(map(torch.from_numpy, task.batch(0)[:-1]))
    module = TorchModule(make(task)[1])
    expected = module(*inputs)
    torch.compiler.reset()
    # With its gradient. Recurrent layers keep PyTorch's own kernels, between two graphs, as PyTorch's modules do.
    recurrent = any(node.op_type in ("LSTM", "GRU", "RNN") for node in module.source.ir.graph)
    found = torch.compile(module, backend="aot_eager", fullgraph=not recurrent)(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


INPUT = np.random.default_rng(0).standard_normal((5, 2, 6, 6), np.float32)
Small = tuple[torch.nn.Module, Model]


@pytest.fixture(scope="module")
def small() -> Small:
    torch.manual_seed(0)
    layers = torch.nn
    native = layers.Sequential(
        layers.Conv2d(2, 4, 3), layers.BatchNorm2d(4), layers.Dropout(0.3), layers.Flatten(), layers.Linear(64, 3)
    )
    return native, Model.from_torch(native, torch.zeros(1, 2, 6, 6))


def saved(module: TorchModule) -> TorchModule:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved],
    ids=["deepcopy", "pickle", "save"],
)
def test_copies(copied: Callable[[TorchModule], TorchModule], small: Small) -> None:
    module = TorchModule(small[1]).train()
    x = torch.from_numpy(INPUT)
    module(x).sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * parameter.grad
    result = copied(module)
    assert isinstance(result, TorchModule)
    assert result.training
    assert torch.equal(result.eval()(x), module.eval()(x))
    # A copy's weights are its own.
    with torch.no_grad():
        next(result.parameters()).zero_()
    assert not torch.equal(result(x), module(x))
    assert result.to_model().parameter_names == module.to_model().parameter_names


def test_double_precision(small: Small) -> None:
    native, model = copy.deepcopy(small[0]).eval().double(), small[1]
    module = TorchModule(model).to(torch.float64)
    x = torch.from_numpy(INPUT).double()
    torch.testing.assert_close(module(x), native(x), rtol=1e-12, atol=1e-12)


def test_dropout_draws_as_pytorchs(small: Small) -> None:
    native, module = small[0].train(), TorchModule(small[1]).train()
    x = torch.from_numpy(INPUT)
    torch.manual_seed(3)
    expected = native(x)
    torch.manual_seed(3)
    torch.testing.assert_close(module(x), expected)
    assert not torch.allclose(module(x), expected)
