"""Running statistics of BatchNormalization: what devices upload, and what the server makes of the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from archipel import Model, strategies
from archipel.bundle import Bundle, role_of
from archipel.bundle.roles import Update
from archipel.converter.device_half.federated import divide
from archipel.errors import ConversionError, ProvenanceError
from archipel.protocol.plain import PlainSum
from archipel.protocol.vector import DecodedSum, Layout
from archipel.strategies.device import describe
from archipel.strategies.running_statistics import (
    Shared,
    check_statistics,
    combine_statistics,
    shared_statistics,
    split_statistics,
)
from archipel.training.batch_norm import BatchNorm
from tests.support.simulation import (
    LR,
    SIZES,
    added_up,
    batches,
    clients,
    dense,
    first_state,
    gradients,
    imported,
    normalized,
    simulate,
    tensors,
)

Make = Callable[..., Bundle]
MEAN, VARIANCE = "norm.running_mean", "norm.running_var"
PAIR = Shared(MEAN, VARIANCE, 3.0, 9.0)


@pytest.fixture(scope="module")
def fedavg(make: Make) -> Bundle:
    return make("fedavg", normalized, strategy_options={"weight_cap": 1000})


def uploaded(bundle: Bundle, start: dict[str, np.ndarray], end: dict[str, np.ndarray], examples: int) -> dict[str, Any]:
    """What the bundle's `finish` makes of a round that began and ended so; weights stay."""
    program = bundle.program("finish")
    session = ort.InferenceSession(str(bundle.program_path("finish")), providers=["CPUExecutionProvider"])
    values = {**{f"{name}.start": array for name, array in start.items()}, **end}
    counts = {port.name: np.array(examples) for port in program.inputs if role_of(port) == "count"}
    names = [port.name for port in program.outputs if isinstance(port, Update)]
    return dict(zip(names, session.run(names, {**values, **counts}), strict=True))


def secure_sum(bundle: Bundle, updates: list[dict[str, Any]]) -> DecodedSum:
    """Encoded in fixed point, added modulo 2^b and decoded, as in a secure round."""
    layout = Layout.of(bundle.program("finish"))
    bits, total = layout.modulus_bits(len(updates)), np.zeros(layout.length, np.uint32)
    for arrays in updates:
        total += layout.encode(arrays, modulus_bits=bits, max_cohort=len(updates))
    decoded = layout.decode_sum(total & np.uint32(2**bits - 1), cohort=len(updates), modulus_bits=bits)
    layout.check_sum(decoded, len(updates))
    return decoded


def combined(bundle: Bundle, start: dict[str, np.ndarray], data: list[np.ndarray]) -> dict[str, np.ndarray]:
    """One round of devices whose statistics end as the moments of their `data`, [examples, 5] each."""
    updates = [uploaded(bundle, start, {**start, MEAN: x.mean(0), VARIANCE: x.var(0)}, len(x)) for x in data]
    pairs = shared_statistics(bundle.manifest)
    _, statistics = split_statistics(start, pairs)
    return combine_statistics(statistics, secure_sum(bundle, updates), len(data), pairs)


def test_moments_of_devices_become_those_of_all_their_examples(fedavg: Bundle) -> None:
    """Devices with other means, spreads and numbers of examples; channels of scales from 10^-2 to 10^3."""
    rng, scale = np.random.default_rng(0), np.array([1e-2, 0.3, 1.0, 30.0, 1e3], np.float32)
    data = [
        (scale * (0.6 * rng.standard_normal(5) + (0.5 + rng.random(5)) * rng.standard_normal((size, 5)))).astype(
            np.float32
        )
        for size in (40, 300, 700, 12, 150)
    ]
    every = np.concatenate(data).astype(np.float64)
    start = {**fedavg.parameters(), MEAN: 0.4 * scale, VARIANCE: 0.7 * scale**2}
    after = combined(fedavg, start, data)
    # Half a step of the encoding (16 bits) for each device, of at most 12 / 1202 of the weight.
    step, devices, weight = 3 / (2**15 - 1) / 2, 5, len(every) / 1000
    unit = np.sqrt(0.7 * scale.astype(np.float64) ** 2 + 1e-5)
    assert (np.abs(after[MEAN] - every.mean(0)) < 2 * unit * step * devices / weight).all()
    assert (np.abs(after[VARIANCE] - every.var(0)) < 10 * unit**2 * step * devices / weight).all()
    # The mean of the variances alone would be far off.
    within = np.average([x.var(0) for x in data], axis=0, weights=[len(x) for x in data])
    assert (np.abs(within - every.var(0)) / every.var(0)).max() > 0.3


