"""The networks of `archipel.models` as graphs on a GPU: they compute what they compute on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from archipel import Model, models
from archipel.training import losses, optimizers, run_steps, step_graph
from archipel.training.cloud import TorchModule

pytestmark = pytest.mark.gpu

NETWORKS: dict[str, tuple[Callable[[int], Any], tuple[int, ...]]] = {
    "mlp": (models.mlp, (784,)),
    "lenet": (models.lenet, (1, 28, 28)),
    "resnet8": (models.resnet8, (3, 32, 32)),
    "ds_cnn": (models.ds_cnn, (1, 49, 10)),
    "mobilenet_v2": (models.mobilenet_v2, (3, 32, 32)),
    "cnn_1d": (models.cnn_1d, (6, 128)),
    "unet": (models.unet, (1, 28, 28)),
}
TEXTS: dict[str, tuple[Callable[[int], Any], int]] = {
    "char_rnn": (models.char_rnn, 20),
    "transformer": (models.transformer, 16),
}


def both(name: str) -> tuple[TorchModule, torch.Tensor]:
    torch.manual_seed(0)
    if name in TEXTS:
        make, time = TEXTS[name]
        x = torch.randint(0, 80, (4, time))
    else:
        make, shape = NETWORKS[name]
        x = torch.randn(4, *shape)
    module = TorchModule(Model.from_torch(make(0), x[:2]))
    # float64: with four examples the gradient through BatchNormalization leaves float32 few digits.
    return module.double(), x if name in TEXTS else x.double()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", [*NETWORKS, *TEXTS])
def test_values_and_gradients_equal_the_cpus(name: str, layout: torch.memory_format) -> None:
    module, x = both(name)
    other = copy.deepcopy(module).cuda()
    for each in (module, other):
        each.train()
    if layout is torch.channels_last:
        other.to(memory_format=layout)
    y, z = module(x), other(x.cuda())
    torch.testing.assert_close(z.cpu(), y, rtol=1e-9, atol=1e-9)
    torch.autograd.backward(y.square().mean())
    torch.autograd.backward(z.square().mean())
    for path, parameter in module.named_parameters():
        found = other.get_parameter(path).grad
        assert found is not None
        scale = float(parameter.grad.abs().max()) + 1e-6
        torch.testing.assert_close(found.cpu() / scale, parameter.grad / scale, rtol=1e-7, atol=1e-7)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["mlp", "resnet8", "transformer"])
def test_compiled(name: str) -> None:
    module, x = both(name)
    module = module.cuda().eval()
    torch.testing.assert_close(torch.compile(module)(x.cuda()), module(x.cuda()), rtol=1e-4, atol=1e-4)


def test_the_step_program_of_a_device_runs_on_the_gpu() -> None:
    model = Model.from_torch(models.mlp(0), torch.zeros(2, 784))
    step = step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.1, momentum=0.9))
    rng = np.random.default_rng(0)
    batches = [{"input": rng.standard_normal((8, 784), np.float32), "label": rng.integers(0, 10, 8)} for _ in range(5)]
    history = run_steps(step, batches)
    module = TorchModule(step).cuda()
    values = {name: torch.from_numpy(np.array(array)).cuda() for name, array in step.initial.items()}
    found = []
    for batch in batches:
        feed: dict[str, Any] = {name: torch.from_numpy(array).cuda() for name, array in batch.items()}
        for info in step.inputs:
            if info.name not in feed:
                feed[info.name] = values.get(info.name, _first(step, info))
        results = module(**feed)
        for info, value in zip(step.outputs, results):
            values[info.name.removesuffix(".next")] = value
        found.append(float(values["loss"]))
    np.testing.assert_allclose(found, history, rtol=1e-4)


def _first(step: Model, info: Any) -> torch.Tensor:
    """What a state or hyperparameter starts with."""
    port = next(port for port in step.program.inputs if port.name == info.name)
    number = getattr(port, "default", 0.0) or 0.0
    return torch.full([size for size in info.shape if isinstance(size, int)], number, device="cuda")
