"""AdaRound, bias correction, and layers that stay in float."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import product

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from archipel.compression import Examples, StaticInt8
from archipel.compression.part import Part
from archipel.compression.quantize.adaround import Moments, choose_integers
from archipel.compression.quantize.fallback import choose_float_layers
from archipel.compression.quantize.weight_only import WeightOnly
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.training.losses import mse
from tests.support.quantized_network import Apply, Run, Stored

# The first layer of these networks reads two channels.
Whole = partial(StaticInt8, narrow_convolutions="int8")


def correlated(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    return np.maximum(rng.standard_normal((rows, 3)) @ rng.standard_normal((3, k)) + 0.2, 0)


def test_the_error_from_moments_is_that_of_the_outputs() -> None:
    rng = np.random.default_rng(0)
    for rows, k in ((4000, 9), (6, 20), (900, 600)):  # eigenvectors, the rows themselves, Cholesky
        exact = correlated(rng, rows, k)
        read = exact + 0.1 * rng.standard_normal(exact.shape)
        weight, other = rng.standard_normal((2, 1, 4, k))
        found = Moments.of(read[None], exact[None], weight).error(other)[0]
        share = k / (k + rows)
        ridge = share * np.square(read).sum() / rows / k
        means = np.square(exact @ weight[0].T - read @ other[0].T).mean(axis=0)
        expected = (1 - share) * means + ridge * np.square(weight[0] - other[0]).sum(axis=1)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.sampled(every=4)
def test_adaround_against_all_ways_to_round() -> None:
    rng = np.random.default_rng(0)
    reached, best, nearest = [], [], []
    for _ in range(4):
        x = correlated(rng, 500, 8)
        weight = rng.uniform(-0.45, 0.45, (1, 3, 8))
        weight[:, :, 0] = 0.5
        scale = np.full(weight.shape, 0.5 / 7)
        moments = Moments.of(x[None], x[None], weight)
        integers, before, after = choose_integers(weight, scale, moments, 7, 400)
        assert np.all(np.abs(integers - weight / scale) < 1)
        below = np.floor(weight / scale)
        every = np.array(list(product((0, 1), repeat=8)))
        errors = [moments.error(np.minimum(below + up, 7) * scale)[0] for up in every]
        reached.append(after)
        best.append(np.min(errors, axis=0).sum())
        nearest.append(before)
        np.testing.assert_allclose(moments.error(integers * scale).sum(), after)
        np.testing.assert_allclose(moments.error(np.round(weight / scale) * scale).sum(), before)
    assert sum(reached) < 0.5 * sum(nearest)
    assert sum(reached) < 1.6 * sum(best)


def test_zeros_and_the_largest_stay() -> None:
    rng = np.random.default_rng(0)
    x = correlated(rng, 500, 12)
    weight = rng.standard_normal((1, 5, 12))
    weight[:, :, ::3] = 0
    scale = np.broadcast_to(np.abs(weight).max(axis=2, keepdims=True) / 7, weight.shape)
    integers, _, _ = choose_integers(weight, scale, Moments.of(x[None], x[None], weight), 7, 100)
    assert not integers[:, :, ::3].any()
    largest = np.abs(weight) == np.abs(weight).max(axis=2, keepdims=True)
    np.testing.assert_array_equal(np.abs(integers[largest]), 7)


@pytest.mark.slow
@pytest.mark.parametrize("part", [Whole, partial(WeightOnly, bits=4, smallest=8)])
def test_adaround_of_a_network(
    part: Callable[..., Part], network: Model, examples: Examples, apply: Apply, run: Run
) -> None:
    """The output comes closer to that of the float network, and parameters move by less than a step."""
    x = examples.fields["x"]
    exact = run(network, x)
    plain, _ = apply(network, part(), examples)
    fitted, facts = apply(network, part(rounding="adaround", rounding_steps=300), examples)
    noise = [np.square(run(model.deployed(), x) - exact).mean() for model in (plain, fitted)]
    assert noise[1] < 0.8 * noise[0]
    assert set(facts["adaround"]) >= {"conv.weight", "depthwise.weight", "dense.weight"}
    assert all(found["chosen"] <= found["nearest"] for found in facts["adaround"].values())
    moved = {n for n, v in network.parameters.items() if not np.array_equal(v, fitted.parameters[n])}
    assert moved <= {"conv.weight", "depthwise.weight", "pointwise.weight", "dense.weight"}
    assert moved >= {"conv.weight", "dense.weight"}  # behind a folded BatchNormalization, and without


@pytest.mark.slow
def test_the_integers_that_were_chosen_are_stored(
    network: Model, examples: Examples, apply: Apply, stored: Stored
) -> None:
    """Scales stay, and every integer is the one below or above."""
    plain, _ = apply(network, Whole(), examples)
    fitted, _ = apply(network, Whole(rounding="adaround", rounding_steps=300), examples)
    before, after = stored(plain.deployed()), stored(fitted.deployed())
    for name in (n for n in before if n.endswith(".weight_folded_scale") or n == "dense.weight_scale"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-6)
    names = [name for name in before if before[name].dtype == np.int8 and before[name].ndim > 1]
    assert len(names) == 4
    steps = [after[name].astype(int) - before[name] for name in names]
    assert all(np.abs(step).max() == 1 for step in steps)


@pytest.mark.sampled(every=3)
def test_bias_correction_by_hand(apply: Apply) -> None:
    """Nagel et al. 2019, section 4.2, of one layer: E[float output] - E[quantized output] for each channel."""
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3)
    x = np.abs(np.random.default_rng(0).standard_normal((32, 2, 6, 6))).astype(np.float32)
    model = Model.from_torch(layer, torch.from_numpy(x))
    found, _ = apply(model, Whole(bias_correction=True), Examples({"input": x}))
    correction = next(v for n, v in found.ir.graph.initializers.items() if n.endswith("bias_correction"))
    low, high = 0.0, float(x.max())
    step = np.float32((high - low) / 255)
    rounded_x = torch.from_numpy(np.clip(np.round(x / step), 0, 255) * step)
    scale = layer.weight.detach().abs().amax(dim=(1, 2, 3), keepdim=True) / 127
    with torch.no_grad():
        exact = layer(torch.from_numpy(x))
        layer.weight.copy_(torch.round(layer.weight / scale) * scale)
        shift = (exact - layer(rounded_x)).mean(dim=(0, 2, 3)).numpy()
    np.testing.assert_allclose(correction.const_value.numpy(), shift, atol=2e-6)
    assert np.abs(shift).max() > 1e-4


@pytest.mark.slow
def test_bias_correction_takes_the_shift_away(network: Model, examples: Examples, apply: Apply, run: Run) -> None:
    x = examples.fields["x"]
    exact = run(network, x)
    coarse = {"per_channel": False, "reduce_range": True}
    shifts = []
    for correct in (False, True):
        found, _ = apply(network, Whole(bias_correction=correct, **coarse), examples)
        shifts.append(np.abs((run(found.deployed(), x) - exact).mean(axis=0)).max())
        assert set(found.parameter_names) == set(network.parameter_names)  # what trains is not shifted
    assert shifts[1] < 0.1 * shifts[0]


class Uneven(nn.Module):
    """A layer whose channels differ by 1e4: with one scale for all of them most become zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)  # with which it gives all five answers
        self.first, self.uneven, self.last = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8 * 64, 5)
        with torch.no_grad():
            factors = 10.0 ** torch.linspace(-3, 1, 8)
            self.uneven.weight.mul_(factors[:, None, None, None])
            self.uneven.bias.mul_(factors)
            self.last.weight.view(5, 8, 64).div_(factors[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.uneven(torch.relu(self.first(x)))).flatten(1))


