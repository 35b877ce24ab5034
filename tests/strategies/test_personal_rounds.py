"""Three rounds of algorithms that make or keep a device's own model, against the paper's steps written in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from archipel.bundle import Bundle
from tests.support.simulation import (
    EPOCHS,
    LR,
    SIZES,
    Tensors,
    assert_answers,
    assert_same,
    averaged,
    averaged_rounds,
    batches,
    clients,
    dense,
    descended,
    gradients,
    normalized,
    simulate,
    stepped,
    tensors,
)

Make = Callable[..., Bundle]


def divided(module: nn.Module, personal: str) -> tuple[Tensors, list[Tensors]]:
    """The tensors that are shared, and for each client those whose names begin with `personal`."""
    first = tensors(module)
    shared = {name: value for name, value in first.items() if not name.startswith(personal)}
    return shared, [{name: value for name, value in first.items() if name not in shared} for _ in SIZES]


def paired(module: nn.Module, w: Tensors, number: int, client: int, alpha: float, epochs: int = EPOCHS) -> Tensors:
    """w - lr grad(w - alpha grad(w, D), D') for each pair of batches; one that is left over does nothing."""
    x, y = clients()[client]
    drawn = list(batches(len(x), number, client, epochs=epochs))
    for first, second in zip(drawn[::2], drawn[1::2]):
        tried = stepped(w, gradients(module, w, x[first], y[first]), alpha)
        w = stepped(w, gradients(module, tried, x[second], y[second]))
    return w


@pytest.mark.sampled(every=3)
def test_perfedavg(make: Make) -> None:
    """Fallah et al. 2020, algorithm 1 without the Hessian."""
    alpha = 0.1
    task = simulate(make("perfedavg", strategy_options={"inner_lr": alpha}), clients())
    module = dense()
    w = averaged_rounds(tensors(module), lambda number, client, w: paired(module, w, number, client, alpha))
    assert_same(task.parameters, w)


@pytest.mark.sampled(every=3)
def test_a_step_of_perfedavg_without_its_second_one_does_not_count(make: Make) -> None:
    """With one epoch there are 2, 3, 4 and 5 steps, and so 1, 1, 2 and 2 pairs."""
    task = simulate(make("perfedavg", epochs=1, strategy_options={"inner_lr": 0.1}), clients(), rounds=1)
    module = dense()
    w = tensors(module)
    ends = [paired(module, w, 0, client, 0.1, epochs=1) for client in range(len(SIZES))]
    assert_same(task.parameters, averaged(w, ends))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("inner", [1, 3])
def test_pfedme(make: Make, inner: int) -> None:
    """T Dinh et al. 2020, algorithm 1, with a proximal step on theta for each batch, and theta kept between rounds."""
    strength, rate = 5.0, 0.1
    options = {"strength": strength, "local_lr": rate, "inner_steps": inner}
    task = simulate(make("pfedme", strategy_options=options), clients())
    module = dense()
    own = [tensors(module) for _ in SIZES]

    def local(number: int, client: int, w: Tensors) -> Tensors:
        theta, model, (x, y) = own[client], w, clients()[client]
        for step, rows in enumerate(batches(len(x), number, client)):
            g = gradients(module, theta, x[rows], y[rows])
            # The minimum of <g, v> + lambda / 2 |v - model|^2 + |v - theta|^2 / (2 lr), by its derivative of 0.
            theta = {n: (theta[n] / LR - g[n] + strength * model[n]) / (1 / LR + strength) for n in w}
            if step % inner == inner - 1:
                model = {n: model[n] - rate * strength * (model[n] - theta[n]) for n in w}
        own[client] = theta
        return model

    assert_same(task.parameters, averaged_rounds(tensors(module), local))
    for device, theta, (x, _) in zip(task.devices, own, clients(), strict=True):
        assert_same(device.state.personal, {f"own/{name}": value for name, value in theta.items()})
        assert_answers(device, x, module, theta)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("features", [None, "tanh"])
def test_moon(make: Make, features: str | None) -> None:
    """Li et al. 2021, equations 3 and 4; the features are what the head reads. The first previous model is w_0."""
    mu, temperature = 2.0, 0.5
    options = {"features": features, "strength": mu, "temperature": temperature}
    task = simulate(make("moon", strategy_options=options), clients())
    first = tensors(dense())
    previous = [first for _ in SIZES]

    def encode(at: Tensors, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ at["body.weight"].T + at["body.bias"])

    def local(number: int, client: int, w: Tensors) -> Tensors:
        end, (x, y) = w, clients()[client]
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
        return end

    assert_same(task.parameters, averaged_rounds(first, local))
    for device, end in zip(task.devices, previous, strict=True):
        assert_same(device.state.state, {f"previous/{name}": value for name, value in end.items()})


def test_fedper(make: Make) -> None:
    """Arivazhagan et al. 2019: head and body take each step together, and the head stays."""
    task = simulate(make("fedper", strategy_options={"personal": "head.*"}), clients())
    module = dense()
    body, heads = divided(module, "head")

    def local(number: int, client: int, body: Tensors) -> Tensors:
        end = descended(module, {**body, **heads[client]}, number, client)
        heads[client] = {name: end[name] for name in heads[client]}
        return {name: end[name] for name in body}

    assert_same(task.parameters, averaged_rounds(body, local))
    for device, head in zip(task.devices, heads, strict=True):
        assert_same(device.state.personal, head)


@pytest.mark.sampled(every=3)
def test_fedrep(make: Make) -> None:
    """Collins et al. 2021, algorithm 1: head epochs on the received body, then an epoch of the body with that head."""
    task = simulate(make("fedrep", strategy_options={"personal": "head.*", "personal_epochs": 3}), clients())
    module = dense()
    body, heads = divided(module, "head")

    def local(number: int, client: int, body: Tensors) -> Tensors:
        heads[client] = descended(module, heads[client], number, client, fixed=body, epochs=3)
        return descended(module, body, number, client, fixed=heads[client], phase=1)

    assert_same(task.parameters, averaged_rounds(body, local))
    for device, head in zip(task.devices, heads, strict=True):
        assert_same(device.state.personal, head)


@pytest.mark.sampled(every=3)
def test_fedbn(make: Make) -> None:
    """Li et al. 2021: everything is averaged but the normalization, whose running statistics stay as well."""
    task = simulate(make("fedbn", normalized), clients())
    module = normalized()
    shared, norms = divided(module, "norm")
    buffers = [
        {"norm.running_mean": torch.zeros(5).double(), "norm.running_var": torch.ones(5).double()} for _ in SIZES
    ]

    def local(number: int, client: int, shared: Tensors) -> Tensors:
        end = descended(module, {**shared, **norms[client]}, number, client, buffers=buffers[client])
        norms[client] = {name: end[name] for name in norms[client]}
        return {name: end[name] for name in shared}

    assert_same(task.parameters, averaged_rounds(shared, local))
    for device, norm, buffer in zip(task.devices, norms, buffers, strict=True):
        assert_same(device.state.personal, norm)
        assert_same(device.state.state, buffer)


@pytest.mark.sampled(every=3)
def test_ditto(make: Make) -> None:
    """Li et al. 2021, algorithm 1: beside federated averaging, v_k - lr (grad F_k(v_k) + lambda (v_k - w_t))."""
    strength = 0.6
    task = simulate(make("ditto", strategy_options={"strength": strength, "personal_epochs": 1}), clients())
    module = dense()
    own = [tensors(module) for _ in SIZES]

    def local(number: int, client: int, w: Tensors) -> Tensors:
        def change(g: Tensors, v: Tensors) -> Tensors:
            return {name: g[name] + strength * (v[name] - w[name]) for name in v}

        own[client] = descended(module, own[client], number, client, change, epochs=1, phase=1)
        return descended(module, w, number, client)

    assert_same(task.parameters, averaged_rounds(tensors(module), local))
    for device, v, (x, _) in zip(task.devices, own, clients(), strict=True):
        assert_same(device.state.personal, {f"own/{name}": value for name, value in v.items()})
        # The device answers with its own model, not with the global one.
        assert_answers(device, x, module, v)
