"""LoRA on transformers, of which each linear layer's weight comes through a Transpose, against LoRA by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import archipel
from archipel import models
from archipel.bundle import Bundle, generate_key
from archipel.compression.layer_weights import layer_weights
from archipel.converter import Signing, Training, convert
from archipel.converter.device_half.adapter_forms import Form, find_form
from archipel.graph import Model
from archipel.lite_runtime import Runtime
from archipel.training import losses, optimizers

Make = Callable[..., Bundle]
SIZE = {"vocabulary": 11, "length": 6, "width": 8, "heads": 2, "layers": 1, "dropout": 0.0}
ALPHA, RANK, RATE = 6.0, 2, 0.5

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: models.transformer(0, **SIZE),
    "gpt": lambda: models.gpt(0, **SIZE),
    "bert": lambda: models.bert(0, "classification", classes=3, **SIZE),
}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    torch.set_num_threads(1)

    def build(source: Model, loss: losses.Loss, **options: object) -> Bundle:
        training = Training(loss, optimizers.sgd(lr=0.1), strategy="lora", strategy_options=options, batch_size=4)
        return convert(source, tmp_path / "b", training=training, signing=Signing(generate_key()))

    return build


def examples(name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 9, (4, 6))  # the last tokens of the vocabulary never occur
    if name != "bert":
        return {"tokens": tokens}, rng.integers(0, 11, (4, 6))
    mask = (np.arange(6) < rng.integers(3, 7, (4, 1))).astype(np.int64)
    return {"tokens": tokens, "mask": mask, "token_types": rng.integers(0, 2, (4, 6))}, rng.integers(0, 3, 4)


def answer(device: Runtime, inputs: dict[str, np.ndarray]) -> np.ndarray:
    (found,) = device.predict(inputs).values()
    return found


def adapted(network: nn.Module, p: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hu et al. 2022, section 4.1: W + alpha / rank B A; an embedding looks rows up, so its A is [tokens, rank]."""
    state = {name: value.double() for name, value in network.named_parameters()}
    for name, value in state.items():
        if f"{name}.lora_a" not in p:
            continue
        a, b = p[f"{name}.lora_a"], p[f"{name}.lora_b"]
        state[name] = value.detach() + ALPHA / RANK * (b @ a if a.shape[1] == value.shape[1] else a @ b)
    return state


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "transformer"))]
)
@pytest.mark.sampled(every=4)
def test_adapters_of_transformers_train_as_in_pytorch(make: Make, name: str) -> None:
    network, (fields, labels) = NETWORKS[name]().eval(), examples(name)
    tensors = tuple(torch.from_numpy(field) for field in fields.values())
    loss = losses.cross_entropy() if name == "bert" else losses.cross_entropy(axis=-1)
    bundle = make(Model.from_torch(network, tensors), loss, targets="*", rank=RANK, alpha=ALPHA)
    inputs = dict(zip([port.name for port in bundle.program("predict").inputs], fields.values(), strict=True))
    device = Runtime(bundle)
    layers = {f"{key}.weight" for key, m in network.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert {key.removesuffix(".lora_a") for key in device.parameters() if key.endswith("lora_a")} == layers
    with torch.no_grad():
        np.testing.assert_allclose(answer(device, inputs), network(*tensors).numpy(), rtol=1e-4, atol=1e-5)
    # Neither A nor B is zero, so that both have gradients.
    rng = np.random.default_rng(2)
    first = {key: rng.normal(0, 0.2, value.shape).astype(np.float32) for key, value in device.parameters().items()}
    device.set_parameters(first)
    leaves = {key: torch.tensor(value).double().requires_grad_() for key, value in first.items()}
    logits = torch.func.functional_call(network.double(), adapted(network, leaves), tensors)
    np.testing.assert_allclose(answer(device, inputs), logits.detach().numpy(), rtol=1e-4, atol=1e-5)
    value = nn.functional.cross_entropy(logits.flatten(0, -2), torch.from_numpy(labels).flatten())
    expected = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    # A step of plain SGD on all examples moves by the rate times the gradient.
    device.fit(inputs, labels, epochs=1, batch_size=4, hyperparameters={"lr": RATE})
    for key, after in device.parameters().items():
        found = (first[key] - after) / RATE
        np.testing.assert_allclose(found, expected[key].numpy(), rtol=2e-3, atol=2e-6, err_msg=key)
    if name == "transformer":
        rows = np.abs(device.parameters()["tokens.weight.lora_a"] - first["tokens.weight.lora_a"]).sum(1)
        assert set(np.flatnonzero(rows)) == set(fields["tokens"].flat)


@pytest.mark.sampled(every=4)
def test_a_federated_round_moves_adapters_only(make: Make) -> None:
    network, (fields, labels) = NETWORKS["transformer"](), examples("transformer")
    loss = losses.cross_entropy(axis=-1)
    tokens = fields["tokens"]
    source = Model.from_torch(network, torch.from_numpy(tokens))
    bundle = make(source, loss, rank=RANK)
    before = bundle.parameters()
    result = archipel.simulate(bundle, [(tokens[:2], labels[:2]), (tokens[2:], labels[2:])], rounds=1)
    assert result.history[0].failed == ""
    after = result.parameters
    assert set(after) == {f"{name}.lora_{side}" for name in source.parameters for side in "ab"} & set(before)
    assert all("lora" in name for name in after)
    assert any(not np.array_equal(after[name], before[name]) for name in after)
    assert sum(array.size for array in after.values()) < 0.6 * sum(array.size for array in source.parameters.values())


def test_weights_behind_anything_have_a_form() -> None:
    """A cast, a rounding, a split of packed weights, the first factor, a stack of matrices, an embedding."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 4] x, int64[n] t) => (float[n, 4] y)
        <float[4, 3] cast, float[8, 4] packed, float[5, 4] first, float[2, 4, 6] stack, float[7, 4] table,
         float[4, 4] rounded, float[4, 4] scaled, float scale = {0.1}, int8 zero = {0}> {
            h = Cast <to = 10> (cast)  w = Cast <to = 1> (h)  a = MatMul (x, w)
            p, q = Split <num_outputs = 2> (packed)  pt = Transpose (p)  b = MatMul (x, pt)
            xt = Transpose (x)  c = MatMul (first, xt)
            d = MatMul (x, stack)
            e = Gather (table, t)
            i = QuantizeLinear (rounded, scale, zero)  r = DequantizeLinear (i, scale, zero)  f = MatMul (x, r)
            y = Mul (x, x)
        }"""
    proto = onnx.parser.parse_model(text)
    shapes = {"cast": (4, 3), "packed": (8, 4), "first": (5, 4), "stack": (2, 4, 6), "table": (7, 4),
              "rounded": (4, 4), "scaled": (4, 4)}  # fmt: skip
    for name, shape in shapes.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    model = Model.from_proto(proto, shapes)
    weights = {weight.name: weight for weight in layer_weights(model)}
    found = {name: find_form(model.ir.graph.initializers[name], weights.get(name)) for name in shapes}
    assert found == {
        "cast": Form((4, 3), True), "packed": Form((8, 4), True), "first": Form((5, 4), True),
        "stack": Form((2, 4, 6), False), "table": Form((7, 4), False, lookup=True), "rounded": Form((4, 4), True),
        "scaled": None,
    }  # fmt: skip
