"""PruneWeights and PruneNM: which weights go, that they stay away, and what training sees."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional

from archipel import Model, models, training
from archipel.compression import CompressedModel, Examples, FineTune, Work
from archipel.compression.layer_weights import layer_weights
from archipel.compression.masks import PruneNM, PruneWeights, write_masks
from archipel.compression.masks.n_of_m import pattern
from archipel.compression.masks.scores import taylor
from archipel.compression.part import Part
from archipel.errors import CompressionError
from archipel.graph import check_model
from archipel.training.losses import Loss

LOSS = training.losses.cross_entropy()


def run(model: Model, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {model.inputs[0].name: x})[0]
    return found


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, stride=2)
        self.dense = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.conv(x)))
        x = functional.relu(self.deep(x))
        found: torch.Tensor = self.dense(x.mean((2, 3)))
        return found


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return Small().eval()


@pytest.fixture(scope="module")
def model(module: nn.Module) -> Model:
    return Model.from_torch(module, torch.randn(2, 1, 9, 9))


@pytest.fixture(scope="module")
def examples(model: Model) -> Examples:
    return Examples({model.inputs[0].name: noise(192, 1, 9, 9)}, np.random.default_rng(1).integers(0, 5, 192))


def apply(part: Part, model: Model, data: Examples | None = None, loss: Loss = LOSS) -> tuple[CompressedModel, Work]:
    work = Work(model, loss=loss, data=data, validation=data)
    return part.apply(CompressedModel.of(model), work), work


def zeros(model: Model) -> dict[str, np.ndarray]:
    """What devices run: where the deployed weights are zero."""
    return {name: value == 0 for name, value in model.parameters.items()}


WEIGHTS = ("conv.weight", "deep.weight", "dense.weight")


@pytest.mark.sampled(every=3)
def test_the_smallest_of_all_go(model: Model) -> None:
    small, work = apply(PruneWeights(0.6), model)
    content = model.parameters
    flat = np.sort(np.abs(np.concatenate([content[name].ravel() for name in WEIGHTS])))
    threshold = flat[round(0.6 * flat.size)]
    gone = 0
    for name in WEIGHTS:
        found = small.parameters[name]
        np.testing.assert_array_equal(found, np.where(np.abs(content[name]) >= threshold, content[name], 0))
        gone += int((found == 0).sum())
        assert work.facts["layers"][name] == pytest.approx(np.mean(found == 0), abs=1e-4)
    assert gone == round(0.6 * flat.size)
    for name in set(content) - set(WEIGHTS):
        np.testing.assert_array_equal(small.parameters[name], content[name])
    sizes = work.facts["bytes"]
    assert sizes["deflated"] == sum(len(zlib.compress(v.tobytes(), 6)) for v in small.parameters.values())
    assert sizes["deflated"] < 0.8 * sizes["deflated before"]


def test_each_layer_its_share(model: Model) -> None:
    small, _ = apply(PruneWeights(0.5, scope="layer"), model)
    for name in WEIGHTS:
        content, found = model.parameters[name], small.parameters[name]
        assert (found == 0).sum() == round(0.5 * content.size)
        assert np.abs(content[found == 0]).max() <= np.abs(found[found != 0]).min()


def test_no_layer_is_emptied(model: Model) -> None:
    """All weights of one layer are far smaller than the others'."""
    shrunk = CompressedModel.of(model).with_parameters({"deep.weight": 1e-4 * model.parameters["deep.weight"]})
    small, _ = apply(PruneWeights(0.9), shrunk)
    left = small.parameters["deep.weight"] != 0
    assert left.sum() == int(0.1 * 0.1 * 576)
    assert sum((small.parameters[name] == 0).sum() for name in WEIGHTS) == round(0.9 * 688)


def test_the_graph_is_the_network_with_zeros(model: Model, module: nn.Module) -> None:
    small, _ = apply(PruneWeights(0.7), model)
    copy = Small().eval()
    state = {**module.state_dict(), **{n: torch.from_numpy(v.copy()) for n, v in small.parameters.items()}}
    copy.load_state_dict(state)
    x = noise(3, 1, 9, 9)
    expected = copy(torch.from_numpy(x)).detach().numpy()
    check_model(small.ir)
    deployed = small.deployed()
    check_model(deployed.ir)
    for found in (small, deployed):
        assert (found.inputs, found.outputs) == (model.inputs, model.outputs)
        np.testing.assert_allclose(run(found, x), expected, atol=1e-5)
    assert not any(name.endswith(".mask") for name in small.parameter_names)
    assert not any(n.op_type in ("Mul", "Cast") for n in deployed.ir.graph)  # computed once


