"""LowRank: the factors against NumPy and PyTorch, where ranks go, and what stays of the network."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from archipel import Model, models, training
from archipel.compression import CompressedModel, Examples, FineTune, Work
from archipel.compression.layer_weights import layer_weights
from archipel.compression.low_rank import LowRank
from archipel.compression.low_rank.choice import Choice, Layer, by_budget
from archipel.compression.low_rank.factors import Factors, replace
from archipel.compression.low_rank.moments import windows
from archipel.compression.low_rank.splits import Split, Window, layer_splits
from archipel.compression.masks import PruneWeights
from archipel.errors import CompressionError
from archipel.graph import check_model
from archipel.graph.flops import flops, flops_per_example


def run(model: Model, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {model.inputs[0].name: x})[0]
    return found


def surroundings(model: Model, x: np.ndarray | None = None, **options: Any) -> Work:
    calibration = None if x is None else Examples({model.inputs[0].name: x})
    return Work(model, loss=training.losses.cross_entropy(), calibration=calibration, **options)


def apply(part: LowRank, model: Model, x: np.ndarray | None = None) -> tuple[CompressedModel, Work]:
    work = surroundings(model, x)
    return part.apply(CompressedModel.of(model), work), work


def parsed(body: str, inputs: str, outputs: str, weights: dict[str, np.ndarray]) -> Model:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> agraph ({inputs}) => ({outputs}) {{ {body} }}'
    )
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in weights.items())
    return Model.from_proto(proto, parameters=list(weights))


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


CONVOLUTIONS = {
    "3x3": ({"kernel_size": 3, "padding": 1}, "x"),
    "strided": ({"kernel_size": (5, 3), "stride": (2, 3), "padding": (2, 0)}, "x"),
    "dilated": ({"kernel_size": 3, "dilation": (2, 1), "padding": (1, 2), "bias": False}, "x"),
    "1x1 strided": ({"kernel_size": 1, "stride": 2}, "x"),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_full_rank_is_the_convolution(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, **CONVOLUTIONS[name][0])
    x = noise(2, 4, 13, 11)
    source = Model.from_torch(layer, torch.from_numpy(x))
    expected = layer(torch.from_numpy(x)).detach().numpy()
    kinds = set()
    for number in range(3):
        model = source.copy()
        (weight,) = layer_weights(model)
        splits, reason = layer_splits(weight, flops_per_example(model))
        assert not reason
        if number >= len(splits):
            continue
        factors = Factors.of(splits[number].matrix)
        kinds.add(splits[number].kind)
        replace(model.ir, weight, splits[number], len(factors.values), factors)
        check_model(model.ir)
        assert model.outputs == source.outputs
        np.testing.assert_allclose(run(model, x), expected, atol=1e-5)
    assert kinds == ({"channels"} if name.startswith("1x1") else {"channels", "vertical", "horizontal"})


def test_full_rank_of_a_kernel_in_another_layout() -> None:
    """TensorFlow's [height, width, inputs, outputs] behind a Transpose: the factors have Conv's own layout."""
    kernel, bias, x = noise(3, 3, 4, 6), noise(6, seed=1), noise(2, 4, 9, 8, seed=2)
    source = parsed(
        "k = Transpose <perm = [3, 2, 0, 1]> (w) y = Conv <pads = [1, 1, 1, 1]> (x, k, b)", "float[n, 4, 9, 8] x",
        "float[n, 6, 9, 8] y", {"w": kernel, "b": bias},
    )  # fmt: skip
    tensors = (torch.from_numpy(array) for array in (x, kernel.transpose(3, 2, 0, 1), bias))
    expected = nn.functional.conv2d(*tensors, padding=1).numpy()
    for number in range(3):
        model = source.copy()
        (weight,) = layer_weights(model)
        splits, reason = layer_splits(weight, flops_per_example(model))
        assert not reason
        replace(model.ir, weight, splits[number], min(splits[number].matrix.shape), Factors.of(splits[number].matrix))
        assert {node.op_type for node in model.ir.graph} == {"Conv"}
        np.testing.assert_allclose(run(model, x), expected, atol=2e-5)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_padding_that_follows_the_picture(auto_pad: str) -> None:
    """At full rank, against the graph with one layer."""
    source = parsed(
        f'y = Conv <auto_pad = "{auto_pad}", strides = [2, 3]> (x, w, b)', "float[n, 3, 10, 11] x",
        "float[n, 4, h, v] y", {"w": noise(4, 3, 4, 5), "b": noise(4)},
    )  # fmt: skip
    x = noise(2, 3, 10, 11, seed=1)
    for number in range(3):
        model = source.copy()
        weight = layer_weights(model)[0]
        split = layer_splits(weight, 1)[0][number]
        replace(model.ir, weight, split, min(split.matrix.shape), Factors.of(split.matrix))
        np.testing.assert_allclose(run(model, x), run(source, x), atol=2e-5)


PRODUCTS = {
    "Gemm": ("y = Gemm <alpha = 0.5, beta = 2.0> (x, w, b)", (20, 12)),
    "Gemm transposed": ("y = Gemm <transB = 1> (x, w, b)", (12, 20)),
    "MatMul": ("y = MatMul (x, w)", (20, 12)),
    "MatMul transposed": ("t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t)", (12, 20)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_cut_off_where_numpy_cuts_it_off(name: str) -> None:
    body, shape = PRODUCTS[name]
    w, b, x = noise(*shape), noise(12, seed=1), noise(5, 20, seed=2)
    model = parsed(body, "float[n, 20] x", "float[n, 12] y", {"w": w, **({"b": b} if "Gemm" in name else {})})
    matrix = (w if shape[0] == 20 else w.T).astype(np.float64)
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    rank = int(np.searchsorted(np.cumsum(s**2) / (s**2).sum(), 0.6)) + 1
    expected = x @ (u[:, :rank] * s[:rank] @ v[:rank])
    if name == "Gemm":
        expected = 0.5 * expected + 2 * b
    elif "Gemm" in name:
        expected = expected + b
    small, work = apply(LowRank(energy=0.6, data_aware=False), model)
    np.testing.assert_allclose(run(small, x), expected, atol=1e-4)
    assert work.facts["layers"]["w"]["rank"] == rank < 7
    assert set(small.parameter_names) == {"w.left", "w.right", *(["b"] if "Gemm" in name else [])}
    left, right = small.parameters["w.left"], small.parameters["w.right"]
    assert left.shape == ((20, rank) if shape[0] == 20 else (rank, 20))
    np.testing.assert_allclose(np.linalg.norm(left), np.linalg.norm(right), rtol=1e-4)  # neither dwarfs the other


def test_a_product_with_a_weight_behind_a_reshape() -> None:
    """As CNTK writes a dense layer behind pictures: [channels, height, width, outputs], read as a matrix."""
    w, x = noise(5, 2, 2, 12), noise(5, 20, seed=2)
    body = "s = Constant <value_ints = [20, 12]> () k = Reshape (w, s) y = MatMul (x, k)"
    model = parsed(body, "float[n, 20] x", "float[n, 12] y", {"w": w})
    u, s, v = np.linalg.svd(w.reshape(20, 12).astype(np.float64), full_matrices=False)
    small, work = apply(LowRank(energy=0.6, data_aware=False), model)
    rank = work.facts["layers"]["w"]["rank"]
    np.testing.assert_allclose(run(small, x), x @ (u[:, :rank] * s[:rank] @ v[:rank]), atol=1e-4)
    assert {name: array.shape for name, array in small.parameters.items()} == {
        "w.left": (20, rank),
        "w.right": (rank, 12),
    }


@pytest.mark.sampled(every=4)
def test_the_linear_layers_of_a_transformer_are_split() -> None:
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 11, (4, 6))
    network = models.transformer(0, vocabulary=11, length=6, width=8, heads=2, layers=1)
    small, _ = apply(LowRank(energy=0.6, data_aware=False), Model.from_torch(network, tokens))
    expected = network.state_dict()
    for name in ("attention", "project", "widen", "narrow"):
        weight = f"layers.0.{name}.weight"
        left, right = (small.parameters[f"{weight}.{side}"] for side in ("left", "right"))
        # The best approximation of this rank, as PyTorch's SVD has it; both factors keep the layout of Linear.
        u, s, v = torch.linalg.svd(expected[weight].double(), full_matrices=False)
        rank = left.shape[0]
        np.testing.assert_allclose(right @ left, (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-5)


@pytest.mark.sampled(every=3)
def test_a_weight_that_is_a_product_is_found_out() -> None:
    """Rank 3 of 24: nothing is lost, at energy 1."""
    torch.manual_seed(1)
    model = Model.from_torch(nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 30)), torch.zeros(2, 32))
    name = next(n for n in model.parameter_names if n.endswith("2.weight"))
    thin = (noise(30, 3).astype(np.float64) @ noise(3, 24, seed=1)).astype(np.float32)
    model = CompressedModel.of(model).with_parameters({name: thin})
    small, work = apply(LowRank(energy=0.9999999, data_aware=False), model)
    assert {n: fact["rank"] for n, fact in work.facts["layers"].items()} == {name: 3}
    x = noise(8, 32, seed=2)
    np.testing.assert_allclose(run(small, x), run(model, x), atol=1e-4)


@pytest.mark.sampled(every=4)
def test_energy_one_changes_nothing(lenet: Model) -> None:
    model = lenet
    x = noise(8, 1, 28, 28)
    for aware in (False, True):
        small, _ = apply(LowRank(energy=1.0, data_aware=aware), model, x)
        np.testing.assert_allclose(run(small, x), run(model, x), atol=1e-5)
        assert flops_per_example(small) <= flops_per_example(model)


@pytest.fixture(scope="module")
def lenet() -> Model:
    return Model.from_torch(models.lenet(0), torch.zeros(2, 1, 28, 28))


@pytest.fixture(scope="module")
def resnet() -> Model:
    return Model.from_torch(models.resnet8(0), torch.from_numpy(noise(2, 3, 32, 32)))


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "share"), [("flops", 0.3), ("flops", 0.6), ("size", 0.5)])
def test_budgets_are_met_and_used(resnet: Model, unit: str, share: float) -> None:
    model = resnet
    small, work = apply(LowRank(**{unit: share}, data_aware=False), model)  # type: ignore[arg-type]
    if unit == "flops":
        before, after = flops_per_example(model), flops_per_example(small)
    else:
        before, after = (sum(v.size for v in m.parameters.values()) for m in (model, small))
    assert 0.96 * (1 - share) * before < after <= (1 - share) * before
    assert (small.inputs, small.outputs) == (model.inputs, model.outputs)
    check_model(small.ir)
    # What a layer is said to take is what the two layers take that it became.
    counted, former = flops(small), flops(model)
    added = sum(count for node, count in counted.items() if node not in former)
    assert added == sum(fact["flops"][1] for fact in work.facts["layers"].values())


@pytest.mark.slow
def test_both_halves_train(resnet: Model) -> None:
    small, _ = apply(LowRank(flops=0.6, data_aware=False), resnet)
    step = training.step_graph(small, training.losses.cross_entropy(), training.optimizers.sgd())
    batch = (noise(8, 3, 32, 32), np.arange(8) % 10)
    losses = training.run_steps(step, [batch] * 4, {"lr": 0.01})
    assert losses[-1] < losses[0]
    assert {"block3.conv2.weight.left", "block3.conv2.weight.right"} <= set(step.initial)


def test_no_other_choice_within_the_budget_keeps_more() -> None:
    """The greedy walk against all combinations of three small layers: within 2 % of the best product of energies."""
    rng = np.random.default_rng(3)
    layers = []
    for number, (rows, columns) in enumerate([(8, 6), (6, 9), (10, 5)]):
        matrix = rng.standard_normal((rows, columns)) @ np.diag(rng.random(columns) ** 3)
        split = Split("product", matrix, 2.0 * (rows + columns))
        layers.append(Layer(str(number), 2 * matrix.size, matrix.size, (split,), (Factors.of(matrix),)))
    whole = sum(layer.flops for layer in layers)
    for share in (0.2, 0.35, 0.5):
        found = by_budget(layers, "flops", (1 - share) * whole)
        kept, cost = _kept(layers, found)
        assert cost <= (1 - share) * whole
        options: list[list[Choice | None]] = [
            [None, *(Choice(0, r, layer.splits[0].flops * r, 0, 1 - float(layer.factors[0].energy[r]))
                     for r in range(1, len(layer.factors[0].values) + 1))]
            for layer in layers
        ]  # fmt: skip
        results = [_kept(layers, list(each)) for each in product(*options)]
        assert kept >= 0.98 * max(k for k, c in results if c <= (1 - share) * whole)


def _kept(layers: list[Layer], choices: list[Choice | None]) -> tuple[float, float]:
    kept = float(np.prod([1.0 if c is None else 1 - c.lost for c in choices]))
    return kept, sum(layer.flops if c is None else c.flops for layer, c in zip(layers, choices))


def test_whitened_factors_lose_least_at_the_output() -> None:
    """Against the optimum by NumPy: what reduced-rank regression of the outputs leaves."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 12)) @ np.diag(np.geomspace(3, 0.03, 12)) @ rng.standard_normal((12, 12))
    w = rng.standard_normal((12, 8))
    y = x @ w
    best = np.sum(np.linalg.svd(y, compute_uv=False)[3:] ** 2)  # no matrix of rank 3 comes closer (Eckart & Young)
    aware, plain = (Factors.of(w, moments).pair(3) for moments in (x.T @ x / len(x), None))
    lost = [np.sum((y - x @ left @ right) ** 2) for left, right in (aware, plain)]
    assert lost[0] == pytest.approx(best, rel=1e-3)
    assert lost[1] > 2 * best


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
def test_windows_are_what_a_convolution_reads(auto_pad: str) -> None:
    """Each window times the weight is one place of the convolution's output."""
    pads = (1, 0, 2, 1) if auto_pad == "NOTSET" else None
    attributes = f"pads = {list(pads)}," if pads else f'auto_pad = "{auto_pad}",'
    dilations = [2, 1] if pads else [1, 1]
    w, x = noise(3, 2, 3, 2), noise(2, 2, 9, 8, seed=1)
    model = parsed(
        f"y = Conv <{attributes} strides = [2, 1], dilations = {dilations}> (x, w)", "float[n, 2, 9, 8] x",
        "float[n, 3, h, v] y", {"w": w},
    )  # fmt: skip
    rows = windows(x, Window((3, 2), (2, 1), tuple(dilations), pads, auto_pad), 40, np.random.default_rng(0))
    found = (rows @ w.reshape(3, -1).T).reshape(-1, 2, 3)  # [places, batch, outputs]
    outputs = run(model, x).transpose(2, 3, 0, 1).reshape(-1, 2, 3)
    distances = np.abs(found[:, None] - outputs[None]).max((2, 3)).min(1)
    assert distances.max() < 1e-5
    assert len(np.unique(found[:, 0, 0].round(4))) > 10


