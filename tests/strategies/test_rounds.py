"""Three rounds of four clients, against the paper's own steps written in PyTorch: models that all devices share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from archipel.bundle import Bundle
from archipel.training import optimizers
from tests.support.simulation import (
    LR,
    ROUNDS,
    SIZES,
    Tensors,
    assert_same,
    averaged,
    averaged_rounds,
    batches,
    clients,
    dense,
    descended,
    gradients,
    simulate,
    stepped,
    tensors,
)

Make = Callable[..., Bundle]


@pytest.mark.sampled(every=3)
def test_fedavg(make: Make) -> None:
    task = simulate(make("fedavg"), clients())
    module = dense()
    w = averaged_rounds(tensors(module), lambda number, client, w: descended(module, w, number, client))
    assert_same(task.parameters, w)


@pytest.mark.sampled(every=3)
def test_fedprox(make: Make) -> None:
    """Li et al. 2020, algorithm 2: the minimum of F_k(w) + mu / 2 |w - w_t|^2, approached by SGD."""
    mu = 0.7
    task = simulate(make("fedprox", strategy_options={"mu": mu}), clients())
    module = dense()

    def local(number: int, client: int, w: Tensors) -> Tensors:
        return descended(
            module, w, number, client, lambda g, at: {name: g[name] + mu * (at[name] - w[name]) for name in w}
        )

    assert_same(task.parameters, averaged_rounds(tensors(module), local))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_scaffold(make: Make, momentum: float) -> None:
    """Karimireddy et al. 2020, algorithm 1, option II, with all clients in every round and a global rate of 1.

    With momentum the change is divided by the sum of the weights with which the gradients are in it, term by term.
    """
    optimizer = optimizers.sgd(momentum=momentum, lr=LR)
    task = simulate(make("scaffold", optimizer=optimizer, strategy_options={"control_clip": 1000.0}), clients())
    module = dense()
    x_ = tensors(module)
    c = {name: torch.zeros_like(value) for name, value in x_.items()}
    own = [dict(c) for _ in SIZES]
    for number in ROUNDS:
        moves, changes = [], []
        for i, (x, y) in enumerate(clients()):
            y_i, steps = x_, 0
            velocity = {name: torch.zeros_like(value) for name, value in x_.items()}
            for rows in batches(len(x), number, i):
                g = gradients(module, y_i, x[rows], y[rows])
                velocity = {name: momentum * velocity[name] + g[name] - own[i][name] + c[name] for name in g}
                y_i = stepped(y_i, velocity)
                steps += 1
            weights = sum(momentum**j for k in range(steps) for j in range(steps - k))
            new = {name: own[i][name] - c[name] + (x_[name] - y_i[name]) / (weights * LR) for name in c}
            moves.append({name: y_i[name] - x_[name] for name in c})
            changes.append({name: new[name] - own[i][name] for name in c})
            own[i] = new
        x_ = {name: x_[name] + sum(move[name] for move in moves) / 4 for name in c}
        c = {name: c[name] + sum(change[name] for change in changes) / 4 for name in c}
    assert_same(task.parameters, x_)
    assert_same(task.server_state, {f"control/{name}": value for name, value in c.items()})
    for i, device in enumerate(task.devices):
        assert_same(device.state.state, {f"own_control/{name}": value for name, value in own[i].items()})


@pytest.mark.sampled(every=3)
def test_feddyn(make: Make) -> None:
    """Acar et al. 2021, algorithm 1, all devices in each round: each solves for L - <g, w> + alpha / 2 |w - w_t|^2."""
    alpha = 0.3
    task = simulate(make("feddyn", strategy_options={"alpha": alpha}), clients())
    module = dense()
    w = tensors(module)
    h = {name: torch.zeros_like(value) for name, value in w.items()}
    own = [dict(h) for _ in SIZES]
    for number in ROUNDS:
        ends = []
        for i in range(len(SIZES)):

            def change(g: Tensors, at: Tensors, i: int = i, w: Tensors = w) -> Tensors:
                return {name: g[name] - own[i][name] + alpha * (at[name] - w[name]) for name in w}

            ends.append(descended(module, w, number, i, change))
            own[i] = {name: own[i][name] - alpha * (ends[i][name] - w[name]) for name in w}
        h = {name: h[name] - alpha * sum(end[name] - w[name] for end in ends) / 4 for name in w}
        w = {name: sum(end[name] for end in ends) / 4 - h[name] / alpha for name in w}
    assert_same(task.parameters, w)
    for device, g in zip(task.devices, own, strict=True):
        assert_same(device.state.state, {f"own_gradient/{name}": value for name, value in g.items()})


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedsgd(make: Make, momentum: float) -> None:
    """McMahan et al. 2017: w - lr sum n_k / n grad F_k(w), which is gradient descent on all examples together.

    With momentum, Karimireddy et al. 2021, algorithm 2: the mean is of each device's (1 - b) sum b^j gradient.
    """
    options = {"momentum": momentum} if momentum else {}
    task = simulate(make("fedsgd", batch_size=max(SIZES), strategy_options=options), clients())
    module = dense()
    w = tensors(module)
    own = [{name: torch.zeros_like(value) for name, value in w.items()} for _ in SIZES]
    for _ in ROUNDS:
        for m, (x, y) in zip(own, clients(), strict=True):
            g = gradients(module, w, x, y)
            m.update({name: momentum * m[name] + (1 - momentum) * g[name] for name in g})
        w = averaged(w, [stepped(w, m) for m in own])
    assert_same(task.parameters, w)
    for device, m in zip(task.devices, own, strict=True):
        expected = {f"momentum/{name}": -LR * value for name, value in m.items()} if momentum else {}
        assert_same(device.state.state, expected)


@pytest.mark.sampled(every=3)
def test_reptile(make: Make) -> None:
    """Nichol et al. 2018, algorithm 2: phi + eps / n sum (W_i - phi), here with an outer rate of 0.3."""
    task = simulate(make("reptile"), clients(), server={"server_lr": 0.3})
    module = dense()
    w = tensors(module)
    for number in ROUNDS:
        ends = [descended(module, w, number, client) for client in range(len(SIZES))]
        w = {name: w[name] + 0.3 * sum(end[name] - w[name] for end in ends) / 4 for name in w}
    assert_same(task.parameters, w)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_fednova(make: Make, momentum: float) -> None:
    """Wang et al. 2020, section 4: x - lr tau_eff sum p_i d_i, d_i = G_i a_i / |a_i|_1, tau_eff = sum p_i |a_i|_1."""
    task = simulate(make("fednova", optimizer=optimizers.sgd(momentum=momentum, lr=LR)), clients())
    module = dense()
    w = tensors(module)
    shares = [size / sum(SIZES) for size in SIZES]
    for number in ROUNDS:
        directions, lengths = [], []
        for client, (x, y) in enumerate(clients()):
            end, found = w, []
            velocity = {name: torch.zeros_like(value) for name, value in w.items()}
            for rows in batches(len(x), number, client):
                g = gradients(module, end, x[rows], y[rows])
                found.append(g)
                velocity = {name: momentum * velocity[name] + g[name] for name in g}
                end = stepped(end, velocity)
            # a_i: with how much weight each step's gradient is in the whole change, term by term.
            a = [sum(momentum**j for j in range(len(found) - k)) for k in range(len(found))]
            lengths.append(sum(a))
            directions.append({name: sum(a_k * g[name] for a_k, g in zip(a, found)) / sum(a) for name in w})
        effective = sum(p * length for p, length in zip(shares, lengths))
        w = {n: w[n] - effective * LR * sum(p * d[n] for p, d in zip(shares, directions)) for n in w}
    assert_same(task.parameters, w)
