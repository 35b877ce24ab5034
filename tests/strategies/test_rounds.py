"""Three rounds of four clients with each algorithm, against the paper's own steps written in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from archipel.bundle import Bundle
from archipel.bundle.roles import Noise
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.noise import DiscreteGaussian
from archipel.training import optimizers
from tests.support.simulation import (
    LR,
    SIZES,
    Tensors,
    assert_same,
    averaged,
    batches,
    clients,
    convolutional,
    dense,
    gradients,
    normalized,
    simulate,
    tensors,
)

Make = Callable[..., Bundle]
ROUNDS = range(3)


def stepped(at: Tensors, gradient: Tensors, rate: float = LR) -> Tensors:
    return {name: value - rate * gradient[name] for name, value in at.items()}


def test_fedavg(make: Make) -> None:
    task = simulate(make("fedavg"), clients())
    module = dense()
    w = tensors(module)
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            end = w
            for rows in batches(len(x), number, client):
                end = stepped(end, gradients(module, end, x[rows], y[rows]))
            ends.append(end)
        w = averaged(w, ends)
    assert_same(task.parameters, w)


def test_fedprox(make: Make) -> None:
    """Li et al. 2020, algorithm 2: the minimum of F_k(w) + mu / 2 |w - w_t|^2, approached by SGD."""
    mu = 0.7
    task = simulate(make("fedprox", strategy_options={"mu": mu}), clients())
    module = dense()
    w = tensors(module)
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            end = w
            for rows in batches(len(x), number, client):
                g = gradients(module, end, x[rows], y[rows])
                end = stepped(end, {name: g[name] + mu * (end[name] - w[name]) for name in w})
            ends.append(end)
        w = averaged(w, ends)
    assert_same(task.parameters, w)


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
        for i, (x, y) in enumerate(clients()):
            end = w
            for rows in batches(len(x), number, i):
                g = gradients(module, end, x[rows], y[rows])
                end = stepped(end, {name: g[name] - own[i][name] + alpha * (end[name] - w[name]) for name in w})
            own[i] = {name: own[i][name] - alpha * (end[name] - w[name]) for name in w}
            ends.append(end)
        h = {name: h[name] - alpha * sum(end[name] - w[name] for end in ends) / 4 for name in w}
        w = {name: sum(end[name] for end in ends) / 4 - h[name] / alpha for name in w}
    assert_same(task.parameters, w)
    for device, g in zip(task.devices, own, strict=True):
        assert_same(device.state.state, {f"own_gradient/{name}": value for name, value in g.items()})


def test_fedsgd(make: Make) -> None:
    """McMahan et al. 2017: w - lr sum n_k / n grad F_k(w), which is gradient descent on all examples together."""
    task = simulate(make("fedsgd", batch_size=max(SIZES)), clients())
    module = dense()
    w = tensors(module)
    x, y = (np.concatenate(each) for each in zip(*clients(), strict=True))
    for _ in ROUNDS:
        w = stepped(w, gradients(module, w, x, y))
    assert_same(task.parameters, w)


def test_reptile(make: Make) -> None:
    """Nichol et al. 2018, algorithm 2: phi + eps / n sum (W_i - phi), here with an outer rate of 0.3."""
    task = simulate(make("reptile"), clients(), server={"server_lr": 0.3})
    module = dense()
    w = tensors(module)
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            end = w
            for rows in batches(len(x), number, client):
                end = stepped(end, gradients(module, end, x[rows], y[rows]))
            ends.append(end)
        w = {name: w[name] + 0.3 * sum(end[name] - w[name] for end in ends) / 4 for name in w}
    assert_same(task.parameters, w)


def test_fedper(make: Make) -> None:
    """Arivazhagan et al. 2019: head and body take each step together, and the head stays."""
    task = simulate(make("fedper", strategy_options={"personal": "head.*"}), clients())
    module = dense()
    first = tensors(module)
    body = {name: value for name, value in first.items() if name.startswith("body")}
    heads = [{name: value for name, value in first.items() if name.startswith("head")} for _ in SIZES]
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            end = {**body, **heads[client]}
            for rows in batches(len(x), number, client):
                end = stepped(end, gradients(module, end, x[rows], y[rows]))
            heads[client] = {name: end[name] for name in heads[client]}
            ends.append({name: end[name] for name in body})
        body = averaged(body, ends)
    assert_same(task.parameters, body)
    for device, head in zip(task.devices, heads, strict=True):
        assert_same(device.state.personal, head)


def test_perfedavg(make: Make) -> None:
    """Fallah et al. 2020, algorithm 1 without the Hessian: w - lr grad(w - alpha grad(w, D), D')."""
    alpha = 0.1
    task = simulate(make("perfedavg", strategy_options={"inner_lr": alpha}), clients())
    module = dense()
    w = tensors(module)
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            end, drawn = w, list(batches(len(x), number, client))
            for first, second in zip(drawn[::2], drawn[1::2]):
                tried = stepped(end, gradients(module, end, x[first], y[first]), alpha)
                end = stepped(end, gradients(module, tried, x[second], y[second]))
            ends.append(end)
        w = averaged(w, ends)
    assert_same(task.parameters, w)


def test_a_step_of_perfedavg_without_its_second_one_does_not_count(make: Make) -> None:
    """With one epoch there are 2, 3, 4 and 5 steps, and so 1, 1, 2 and 2 pairs."""
    task = simulate(make("perfedavg", epochs=1, strategy_options={"inner_lr": 0.1}), clients(), rounds=1)
    module = dense()
    w = tensors(module)
    ends = []
    for client, (x, y) in enumerate(clients()):
        end, drawn = w, list(batches(len(x), 0, client, epochs=1))
        for pair in range(len(drawn) // 2):
            first, second = drawn[2 * pair], drawn[2 * pair + 1]
            tried = stepped(end, gradients(module, end, x[first], y[first]), 0.1)
            end = stepped(end, gradients(module, tried, x[second], y[second]))
        ends.append(end)
    assert_same(task.parameters, averaged(w, ends))


@pytest.mark.parametrize("inner", [1, 3])
def test_pfedme(make: Make, inner: int) -> None:
    """T Dinh et al. 2020, algorithm 1, with a proximal step on theta for each batch, and theta kept between rounds."""
    strength, rate = 5.0, 0.1
    options = {"strength": strength, "local_lr": rate, "inner_steps": inner}
    task = simulate(make("pfedme", strategy_options=options), clients())
    module = dense()
    w = tensors(module)
    own = [w for _ in SIZES]
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            theta, local = own[client], w
            for step, rows in enumerate(batches(len(x), number, client)):
                g = gradients(module, theta, x[rows], y[rows])
                # The minimum of <g, v> + lambda / 2 |v - local|^2 + |v - theta|^2 / (2 lr), by its derivative of 0.
                theta = {n: (theta[n] / LR - g[n] + strength * local[n]) / (1 / LR + strength) for n in w}
                if step % inner == inner - 1:
                    local = {n: local[n] - rate * strength * (local[n] - theta[n]) for n in w}
            own[client] = theta
            ends.append(local)
        w = averaged(w, ends)
    assert_same(task.parameters, w)
    for device, theta, (x, _) in zip(task.devices, own, clients(), strict=True):
        assert_same(device.state.personal, {f"own/{name}": value for name, value in theta.items()})
        expected = torch.func.functional_call(module, theta, (torch.tensor(x).double(),))
        np.testing.assert_allclose(device.predict(x), expected.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("features", [None, "tanh"])
def test_moon(make: Make, features: str | None) -> None:
    """Li et al. 2021, equations 3 and 4; the features are what the head reads. The first previous model is w_0."""
    mu, temperature = 2.0, 0.5
    options = {"features": features, "strength": mu, "temperature": temperature}
    task = simulate(make("moon", strategy_options=options), clients())
    module = dense()
    w = tensors(module)
    previous = [w for _ in SIZES]

    def encode(at: Tensors, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ at["body.weight"].T + at["body.bias"])

    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            end = w
            for rows in batches(len(x), number, client):
                leaves = {name: value.clone().requires_grad_() for name, value in end.items()}
                inputs, labels = torch.tensor(x[rows]).double(), torch.tensor(y[rows])
                z = encode(leaves, inputs)
                alike = [nn.functional.cosine_similarity(z, encode(at, inputs)) for at in (w, previous[client])]
                pair = torch.stack(alike, 1) / temperature
                con = nn.functional.cross_entropy(pair, torch.zeros(len(rows), dtype=torch.int64))
                logits = z @ leaves["head.weight"].T + leaves["head.bias"]
                loss = nn.functional.cross_entropy(logits, labels) + mu * con
                found = torch.autograd.grad(loss, list(leaves.values()))
                end = stepped(end, dict(zip(leaves, found, strict=True)))
            previous[client] = end
            ends.append(end)
        w = averaged(w, ends)
    assert_same(task.parameters, w)
    for device, end in zip(task.devices, previous, strict=True):
        assert_same(device.state.state, {f"previous/{name}": value for name, value in end.items()})


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


def test_fedrep(make: Make) -> None:
    """Collins et al. 2021, algorithm 1: head epochs on the received body, then an epoch of the body with that head."""
    task = simulate(make("fedrep", strategy_options={"personal": "head.*", "personal_epochs": 3}), clients())
    module = dense()
    first = tensors(module)
    body = {name: value for name, value in first.items() if name.startswith("body")}
    heads = [{name: value for name, value in first.items() if name.startswith("head")} for _ in SIZES]
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            head, end = heads[client], body
            for rows in batches(len(x), number, client, epochs=3, phase=0):
                head = stepped(head, gradients(module, {**body, **head}, x[rows], y[rows]))
            for rows in batches(len(x), number, client, phase=1):
                end = stepped(end, gradients(module, {**end, **head}, x[rows], y[rows]))
            heads[client] = head
            ends.append(end)
        body = averaged(body, ends)
    assert_same(task.parameters, body)
    for device, head in zip(task.devices, heads, strict=True):
        assert_same(device.state.personal, head)


def test_fedbn(make: Make) -> None:
    """Li et al. 2021: everything is averaged but the normalization, whose running statistics stay as well."""
    task = simulate(make("fedbn", normalized), clients())
    module = normalized()
    first = tensors(module)
    shared = {name: value for name, value in first.items() if not name.startswith("norm")}
    norms = [{name: value for name, value in first.items() if name.startswith("norm")} for _ in SIZES]
    buffers = [
        {"norm.running_mean": torch.zeros(5).double(), "norm.running_var": torch.ones(5).double()} for _ in SIZES
    ]
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            end = {**shared, **norms[client]}
            for rows in batches(len(x), number, client):
                end = stepped(end, gradients(module, end, x[rows], y[rows], buffers[client]))
            norms[client] = {name: end[name] for name in norms[client]}
            ends.append({name: end[name] for name in shared})
        shared = averaged(shared, ends)
    assert_same(task.parameters, shared)
    for device, norm, buffer in zip(task.devices, norms, buffers, strict=True):
        assert_same(device.state.personal, norm)
        assert_same(device.state.state, buffer)


def test_ditto(make: Make) -> None:
    """Li et al. 2021, algorithm 1: beside federated averaging, v_k - lr (grad F_k(v_k) + lambda (v_k - w_t))."""
    strength = 0.6
    task = simulate(make("ditto", strategy_options={"strength": strength, "personal_epochs": 1}), clients())
    module = dense()
    w = tensors(module)
    own = [w for _ in SIZES]
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            end, v = w, own[client]
            for rows in batches(len(x), number, client, phase=0):
                end = stepped(end, gradients(module, end, x[rows], y[rows]))
            for rows in batches(len(x), number, client, epochs=1, phase=1):
                g = gradients(module, v, x[rows], y[rows])
                v = stepped(v, {name: g[name] + strength * (v[name] - w[name]) for name in v})
            own[client] = v
            ends.append(end)
        w = averaged(w, ends)
    assert_same(task.parameters, w)
    for device, v, (x, _) in zip(task.devices, own, clients(), strict=True):
        assert_same(device.state.personal, {f"own/{name}": value for name, value in v.items()})
        # The device answers with its own model, not with the global one.
        expected = torch.func.functional_call(module, v, (torch.tensor(x).double(),))
        np.testing.assert_allclose(device.predict(x), expected.detach().numpy(), rtol=1e-4, atol=1e-5)


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

    task = simulate(bundle, data)
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(data):
            end = p
            for rows in batches(len(x), number, client):
                end = stepped(end, adapter_gradients(end, x[rows], y[rows]))
            ends.append(end)
        p = averaged(p, ends)
    assert_same(task.parameters, p)
    device, x = task.devices[0], data[0][0]
    device.set_parameters(task.parameters)
    expected = torch.func.functional_call(module, merged(p), (torch.tensor(x).double(),)).detach().numpy()
    np.testing.assert_allclose(device.predict(x), expected, rtol=1e-4, atol=1e-5)


def private_rounds(bundle: Bundle, clip: float, noise: float) -> Tensors:
    """Abadi et al. 2016, algorithm 1, on each client, averaged.

    The noise is what a second exact sampler makes of the same bytes: of each parameter's own stream, anew in each step.
    """
    module = dense()
    w = tensors(module)
    ports = [port for port in bundle.program("train").inputs if isinstance(port, Noise)]
    for number in ROUNDS:
        ends = []
        for client, (x, y) in enumerate(clients()):
            end = w
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
            ends.append(end)
        w = averaged(w, ends)
    return w


@pytest.mark.parametrize("noise", [0.0, 1.5])
def test_dpsgd(make: Make, noise: float) -> None:
    bundle = make("dpsgd", strategy_options={"example_clip": 0.5, "noise_multiplier": noise})
    ports = [port for port in bundle.program("train").inputs if isinstance(port, Noise)]
    assert {port.name for port in ports} == ({f"{name}.noise" for name in tensors(dense())} if noise else set())
    randomness = lambda number, client: np.random.default_rng([number, client]).bytes  # noqa: E731
    task = simulate(bundle, clients(), randomness=randomness)
    # The grid of the noise is noise * clip / 2^16, to which sums are rounded.
    assert_same(task.parameters, private_rounds(bundle, 0.5, noise), atol=1e-4 if noise else 1e-6)


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