@pytest.mark.slow
def test_knowing_the_data_helps() -> None:
    torch.manual_seed(0)
    model = Model.from_torch(nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 6)), torch.zeros(2, 40))
    mix = noise(40, 40, seed=5) * np.geomspace(2, 0.02, 40, dtype=np.float32)[:, None]
    x, fresh = noise(2000, 40) @ mix, noise(500, 40, seed=9) @ mix
    errors = [
        np.square(run(apply(LowRank(flops=0.6, data_aware=aware), model, x)[0], fresh) - run(model, fresh)).mean()
        for aware in (True, False)
    ]
    assert errors[0] < 0.3 * errors[1]


@pytest.mark.slow
def test_fine_tuning_follows() -> None:
    torch.manual_seed(0)
    model = Model.from_torch(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)), torch.zeros(2, 12))
    x = noise(256, 12)
    name = model.inputs[0].name
    examples = Examples({name: x}, run(model, x).argmax(1))
    work = surroundings(model, data=examples, validation=examples)
    plain = LowRank(size=0.6, data_aware=False).apply(CompressedModel.of(model), work)
    tuned = LowRank(size=0.6, data_aware=False, fine_tune=FineTune(epochs=20, lr=1e-2)).apply(
        CompressedModel.of(model), work
    )
    assert set(plain.parameter_names) == set(tuned.parameter_names)
    assert work.evaluate(tuned).loss < 0.7 * work.evaluate(plain).loss