@pytest.mark.sampled(every=3)
def test_statistics_far_away_are_reached_in_a_few_rounds(fedavg: Bundle) -> None:
    """From mean 0 and variance 1, with which networks begin, to features of which none was ever scaled."""
    scale = np.array([3e-3, 1.0, 50.0, 700.0, 2e4], np.float32)
    rng = np.random.default_rng(1)
    data = [(scale * (2 + rng.standard_normal((200, 5)))).astype(np.float32) for _ in range(4)]
    every = np.concatenate(data).astype(np.float64)
    at = fedavg.parameters()
    for number in range(12):
        after = combined(fedavg, at, data)
        pairs = shared_statistics(fedavg.manifest)
        check_statistics("weights", after, at, pairs, 0, 1)
        check_statistics("weights", after, fedavg.parameters(), pairs, 0, number + 1)
        growth = (after[VARIANCE].astype(float) + 1e-5) / (at[VARIANCE].astype(float) + 1e-5)
        assert (growth < 10.001).all()
        assert (growth > 0.0999).all()
        at = {**at, **after}
    np.testing.assert_allclose(at[MEAN], every.mean(0), rtol=1e-2)
    np.testing.assert_allclose(at[VARIANCE] + 1e-5, every.var(0) + 1e-5, rtol=1e-2)


@pytest.mark.sampled(every=3)
def test_rounds_are_those_of_pytorch(make: Make) -> None:
    """Three rounds with weights and running means averaged; variances by the law of total variance."""
    task = simulate(make("fedavg", normalized, strategy_options={"statistics_range": 30.0}), clients())
    module = normalized()
    w = tensors(module)
    mean, variance = torch.zeros(5).double(), torch.ones(5).double()
    shares = torch.tensor(SIZES).double()[:, None] / sum(SIZES)
    for number in range(3):
        ends, means, variances = [], [], []
        for client, (x, y) in enumerate(clients()):
            end, buffers = w, {MEAN: mean.clone(), VARIANCE: variance.clone()}
            for rows in batches(len(x), number, client):
                g = gradients(module, end, x[rows], y[rows], buffers)
                end = {name: value - LR * g[name] for name, value in end.items()}
            ends.append(end)
            means.append(buffers[MEAN])
            variances.append(buffers[VARIANCE])
        w = {name: sum(s * end[name] for s, end in zip(shares[:, 0], ends)) for name in w}
        mean = (shares * torch.stack(means)).sum(0)
        variance = (shares * (torch.stack(variances) + torch.stack(means) ** 2)).sum(0) - mean**2
    for name, value in {**w, MEAN: mean, VARIANCE: variance}.items():
        np.testing.assert_allclose(task.parameters[name], value.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.sampled(every=3)
def test_ditto_has_statistics_of_its_own_model_beside_the_shared_ones(make: Make) -> None:
    task = simulate(make("ditto", normalized), clients(), rounds=1)
    for device in task.devices:
        own = {name: device.state.personal[f"own/{name}"] for name in (MEAN, VARIANCE)}
        assert not device.state.state
        assert all(np.abs(own[name] - task.parameters[name]).max() > 1e-3 for name in own)


@pytest.mark.parametrize(
    ("strategy", "personal", "batch_norm", "shared"),
    [
        ("fedavg", None, "train", True),
        ("fedavg", None, "frozen", False),
        ("fedrep", "head.*", "train", True),
        ("fedrep", "norm.bias", "train", False),
        ("fedrep", VARIANCE, "train", False),
        ("fedbn", "head.*", "train", False),
    ],
)
def test_statistics_stay_with_a_personal_layer(
    strategy: str, personal: str | None, batch_norm: BatchNorm, shared: bool
) -> None:
    model = imported(normalized)
    names = [name for name in model.parameter_names if "running" not in name]
    half = describe(strategy, strategies.get(strategy).device, {} if personal is None else {"personal": personal})
    pairs = divide(model, names, half, strategy, batch_norm).statistics
    assert [(pair.mean, pair.variance, pair.shape) for pair in pairs] == ([(MEAN, VARIANCE, (5,))] if shared else [])


def test_without_batch_normalization_nothing_changes(make: Make) -> None:
    bundle = make("fedavg", dense)
    finish = bundle.program("finish")
    assert {port.kind for port in finish.outputs if isinstance(port, Update)} == {"delta", "weight"}
    assert not any("floor" in each.name for each in onnx.load(bundle.program_path("finish")).graph.initializer)
    parameters = bundle.parameters()
    assert split_statistics(parameters, shared_statistics(bundle.manifest)) == (parameters, {})
    assert first_state(bundle) == {}


@pytest.mark.sampled(every=3)
def test_a_layer_that_is_used_twice_has_one_pair(make: Make) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.norm, self.head = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(torch.relu(self.norm(self.body(x)))))

    bundle = make("fedavg", Twice)
    assert shared_statistics(bundle.manifest) == (PAIR,)


