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
from archipel.client.downloads.origins import check_broadcast
from archipel.errors import PolicyError, ProvenanceError
from archipel.lite_runtime import Runtime
from archipel.protocol.provenance import check_distance
from archipel.protocol.vector import DecodedSum, Layout
from tests.support.simulation import SIZES, Tensors, assert_same, averaged, clients, dense, descended
from tests.support.simulation import simulate as simulate_rounds

Make = Callable[..., Bundle]
ADAPTIVE = ["fedadam", "fedyogi", "fedadagrad"]


def mean_delta(w: Tensors, number: int) -> Tensors:
    """The weighted mean of what the clients' SGD changes in a round that begins at w."""
    return averaged(w, client_deltas(w, number))


def client_deltas(w: Tensors, number: int) -> list[Tensors]:
    module = dense()
    ends = [descended(module, w, number, client) for client in range(len(SIZES))]
    return [{name: end[name] - w[name] for name in w} for end in ends]


@pytest.mark.sampled(every=3)
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


@pytest.mark.sampled(every=3)
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


@pytest.mark.sampled(every=3)
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
        step = partial(strategy.apply, start, hyperparameters={}, cohort=2)
        _, state = step(strategy.init(start), DecodedSum({"w": np.ones(3)}, {}, 2.0))
        moved, following = step(state, DecodedSum({"w": np.ones(3)}, {}, 0.0))
        np.testing.assert_array_equal(moved["w"], start["w"])
        assert following is state


# --- extrapolation ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_fedexp(make: Make, weighting: str) -> None:
    """Jhunjhunwala et al. 2023, algorithm 1, with the weighted mean of the squared norms."""
    epsilon, rate = 1e-4, 0.9
    options = {"weighting": weighting, "clip": 100.0}
    task = simulate_rounds(
        make("fedexp", strategy_options=options), clients(), server={"epsilon": epsilon, "server_lr": rate}
    )
    w, factors = tensors_of_start(), []
    weights = SIZES if weighting == "examples" else (1, 1, 1, 1)
    for number in range(3):
        deltas = client_deltas(w, number)
        squares = [sum(float((d**2).sum()) for d in delta.values()) for delta in deltas]
        mean = {name: sum(p * d[name] for p, d in zip(weights, deltas)) / sum(weights) for name in w}
        of_mean = sum(float((d**2).sum()) for d in mean.values())
        factors.append(sum(p * s for p, s in zip(weights, squares)) / sum(weights) / (2 * (of_mean + epsilon)))
        w = {name: w[name] + rate * max(1.0, factors[-1]) * mean[name] for name in w}
    assert max(factors) > 1  # else it would be federated averaging
    assert_same(task.parameters, w)


def test_the_squared_norm_of_a_short_update_survives_rounding(make: Make) -> None:
    """With a clip so far above that 16 bits round the squares to 0."""
    bundle = make("fedexp", strategy_options={"clip": 300.0, "bits": 16})
    layout, device = Layout.of(bundle.program("finish")), Runtime(bundle)
    sums, expected, start = np.zeros(layout.length, np.uint32), 0.0, bundle.parameters()
    for client, (x, y) in enumerate(clients()):
        update = device.local_round(x, y, seed=client, parameters=start)
        sums += layout.encode(update.arrays, modulus_bits=32, max_cohort=4)
        square = sum(float(np.square(update.parameters[name] - start[name]).sum()) for name in start)
        expected += min(len(x), 40) / 40 * square
    total = layout.decode_sum(sums, cohort=4, modulus_bits=32)
    layout.check_sum(total, 4)
    found = float(total.values["fedexp/square_norm"]) + float(total.values["fedexp/square_norm_rest"])
    assert float(total.values["fedexp/square_norm"]) == 0
    assert found == pytest.approx(expected, rel=0.01)


# --- what devices see ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", [*ADAPTIVE, "fedavgm", "fedexp"])
def test_devices_get_none_of_the_servers_state(make: Make, name: str) -> None:
    """Its bound is of no use to them, so a server that sends moments is refused, however many rounds it claims."""
    strategy, bundle = strategies.get(name), make(name)
    task = simulate_rounds(bundle, clients())
    assert strategy.broadcast(task.server_state) == {}
    check_broadcast(bundle, {}, rounds=3)
    with pytest.raises(ProvenanceError, match="broadcast"):
        check_broadcast(bundle, {"momentum/head.bias": np.zeros(3, np.float32)}, rounds=3)


@pytest.mark.parametrize("name", [*ADAPTIVE, "fedavgm", "fedexp"])
def test_devices_accept_honest_versions_and_no_longer_steps(make: Make, name: str) -> None:
    """What `Origins` computes of the signed manifest and of the log's hyperparameters, without the log."""
    strategy, bundle = strategies.get(name), make(name, strategy_options={"clip": 0.5})
    given = {**strategy.server_hyperparameters, **({"tau": 0.5} if name in ADAPTIVE else {})}
    start = bundle.parameters()
    task = simulate_rounds(bundle, clients(), server=given)
    bound = 3 * strategy.step_bound(bundle.manifest, given, 4).parameters
    check_distance("weights", task.parameters, start, bound, 3)
    direction = {key: np.ones_like(value) / np.sqrt(SIZE) for key, value in start.items()}
    far = {key: (value + 1.01 * bound * direction[key]).astype(np.float32) for key, value in start.items()}
    with pytest.raises(ProvenanceError, match="3 rounds can move them by"):
        check_distance("weights", far, start, bound, 3)