def network(name: str) -> Model:
    tokens = torch.zeros(2, 24, dtype=torch.int64)
    examples: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "transformer": (models.transformer(0, length=24, width=32), tokens),
        "char_rnn": (models.char_rnn(0, hidden=32), tokens),
        "cnn_1d": (models.cnn_1d(0), torch.randn(2, 6, 128)),
        "ds_cnn": (models.ds_cnn(0), torch.randn(2, 1, 49, 10)),
        "unet": (models.unet(0), torch.randn(2, 1, 28, 28)),
        "autoencoder": (models.autoencoder(0), torch.randn(2, 1, 28, 28)),
        "mobilenet_v2": (models.mobilenet_v2(0, width=0.25), torch.randn(2, 3, 32, 32)),
        "fedavg_cnn": (models.fedavg_cnn(0), torch.randn(2, 1, 28, 28)),
        "digits_cnn": (models.digits_cnn(0), torch.randn(2, 1, 28, 28)),
        "mlp": (models.mlp(0), torch.randn(2, 784)),
    }
    return Model.from_torch(*examples[name])


FAST = ("cnn_1d", "mlp")
SLOW = ("transformer", "char_rnn", "ds_cnn", "unet", "autoencoder", "mobilenet_v2", "fedavg_cnn", "digits_cnn")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_networks_keep_their_signature_and_train(name: str) -> None:
    model = network(name)
    small, work = apply(LowRank(energy=0.7, data_aware=False), model)
    assert work.facts["layers"]
    check_model(small.ir)
    assert (small.inputs, small.outputs) == (model.inputs, model.outputs)
    assert flops_per_example(small) < flops_per_example(model)
    assert sum(v.nbytes for v in small.parameters.values()) < sum(v.nbytes for v in model.parameters.values())
    step = training.step_graph(small, training.losses.mse(), training.optimizers.sgd(), batch_norm="frozen")
    info = model.inputs[0]
    shape = [d if isinstance(d, int) else 2 for d in info.shape]
    x = noise(*shape) if info.dtype == "float32" else np.random.default_rng(0).integers(0, 80, shape)
    wanted = np.zeros_like(run(small, x))
    losses = training.run_steps(step, [(x, wanted)] * 3, {"lr": 1e-3})
    assert losses[-1] < losses[0]
    assert small.deployed().inputs == model.inputs


