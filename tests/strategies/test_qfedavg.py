"""q-FedAvg: three rounds as the paper has them, and what decides a device's weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from archipel.bundle import Bundle
from archipel.errors import ConversionError
from archipel.lite_runtime import Runtime
from archipel.strategies import registry
from archipel.strategies.device import describe
from tests.support.simulation import LR, ROUNDS, assert_same, clients, dense, descended, simulate, tensors

Make = Callable[..., Bundle]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("q", [0.0, 0.5, 3.0])
def test_qfedavg(make: Make, q: float) -> None:
    """Li et al. 2020, algorithm 2, with D_k = (w - w_k) / lr:

    w - sum F_k^q D_k / sum (q F_k^(q-1) |D_k|^2 + F_k^q / lr)
    """
    options = {"q": q, "loss_cap": 6.0, "weight_cap": 1 << 20}
    task = simulate(make("qfedavg", strategy_options=options), clients())
    module = dense()
    w = tensors(module)
    for number in ROUNDS:
        numerator, denominator = {name: torch.zeros_like(value) for name, value in w.items()}, 0.0
        for client, (x, y) in enumerate(clients()):
            logits = torch.func.functional_call(module.double(), w, (torch.tensor(x).double(),))
            loss = float(torch.nn.functional.cross_entropy(logits, torch.tensor(y)))
            end = descended(module, w, number, client)
            moved = {name: (w[name] - end[name]) / LR for name in w}
            square = sum(float((value**2).sum()) for value in moved.values())
            numerator = {name: numerator[name] + loss**q * moved[name] for name in w}
            denominator += q * loss ** (q - 1) * square + loss**q / LR
        w = {name: w[name] - numerator[name] / denominator for name in w}
    assert_same(task.parameters, w)


@pytest.mark.sampled(every=3)
def test_a_device_with_a_larger_loss_weighs_more(make: Make) -> None:
    """The same examples, once with labels that the model has learned and once with others; both weights are bounded."""
    bundle = make("qfedavg", strategy_options={"q": 2.0, "weight_cap": 50, "loss_cap": 2.0})
    device, (x, _) = Runtime(bundle), clients()[3]
    right = device.predict(x).argmax(1)
    weights = [float(device.local_round(x, (right + shift) % 3, seed=0).arrays["qfedavg/weight"]) for shift in range(2)]
    assert 1 / 50 <= weights[0] < weights[1] <= 1


def test_options_that_do_not_fit() -> None:
    make = registry.get("qfedavg").device
    with pytest.raises(ConversionError, match="weighting='uniform' lets every device weigh 1"):
        describe("qfedavg", make, {"weighting": "uniform"})
    with pytest.raises(ConversionError, match="weight_cap must be 2 or more"):
        describe("qfedavg", make, {"weight_cap": 1})
