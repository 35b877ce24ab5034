"""Optimizers on the server: three rounds as the papers have them, and how far a step of each can go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel import strategies
from archipel.bundle import Bundle
from archipel.errors import PolicyError
from archipel.protocol.vector import DecodedSum
from tests.strategies.test_rounds import stepped
from tests.support.simulation import Tensors, assert_same, averaged, batches, clients, dense, gradients
from tests.support.simulation import simulate as simulate_rounds

Make = Callable[..., Bundle]
ADAPTIVE = ["fedadam", "fedyogi", "fedadagrad"]


def mean_delta(w: Tensors, number: int) -> Tensors:
    """The weighted mean of what the clients' SGD changes in a round that begins at w."""
    module, ends = dense(), []
    for client, (x, y) in enumerate(clients()):
        end = w
        for rows in batches(len(x), number, client):
            end = stepped(end, gradients(module, end, x[rows], y[rows]))
        ends.append(end)
    mean = averaged(w, ends)
    return {name: mean[name] - w[name] for name in w}


def test_fedavgm(make: Make) -> None:
    """Hsu et al. 2019, section 4: v = beta v + the mean change, then w + v, here times a rate: PyTorch's SGD."""
    task = simulate_rounds(make("fedavgm"), clients(), server={"server_lr": 0.7, "beta": 0.8})
    w = tensors_of_start()
    optimizer = torch.optim.SGD(list(w.values()), lr=0.7, momentum=0.8)
    for number in range(3):
        delta = mean_delta(w, number)
        for name, value in w.items():
            value.grad = -delta[name]
        optimizer.step()
    assert_same(task.parameters, w)
    momentum = {f"momentum/{name}": -optimizer.state[value]["momentum_buffer"] for name, value in w.items()}
    assert_same(task.server_state, momentum)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive(make: Make, name: str) -> None:
    """Reddi et al. 2021, algorithm 2, with v_-1 = tau^2."""
    rate, tau, one, two = 0.05, 0.02, 0.8, 0.95
    server = {"server_lr": rate, "tau": tau, "beta1": one, "beta2": two}
    task = simulate_rounds(make(name), clients(), server=server)
    x = tensors_of_start()
    m = {key: torch.zeros_like(value) for key, value in x.items()}
    v = {key: torch.full_like(value, tau**2) for key, value in x.items()}
    for number in range(3):
        delta = mean_delta(x, number)
        for key, d in delta.items():
            m[key] = one * m[key] + (1 - one) * d
            v[key] = {
                "fedadagrad": v[key] + d**2,
                "fedyogi": v[key] - (1 - two) * d**2 * torch.sign(v[key] - d**2),
                "fedadam": two * v[key] + (1 - two) * d**2,
            }[name]
            x[key] = x[key] + rate * m[key] / (torch.sqrt(v[key]) + tau)
    assert_same(task.parameters, x)
    second = {f"second_moment/{key}": value - tau**2 for key, value in v.items()}
    assert_same(task.server_state, {**{f"momentum/{key}": value for key, value in m.items()}, **second})


def tensors_of_start() -> Tensors:
    return {name: value.detach().double().clone() for name, value in dense().named_parameters()}


def test_adam_is_pytorchs_without_its_correction() -> None:
    """With a small tau and no correction, FedAdam is torch.optim.Adam whose corrections are put into rate and eps."""
    rng = np.random.default_rng(0)
    w = torch.tensor(rng.standard_normal(5))
    optimizer = torch.optim.Adam([w], lr=1.0, betas=(0.9, 0.99), eps=0.0)
    found, state = {"w": w.numpy().astype(np.float32)}, strategies.get("fedadam").init({"w": np.zeros(5, np.float32)})
    for step in range(1, 6):
        delta = rng.standard_normal(5)
        w.grad = -torch.tensor(delta)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - 0.9**step) / np.sqrt(1 - 0.99**step)
        optimizer.step()
        found, state = strategies.get("fedadam").update(
            found, state, DecodedSum({"w": delta}, {}, None), 1, {"server_lr": 0.1, "tau": 1e-8}
        )
    np.testing.assert_allclose(found["w"], w.numpy(), rtol=1e-5)


# --- how far a step can go -------------------------------------------------------------------------------------------


def longest(name: str, deltas: list[np.ndarray], given: Mapping[str, float]) -> float:
    """The longest step of a server that gets these mean deltas one after the other, with a rate of 1."""
    strategy = strategies.get(name)
    zero = {"w": np.zeros_like(deltas[0])}
    state, found = strategy.init(zero), 0.0
    for delta in deltas:
        moved, state = strategy.update(zero, state, DecodedSum({"w": delta}, {}, None), 1, {"server_lr": 1.0, **given})
        found = max(found, float(np.linalg.norm(moved["w"])))
    return found


