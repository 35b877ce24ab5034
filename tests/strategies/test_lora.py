"""Low-rank adapters in three rounds, against the paper's steps written in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from archipel.bundle import Bundle
from tests.support.simulation import (
    Tensors,
    assert_answers,
    assert_same,
    averaged_rounds,
    batches,
    clients,
    convolutional,
    simulate,
    stepped,
    tensors,
)

Make = Callable[..., Bundle]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("full", [(), ("head.bias",)])
def test_lora_on_a_gemm_and_a_conv(make: Make, full: tuple[str, ...]) -> None:
    """Hu et al. 2022, section 4.1: W + alpha / r B A, W fixed. A and B are averaged each on its own."""
    options = {"rank": 2, "alpha": 3.0, "targets": ["conv.weight", "head.weight"], "full": full}
    bundle = make("lora", convolutional, (2, 4, 4), strategy_options=options)
    data = clients((2, 4, 4))
    module = convolutional()
    fixed = tensors(module)
    p = {name: torch.tensor(value).double() for name, value in bundle.parameters().items()}
    assert {name: tuple(value.shape) for name, value in p.items() if "lora" in name} == {
        "conv.weight.lora_a": (2, 9), "conv.weight.lora_b": (4, 2),
        "head.weight.lora_a": (2, 64), "head.weight.lora_b": (3, 2),
    }  # fmt: skip
    assert all(not p[f"{name}.lora_b"].any() and p[f"{name}.lora_a"].any() for name in ("conv.weight", "head.weight"))

    def merged(at: Tensors) -> Tensors:
        result = {**fixed, **{name: at[name] for name in full}}
        for name in ("conv.weight", "head.weight"):
            change = at[f"{name}.lora_b"] @ at[f"{name}.lora_a"]
            result[name] = fixed[name] + 3.0 / 2 * change.reshape(fixed[name].shape)
        return result

    def adapter_gradients(at: Tensors, x: np.ndarray, y: np.ndarray) -> Tensors:
        leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
        logits = torch.func.functional_call(module.double(), merged(leaves), (torch.tensor(x).double(),))
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(y))
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def local(number: int, client: int, p: Tensors) -> Tensors:
        x, y = data[client]
        for rows in batches(len(x), number, client):
            p = stepped(p, adapter_gradients(p, x[rows], y[rows]))
        return p

    task = simulate(bundle, data)
    p = averaged_rounds(p, local)
    assert_same(task.parameters, p)
    device, x = task.devices[0], data[0][0]
    device.set_parameters(task.parameters)
    assert_answers(device, x, module, merged(p))
