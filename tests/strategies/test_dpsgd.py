"""DP-SGD in three rounds, against the paper's steps written in PyTorch, and how large its noise is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from archipel.bundle import Bundle
from archipel.bundle.roles import Noise
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.noise import DiscreteGaussian
from archipel.training import optimizers
from tests.support.simulation import (
    Tensors,
    assert_same,
    averaged_rounds,
    batches,
    clients,
    dense,
    gradients,
    simulate,
    stepped,
    tensors,
)

Make = Callable[..., Bundle]


def private_rounds(bundle: Bundle, clip: float, noise: float) -> Tensors:
    """Abadi et al. 2016, algorithm 1, on each client, averaged.

    The noise is what a second exact sampler makes of the same bytes: of each parameter's own stream, anew in each step.
    """
    module = dense()
    ports = [port for port in bundle.program("train").inputs if isinstance(port, Noise)]

    def local(number: int, client: int, end: Tensors) -> Tensors:
        x, y = clients()[client]
        source = np.random.default_rng([number, client])
        samplers = [(port, DiscreteGaussian(port.scale, source.bytes)) for port in ports]
        for rows in batches(len(x), number, client):
            total = {name: torch.zeros_like(value) for name, value in end.items()}
            for row in rows:
                g = gradients(module, end, x[row : row + 1], y[row : row + 1])
                norm = torch.sqrt(sum((value**2).sum() for value in g.values()))
                total = {name: total[name] + g[name] / max(1.0, float(norm) / clip) for name in g}
            for port, sampler in samplers:
                drawn = sampler.sample(int(np.prod(port.shape))).reshape(port.shape) / port.scale
                name = port.name.removesuffix(".noise")
                total[name] = total[name] + torch.tensor(drawn) * noise * clip
            end = stepped(end, {name: total[name] / len(rows) for name in total})
        return end

    return averaged_rounds(tensors(module), local)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("noise", [0.0, 1.5])
def test_dpsgd(make: Make, noise: float) -> None:
    bundle = make("dpsgd", strategy_options={"example_clip": 0.5, "noise_multiplier": noise})
    ports = [port for port in bundle.program("train").inputs if isinstance(port, Noise)]
    assert {port.name for port in ports} == ({f"{name}.noise" for name in tensors(dense())} if noise else set())
    randomness = lambda number, client: np.random.default_rng([number, client]).bytes  # noqa: E731
    task = simulate(bundle, clients(), randomness=randomness)
    # The grid of the noise is noise * clip / 2^16, to which sums are rounded.
    assert_same(task.parameters, private_rounds(bundle, 0.5, noise), atol=1e-4 if noise else 1e-6)


@pytest.mark.sampled(every=3)
def test_dpsgd_noise_is_as_large_as_it_says(make: Make) -> None:
    """With gradients of almost nothing (a rate of 1 and one step), what is left is the noise over the batch's size."""
    bundle = make(
        "dpsgd", optimizer=optimizers.sgd(lr=1.0), epochs=1, batch_size=64,
        strategy_options={"example_clip": 1e-3, "noise_multiplier": 100.0},
    )  # fmt: skip
    device, (x, y) = Runtime(bundle), clients()[3]
    start = bundle.parameters()
    ends = [device.local_round(x, y, seed=0).parameters for _ in range(20)]
    found = np.concatenate([(end[name] - start[name]).ravel() * len(x) for end in ends for name in start])
    # 20 rounds of 53 elements: the standard error of the deviation is 0.1 / sqrt(2 * 1060) = 2.2 %.
    assert found.std() == pytest.approx(0.1, rel=0.1)
    assert abs(found.mean()) < 4 * 0.1 / np.sqrt(found.size)