def test_training_keeps_the_zeros(model: Model, examples: Examples) -> None:
    small, work = apply(PruneWeights(0.8), model)
    before = zeros(small)
    step = training.step_graph(small, LOSS, training.optimizers.sgd(momentum=0.9, weight_decay=0.01))
    check_model(step.ir)
    tuned = FineTune(steps=5, lr=0.05, optimizer="sgd").apply(small, Work(model, loss=LOSS, data=examples))
    after = zeros(tuned.deployed()) | {n: v for n, v in zeros(tuned).items() if n in WEIGHTS}
    for name in WEIGHTS:
        np.testing.assert_array_equal(before[name], after[name])
        assert not np.array_equal(small.parameters[name], tuned.parameters[name])
    assert work.facts["sparsity"] == pytest.approx(0.8, abs=1e-3)


def test_again_is_sparser_and_not_twice_masked(model: Model) -> None:
    half, _ = apply(PruneWeights(0.5), model)
    most, _ = apply(PruneWeights(0.9), half)
    assert len(most.ir.graph) == len(half.ir.graph)
    for name in WEIGHTS:
        assert np.all(zeros(most)[name] | ~zeros(half)[name])  # what was zero is zero
    direct, _ = apply(PruneWeights(0.9), model)
    for name in WEIGHTS:
        np.testing.assert_array_equal(most.parameters[name], direct.parameters[name])
    with pytest.raises(CompressionError, match=r"masked already, more than sparsity=0\.2"):
        apply(PruneWeights(0.2), half)


@pytest.mark.slow
def test_little_by_little(model: Model, examples: Examples) -> None:
    """The cubic schedule of Zhu & Gupta: 0.8 (1 - (1 - t / 4)^3) after each of four iterations."""
    seen: list[float] = []

    class Watched(Work):
        def train(self, model: CompressedModel, options: FineTune, **rest: Any) -> CompressedModel:
            found = layer_weights(model)
            seen.append(1 - sum(w.kept.sum() for w in found) / sum(w.kept.size for w in found))
            return super().train(model, options, **rest)

    work = Watched(model, loss=LOSS, data=examples)
    part = PruneWeights(0.8, iterations=4, fine_tune=FineTune(steps=3))
    small = part.apply(CompressedModel.of(model), work)
    np.testing.assert_allclose(seen, [0.8 * (1 - (1 - t / 4) ** 3) for t in (1, 2, 3, 4)], atol=2e-3)
    assert sum(zeros(small)[name].sum() for name in WEIGHTS) == round(0.8 * (72 + 576 + 40))


def test_taylor_is_weight_times_gradient(model: Model, module: nn.Module, examples: Examples) -> None:
    found = taylor(model, LOSS, list(WEIGHTS), examples)
    expected = {name: np.zeros(model.parameters[name].shape) for name in WEIGHTS}
    x, y = next(iter(examples.fields.values())), examples.labels
    assert y is not None
    for at in range(0, 192, 64):
        module.zero_grad()
        functional.cross_entropy(
            module(torch.from_numpy(x[at : at + 64])), torch.from_numpy(y[at : at + 64])
        ).backward()
        for name, parameter in module.named_parameters():
            if name in expected and parameter.grad is not None:
                expected[name] += np.abs((parameter * parameter.grad).detach().numpy()) / 3
    for name in WEIGHTS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-7)
    small, _ = apply(PruneWeights(0.5, criterion="taylor", scope="layer"), model, examples)
    for name in WEIGHTS:
        gone = zeros(small)[name]
        assert expected[name][gone].max() <= expected[name][~gone].min() * 1.01


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8)])
def test_n_of_m(model: Model, examples: Examples, n: int, m: int) -> None:
    small, work = apply(PruneNM(n, m, fine_tune=FineTune(steps=5, lr=0.05, optimizer="sgd")), model, examples)
    masked, _ = apply(PruneNM(n, m), model)
    assert work.facts["dense"] == {"conv.weight": "1 input channels, fewer than m"}
    for name in ("deep.weight", "dense.weight"):
        content = model.parameters[name]
        for found in (masked.parameters[name], small.parameters[name]):
            groups = np.moveaxis(found, 1, -1).reshape(-1, m)
            np.testing.assert_array_equal((groups != 0).sum(1), n)
        assert not np.array_equal(small.parameters[name], masked.parameters[name])
        groups, before = (np.moveaxis(v, 1, -1).reshape(-1, m) for v in (masked.parameters[name], content))
        for kept, all_of_them in zip(groups, before):
            np.testing.assert_array_equal(np.sort(np.abs(kept[kept != 0])), np.sort(np.abs(all_of_them))[-n:])