@pytest.mark.sampled(every=3)
def test_layers_that_share_one_statistic_only_are_refused() -> None:
    """What exporters make of equal initializers: two layers with one running mean, and variances of their own."""
    model = Model.from_torch(
        nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5)), torch.zeros(2, 6)
    )
    graph = model.ir.graph
    second = [node for node in graph if node.op_type == "BatchNormalization"][1]
    second.replace_input_with(3, graph.initializers["1.running_mean"])
    half = describe("fedavg", strategies.get("fedavg").device, {})
    names = ["0.weight", "0.bias"]
    with pytest.raises(ConversionError, match=r"share '1.running_mean' and no other statistic.*batch_norm='frozen'"):
        divide(model, names, half, "fedavg")
    assert divide(model, names, half, "fedavg", "frozen").statistics == ()


def test_one_device_of_twenty_shifts_statistics_by_its_range_at_most() -> None:
    """It asks in every round for the most that its range lets through; the others measure mean 2 and variance 1."""
    statistics = {MEAN: np.array([2.0], np.float32), VARIANCE: np.array([1.0], np.float32)}
    for _ in range(50):
        unit = statistics[VARIANCE].astype(float) + 1e-5
        d = (2.0 - statistics[MEAN]) / np.sqrt(unit)
        s = (1.0 - statistics[VARIANCE]) / unit + d**2
        moments = {MEAN: 19 * np.clip(d, -3, 3) + 3, VARIANCE: 19 * np.clip(s, -9, 9) + 9}
        statistics = combine_statistics(statistics, DecodedSum({}, {}, 20.0, moments), 20, (PAIR,))
    assert abs(statistics[MEAN][0] - 2.0) < 0.25
    assert statistics[VARIANCE][0] < 2.0