@pytest.mark.sampled(every=3)
def test_errors_say_what_to_do(lenet: Model) -> None:
    with pytest.raises(CompressionError, match="exactly one of energy, flops and size"):
        LowRank()
    with pytest.raises(CompressionError, match="flops is a share above 0 and below 1, got 50"):
        LowRank(flops=50)
    model = lenet
    with pytest.raises(CompressionError, match="rank 1 in every layer"):
        apply(LowRank(flops=0.99, data_aware=False), model)
    with pytest.raises(CompressionError, match="no parameter matches 'ghost"):
        apply(LowRank(energy=0.9, exclude=("ghost*",), data_aware=False), model)
    with pytest.raises(CompressionError, match="calibration"):
        apply(LowRank(energy=0.9), model)
    masked = PruneWeights(0.5).apply(CompressedModel.of(model), surroundings(model))
    with pytest.raises(CompressionError, match="before PruneWeights"):
        apply(LowRank(energy=0.9, data_aware=False), masked)


def test_excluded_layers_stay(lenet: Model) -> None:
    model = lenet
    small, work = apply(LowRank(size=0.4, layers="hidden*", exclude=("hidden2.*",), data_aware=False), model)
    assert set(work.facts["layers"]) == {"hidden1.weight"}
    for name in ("conv1.weight", "hidden2.weight", "output.weight"):
        np.testing.assert_array_equal(small.parameters[name], model.parameters[name])