def test_a_last_group_may_be_shorter() -> None:
    found = pattern(np.array([[5.0, 1, 4, 3, 2, 9, 8], [1, 2, 3, 4, 5, 0, 6]]), 1, 2, 4)
    np.testing.assert_array_equal(found, [[1, 0, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 0, 1]])
    np.testing.assert_array_equal(pattern(np.arange(8.0)[:, None], 0, 1, 4)[:, 0], [0, 0, 0, 1, 0, 0, 0, 1])


def test_n_of_m_within_masks(model: Model) -> None:
    half, _ = apply(PruneWeights(0.5), model)
    both, _ = apply(PruneNM(), half)
    groups = np.moveaxis(both.parameters["deep.weight"], 1, -1).reshape(-1, 4)
    assert (groups != 0).sum(1).max() == 2
    assert np.all(zeros(both)["deep.weight"] | ~zeros(half)["deep.weight"])


LAYERS = {
    "Gemm": ("y = Gemm (x, w)", (8, 6), 0),
    "Gemm transposed": ("y = Gemm <transB = 1> (x, w)", (6, 8), 1),
    "MatMul": ("y = MatMul (x, w)", (8, 6), 0),
    "MatMul transposed": ("t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t)", (6, 8), 1),
    "MatMul behind a Reshape": (
        "q = Reshape (w, flat) t = Transpose <perm = [1, 0]> (q) y = MatMul (x, t)",
        (2, 3, 8),
        2,
    ),
    "Conv of TensorFlow": (
        "i = Reshape (x, four) k = Transpose <perm = [3, 2, 0, 1]> (w) c = Conv (i, k) y = Flatten (c)",
        (1, 1, 8, 6),
        2,
    ),
    "ConvTranspose": ("i = Reshape (x, four) c = ConvTranspose (i, w) y = Flatten (c)", (8, 3, 1, 2), 0),
    "LSTM": ("s = Unsqueeze (x, zero) l, y = LSTM <hidden_size = 2> (s, w, r)", (1, 8, 8), 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_groups_lie_along_what_the_layer_sums_over(name: str) -> None:
    """The axes are those of ONNX's operator definitions."""
    body, shape, axis = LAYERS[name]
    result = "[one, n, 2]" if name == "LSTM" else "[n, 6]"
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> agraph (float[n, 8] x) => (float{result} y) {{ {body} }}'
    )
    weights = {
        "w": noise(*shape), "four": np.array([-1, 8, 1, 1]), "flat": np.array([6, 8]), "zero": np.array([0])
    }  # fmt: skip
    if name == "LSTM":
        weights["r"] = noise(1, 8, 2, seed=2)
    used = {key for node in proto.graph.node for key in node.input}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in weights.items() if k in used)
    model = Model.from_proto(proto, parameters=[k for k in ("w", "r") if k in used])
    (weight, *_) = layer_weights(model)
    assert weight.axis == axis
    small, _ = apply(PruneNM(2, 4), model)
    kept = np.moveaxis(small.parameters["w"], axis, -1).reshape(-1, 2, 4)
    np.testing.assert_array_equal((kept != 0).sum(-1), 2)
    if name == "LSTM":
        assert work_dense(model) == {"r": "2 input channels, fewer than m"}