@pytest.mark.slow
def test_layers_that_lose_too_much_stay_in_float(examples: Examples, apply: Apply, run: Run, stored: Stored) -> None:
    model = Model.from_torch(Uneven().eval(), torch.zeros(2, 2, 8, 8))
    x = examples.fields["x"]
    given = Examples({"x": x}, run(model, x).argmax(axis=1))  # so the float network is always right
    rough = {"per_channel": False}
    found, _ = apply(model, Whole(**rough), given)
    assert (run(found.deployed(), x).argmax(axis=1) == given.labels).mean() < 0.9
    found, facts = apply(model, Whole(**rough, max_drop=2.0), given)
    worst = min(facts["signal_to_noise_db"], key=lambda name: facts["signal_to_noise_db"][name])
    assert worst in facts["float_layers"]
    assert 1 <= len(facts["float_layers"]) < 3
    accuracy = (run(found.deployed(), x).argmax(axis=1) == given.labels).mean()
    assert accuracy >= 0.98
    assert facts["drop"] == pytest.approx(100 * (1 - accuracy))
    kept = stored(found.deployed())
    assert kept[worst].dtype == np.float32
    assert any(value.dtype == np.int8 and value.ndim > 1 for value in kept.values())


@pytest.mark.sampled(every=3)
def test_a_budget_that_is_kept_leaves_nothing_in_float(network: Model, examples: Examples, apply: Apply) -> None:
    _, facts = apply(network, Whole(max_drop=100.0), examples)
    assert facts["float_layers"] == []


@pytest.mark.sampled(every=3)
def test_a_budget_that_nothing_keeps(examples: Examples, apply: Apply, run: Run) -> None:
    model = Model.from_torch(nn.Sequential(nn.Flatten(), nn.Linear(128, 5)), torch.zeros(2, 2, 8, 8))
    exact = run(model, examples.fields["x"])
    with pytest.raises(CompressionError, match=r"max_drop=0.*no layer can be quantized"):
        apply(model, Whole(max_drop=0.0), Examples({"input": examples.fields["x"]}, exact), mse())


def test_the_walk_stops_at_branches(apply: Apply) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    graph (float[batch, 4] x) => (float[batch, 3] y) <float[4, 3] w = {1,2,3,4,5,6,7,8,9,1,2,3}>
    {
        h = MatMul (x, w)
        m = ReduceMax <keepdims = 0> (h)
        c = Cast <to = 9> (m)
        y = If (c) <then_branch = a () => (float[batch, 3] p) { p = Neg (h) },
                    else_branch = b () => (float[batch, 3] q) { q = Identity (h) }>
    }"""
    model = Model.from_proto(onnx.parser.parse_model(text))
    x = Examples({"x": np.ones((4, 4), np.float32)})
    with pytest.raises(CompressionError, match=r"is a loop or branch.*bias_correction"):
        apply(model, Whole(bias_correction=True), x)
    found, _ = apply(model, Whole(), x)
    assert "QuantizeLinear" in {node.op_type for node in found.ir.graph}


@pytest.mark.parametrize("needed", [set(), {"a"}, {"b"}, {"a", "d"}, {"b", "f"}, {"g"}, set("abcdefg")])
def test_as_few_as_are_needed(needed: set[str]) -> None:
    """Where some layers are what it takes, these alone stay in float, whatever their rank."""
    asked = []

    def allowed(left: Collection[str]) -> bool:
        asked.append(left)
        return needed <= set(left)

    assert set(choose_float_layers("abcdefg", allowed)) == needed
    assert len(asked) <= 14