@pytest.fixture(scope="module")
def bound_of(make: Make) -> Callable[[str, Mapping[str, float]], float]:
    """For devices that all weigh 1, with a fine encoding: the mean delta has a norm of 1 at most."""
    options = {"clip": 1.0, "weighting": "uniform", "bits": 24}
    bundles = {name: make(name, strategy_options=options) for name in [*ADAPTIVE, "fedavgm"]}

    def bound(name: str, given: Mapping[str, float]) -> float:
        return strategies.get(name).step_bound(bundles[name].manifest, {"server_lr": 1.0, **given}, 4).parameters

    return bound


SIZE = sum(value.numel() for value in dense().parameters())
betas = st.sampled_from([(0.9, 0.99), (0.0, 0.9), (0.0, 0.0), (0.5, 0.3), (0.9, 0.85), (0.7, 0.9999), (0.99, 0.999)])


@pytest.mark.parametrize("name", ADAPTIVE)
@settings(max_examples=30)
@given(data=st.data())
def test_no_history_goes_beyond_the_bound(
    bound_of: Callable[[str, Mapping[str, float]], float], name: str, data: st.DataObject
) -> None:
    one, two = data.draw(betas)
    tau = data.draw(st.sampled_from([1e-8, 1e-3, 0.1, 1.0]))
    server = {"tau": tau, "beta1": one, **({} if name == "fedadagrad" else {"beta2": two})}
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    size = data.draw(st.sampled_from([1, 7, SIZE]), label="elements that change")
    deltas = []
    for kind in data.draw(st.lists(st.sampled_from(["same", "other", "grows", "shrinks"]), min_size=1, max_size=40)):
        delta = np.zeros(SIZE)
        delta[:size] = rng.standard_normal(size) if kind == "other" or not deltas else deltas[-1][:size]
        delta *= {"same": 1.0, "other": 1.0, "grows": 3.0, "shrinks": 0.2}[kind]
        deltas.append(delta / max(1.0, np.linalg.norm(delta)))
    assert longest(name, deltas, server) <= bound_of(name, server) * (1 + 1e-5)


@pytest.mark.parametrize(
    ("name", "server", "growth", "rounds"),
    [
        ("fedadam", {"tau": 1e-6}, 0.99 / 0.9, 200),  # the growth at which the proof's inequality is an equality
        ("fedadam", {"tau": 1.0}, 1.0, 2000),  # so many that what v began with is forgotten
        ("fedyogi", {"tau": 1e-6}, 1 / 0.9, 200),
        ("fedyogi", {"tau": 1.0}, 1.0, 6000),
        ("fedadagrad", {"tau": 1e-6, "beta1": 0.9}, 1 / 0.9, 200),
        ("fedadagrad", {"tau": 1.0}, 1.0, 1),
        ("fedavgm", {}, 1.0, 1000),
    ],
)
def test_some_history_comes_near_the_bound(
    bound_of: Callable[[str, Mapping[str, float]], float],
    name: str,
    server: Mapping[str, float],
    growth: float,
    rounds: int,
) -> None:
    deltas = [np.full(SIZE, growth ** -(rounds - 1 - k) / np.sqrt(SIZE)) for k in range(rounds)]
    assert longest(name, deltas, server) > 0.92 * bound_of(name, server)


def test_hyperparameters_of_the_server_have_bounds(make: Make) -> None:
    bound = strategies.get("fedadam").step_bound
    manifest = make("fedadam").manifest
    for wrong in ({"tau": 0.0}, {"tau": 2.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"beta2": float("nan")}):
        (name,) = wrong
        with pytest.raises(PolicyError, match=f"^{name}: .* is not from"):
            bound(manifest, wrong, 4)
    with pytest.raises(PolicyError, match=r"beta: 0\.999 is not from 0 to 0\.99"):
        strategies.get("fedavgm").step_bound(make("fedavgm").manifest, {"beta": 0.999}, 4)


def test_a_sum_without_weight_leaves_the_moments() -> None:
    start = {"w": np.ones(3, np.float32)}
    for name in [*ADAPTIVE, "fedavgm"]:
        strategy = strategies.get(name)
        step = partial(strategy.update, start, hyperparameters={}, cohort=2)
        _, state = step(strategy.init(start), DecodedSum({"w": np.ones(3)}, {}, 2.0))
        moved, following = step(state, DecodedSum({"w": np.ones(3)}, {}, 0.0))
        np.testing.assert_array_equal(moved["w"], start["w"])
        assert following is state