def test_a_scaled_step_scales_statistics() -> None:
    statistics = {MEAN: np.array([2.0], np.float32), VARIANCE: np.array([4.0], np.float32)}
    total = DecodedSum({}, {}, 2.0, {MEAN: np.array([1.0]), VARIANCE: np.array([3.0])})
    # D = 0.5 and S = 1.5 in units of 2 and 4: the mean shifts by 1, the variance grows by 4 (1.5 - 0.25) = 5.
    after = combine_statistics(statistics, total, 3, (PAIR,))
    assert (after[MEAN][0], after[VARIANCE][0]) == (pytest.approx(3.0, rel=1e-5), pytest.approx(9.0, rel=1e-5))
    half = combine_statistics(statistics, total, 3, (PAIR,), 0.5)
    assert (half[MEAN][0], half[VARIANCE][0]) == (pytest.approx(2.5, rel=1e-5), pytest.approx(6.5, rel=1e-5))
    nobody = combine_statistics(statistics, DecodedSum({}, {}, 0.0, total.moments), 3, (PAIR,))
    assert nobody == statistics


def test_stale_changes_of_statistics_count_less(fedavg: Bundle) -> None:
    """In an asynchronous task, as deltas do: half of an update that is three versions old, with the usual exponent."""
    start = fedavg.parameters()
    end = {**start, MEAN: start[MEAN] + 1, VARIANCE: start[VARIANCE] + 1}
    update = uploaded(fedavg, start, end, 1000)
    fresh, stale = (PlainSum(Layout.of(fedavg.program("finish"))) for _ in range(2))
    fresh.add(update)
    stale.add(update, 0.5)
    for name in (MEAN, VARIANCE):
        np.testing.assert_allclose(stale.decoded().moments[name], 0.5 * fresh.decoded().moments[name])
    assert stale.decoded().weight == fresh.decoded().weight
    np.testing.assert_allclose(
        fresh.decoded().moments[MEAN], added_up(fedavg.program("finish"), [update]).moments[MEAN]
    )


def at(mean: float, variance: float) -> dict[str, np.ndarray]:
    return {MEAN: np.array([mean], np.float32), VARIANCE: np.array([variance], np.float32)}


@pytest.mark.parametrize(
    ("weights", "others", "back", "on", "fits"),
    [
        (at(0, 1), at(0, 1), 0, 0, True),
        (at(1e-3, 1), at(0, 1), 0, 0, False),
        (at(0, 1.001), at(0, 1), 0, 0, False),
        (at(5.99, 4), at(0, 4), 0, 1, True),  # three standard deviations of 2
        (at(6.02, 4), at(0, 4), 0, 1, False),
        (at(-6.02, 4), at(0, 4), 0, 1, False),
        (at(0, 39.9), at(0, 4), 0, 1, True),  # ten times as much
        (at(0, 40.2), at(0, 4), 0, 1, False),
        (at(0, 0.402), at(0, 4), 0, 1, True),
        (at(0, 0.398), at(0, 4), 0, 1, False),
        (at(6 + 18.9, 400), at(0, 4), 0, 2, True),  # the second round is measured by what the first has made of it
        (at(6 + 19.1, 400), at(0, 4), 0, 2, False),
        (at(0, 4010), at(0, 4), 1, 2, True),
        (at(0, 4030), at(0, 4), 1, 2, False),
        (at(18.9 + 18.9, 4), at(0, 4), 1, 1, True),  # back to where the variance may have been ten times as much
        (at(18.9 + 19.2, 4), at(0, 4), 1, 1, False),
        (at(float("nan"), 1), at(0, 1), 0, 5, False),
        (at(float("inf"), 1), at(0, 1), 0, 2000, False),
        (at(0, float("nan")), at(0, 1), 0, 5, False),
        (at(0, float("inf")), at(0, 1), 0, 5000, False),
        (at(0, -1e-3), at(0, 1e-3), 0, 5, False),
        (at(1e30, 1e30), at(0, 1), 0, 5000, True),
    ],
)  # fmt: skip
def test_what_rounds_can_have_made_of_statistics(
    weights: dict[str, np.ndarray], others: dict[str, np.ndarray], back: int, on: int, fits: bool
) -> None:
    if fits:
        check_statistics("weights", weights, others, (PAIR,), back, on)
        return
    with pytest.raises(ProvenanceError, match=f"weights: running statistic 'norm.*than {back + on} rounds"):
        check_statistics("weights", weights, others, (PAIR,), back, on)