def work_dense(model: Model) -> dict[str, str]:
    found: dict[str, str] = apply(PruneNM(2, 4), model)[1].facts["dense"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_networks(cell: Literal["lstm", "gru"]) -> None:
    """PyTorch's weights reach the operator sliced by gate and joined again; the mask is on the parameter itself."""
    model = Model.from_torch(models.char_rnn(0, cell, hidden=8, layers=1), torch.zeros(2, 5, dtype=torch.int64))
    small, work = apply(PruneWeights(0.7), model, loss=training.losses.cross_entropy(axis=-1))
    assert set(work.facts["layers"]) == {"recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "decoder.weight"}
    x = np.random.default_rng(0).integers(0, 80, (4, 5))
    np.testing.assert_allclose(run(small.deployed(), x), run(small, x), atol=1e-5)
    step = training.step_graph(small, training.losses.cross_entropy(axis=-1), training.optimizers.sgd())
    losses = training.run_steps(step, [(x, np.roll(x, -1, 1))] * 5, {"lr": 1.0})
    assert losses[-1] < losses[0]
    two, _ = apply(PruneNM(), model)
    np.testing.assert_array_equal((two.parameters["recurrent.weight_hh_l0"].reshape(-1, 4) != 0).sum(1), 2)


ZOO: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "lenet": (models.lenet, (1, 28, 28)),
    "digits_cnn": (models.digits_cnn, (1, 28, 28)),
    "fedavg_cnn": (models.fedavg_cnn, (1, 28, 28)),
    "mlp": (models.mlp, (784,)),
    "cnn_1d": (models.cnn_1d, (6, 128)),
    "resnet8": (models.resnet8, (3, 32, 32)),
    "ds_cnn": (models.ds_cnn, (1, 49, 10)),
    "autoencoder": (models.autoencoder, (1, 28, 28)),
    "unet": (models.unet, (1, 28, 28)),
    "mobilenet_v2": (models.mobilenet_v2, (3, 32, 32)),
    "transformer": (models.transformer, (64,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_networks_keep_their_signature_and_train(name: str) -> None:
    build, shape = ZOO[name]
    x = noise(2, *shape) if name != "transformer" else np.random.default_rng(0).integers(0, 80, (2, *shape))
    model = Model.from_torch(build(0), torch.from_numpy(x))
    for part in (PruneWeights(0.5), PruneNM()):
        small, _ = apply(part, model)
        check_model(small.ir)
        assert (small.inputs, small.outputs) == (model.inputs, model.outputs)
        step = training.step_graph(small, training.losses.mse(), training.optimizers.sgd(), batch_norm="frozen")
        losses = training.run_steps(step, [(x, np.zeros_like(run(small, x)))] * 3, {"lr": 1e-3})
        assert losses[-1] < losses[0]
        np.testing.assert_allclose(run(small.deployed(), x), run(small, x), rtol=1e-3, atol=1e-4)


def test_what_reads_a_weight_twice_sees_one_mask() -> None:
    """A table for characters that is also the decoder (tied weights)."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> agraph (int64[n] x) => (float[n, 6] y)
        { e = Gather (w, x) t = Transpose <perm = [1, 0]> (w) y = MatMul (e, t) }"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(noise(6, 4), "w"))
    small, _ = apply(PruneWeights(0.5), Model.from_proto(proto))
    w = small.parameters["w"]
    assert (w == 0).sum() == 12
    np.testing.assert_allclose(run(small, np.arange(6)), w @ w.T, atol=1e-6)
    moved = small.with_parameters({"w": w + 1})
    seen = np.where(w == 0, 0, w + 1)
    np.testing.assert_allclose(run(moved, np.arange(6)), seen @ seen.T, atol=1e-5)


def test_errors_say_what_to_do(model: Model) -> None:
    with pytest.raises(CompressionError, match=r"sparsity must be above 0 and below 1, is 1\.5"):
        PruneWeights(1.5)
    with pytest.raises(CompressionError, match="give fine_tune="):
        PruneWeights(iterations=3)
    with pytest.raises(CompressionError, match="scope is one of"):
        PruneWeights(scope="all")  # type: ignore[arg-type]
    with pytest.raises(CompressionError, match="0 < n < m"):
        PruneNM(4, 4)
    with pytest.raises(CompressionError, match="no parameter matches 'ghost'"):
        apply(PruneWeights(exclude=("ghost",)), model)
    with pytest.raises(CompressionError, match="leaves no weights"):
        apply(PruneWeights(exclude=("*",)), model)
    with pytest.raises(CompressionError, match="training data"):
        apply(PruneWeights(criterion="taylor"), model)
    with pytest.raises(CompressionError, match="no such parameter"):
        write_masks(CompressedModel.of(model), {"ghost": np.ones(2, bool)})
    with pytest.raises(CompressionError, match=r"must be bool\[5, 8\], is bool\[5\]"):
        write_masks(CompressedModel.of(model), {"dense.weight": np.ones(5, bool)})


def test_after_quantization_it_is_too_late() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> agraph (float[n, 4] x) => (float[n, 3] y)
        <float s = {0.1}, int8 z = {0}>
        { q = QuantizeLinear (w, s, z) d = DequantizeLinear (q, s, z) y = MatMul (x, d) }"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(noise(4, 3), "w"))
    rounded = Model.from_proto(proto, parameters=["w"])
    for part in (PruneWeights(), PruneNM()):
        with pytest.raises(CompressionError, match="before quantization"):
            apply(part, rounded)
