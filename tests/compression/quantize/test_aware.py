"""Quantization-aware training, and learned steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from archipel.compression import CompressedModel, Examples, FineTune, QuantizationAware, StaticInt8
from archipel.compression.quantize.aware import _activation_scales
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.graph.shapes import constant_array
from tests.support.quantized_network import Apply, Run

COARSE = StaticInt8(per_channel=False, reduce_range=True, narrow_convolutions="int8")


@pytest.fixture(scope="module")
def labelled(network: Model, examples: Examples, run: Run) -> Examples:
    return Examples(dict(examples.fields), run(network, examples.fields["x"]).argmax(axis=1))


def scales(model: CompressedModel) -> dict[str, np.ndarray]:
    return _activation_scales(model.ir.graph)


@pytest.mark.slow
def test_training_lowers_the_loss_of_what_devices_run(network: Model, labelled: Examples, apply: Apply) -> None:
    from archipel.compression.work import Work
    from archipel.training.losses import cross_entropy

    before, _ = apply(network, COARSE, labelled)
    after, facts = apply(before, QuantizationAware(FineTune(steps=40, lr=5e-3)), labelled)
    work = Work(network, loss=cross_entropy(), validation=labelled)
    assert work.evaluate(after).loss < 0.8 * work.evaluate(before).loss
    assert len(facts["steps_moved_by"]) == len(scales(before)) == 5
    moved = [scales(after)[name] / value for name, value in scales(before).items()]
    np.testing.assert_allclose(moved, list(facts["steps_moved_by"].values()), atol=1e-3)
    assert max(np.abs(np.log(moved))) > 0.01
    # The graph is as it was: only numbers are different.
    assert [node.op_type for node in after.ir.graph] == [node.op_type for node in before.ir.graph]
    assert after.parameter_names == before.parameter_names


@pytest.mark.sampled(every=4)
def test_fixed_steps(network: Model, labelled: Examples, apply: Apply) -> None:
    before, _ = apply(network, COARSE, labelled)
    after, facts = apply(before, QuantizationAware(FineTune(steps=3, lr=5e-3), learn_steps=False), labelled)
    assert facts["steps_moved_by"] == {}
    for name, value in scales(before).items():
        np.testing.assert_array_equal(scales(after)[name], value)
    running = [name for name in network.parameter_names if "running" in name]
    for name in running:  # frozen: they are folded
        np.testing.assert_array_equal(after.parameters[name], network.parameters[name])


@pytest.mark.sampled(every=8)
def test_one_step_of_a_learned_scale_against_pytorch(apply: Apply) -> None:
    """SGD on r with scale exp(r), r = 0: r - lr scale dL/dscale, with PyTorch's fake quantization."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 3)
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    y = np.random.default_rng(1).integers(0, 3, 8)
    model = Model.from_torch(layer, torch.from_numpy(x))
    # Calibrated on half of the range, so that some saturate.
    before, _ = apply(model, StaticInt8(activations="int8"), Examples({"input": x / 2}))
    (name, scale), rate = next(iter(scales(before).items())), 0.1
    options = FineTune(steps=1, batch_size=8, optimizer="sgd", momentum=0.0, lr=rate, schedule="constant")
    after, _ = apply(before, QuantizationAware(options), Examples({"input": x}, y))
    step = torch.tensor(scale.reshape(1), requires_grad=True)
    weight = layer.weight.detach()
    largest = weight.abs().amax(dim=1, keepdim=True) / 127
    read = torch._fake_quantize_learnable_per_tensor_affine(torch.from_numpy(x), step, torch.zeros(1), -128, 127, 1.0)
    answer = torch.nn.functional.linear(read, torch.round(weight / largest) * largest, layer.bias)
    torch.nn.functional.cross_entropy(answer, torch.from_numpy(y)).backward()
    expected = scale * np.exp(-rate * scale * step.grad.numpy())
    assert abs(expected.item() / scale.item() - 1) > 1e-4
    np.testing.assert_allclose(scales(after)[name], expected.reshape(()), rtol=1e-6)


@pytest.mark.sampled(every=4)
def test_nothing_to_be_aware_of(network: Model, labelled: Examples, apply: Apply) -> None:
    with pytest.raises(CompressionError, match="put StaticInt8 before it"):
        apply(network, QuantizationAware(), labelled)


@pytest.mark.parametrize(("least", "most", "type_"), [(0.0, 6.0, "uint8"), (-1.0, 1.0, "int8"), (-1.0, 6.0, "uint8")])
@pytest.mark.sampled(every=4)
def test_steps_stay_within_a_clip(apply: Apply, tmp_path: Path, least: float, most: float, type_: str) -> None:
    """Steps that training would lengthen beyond it; a runtime then drops the Clip."""
    torch.manual_seed(0)
    clipped = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Hardtanh(least, most), nn.Conv2d(8, 8, 3), nn.Flatten())
    x = 4 * np.random.default_rng(0).standard_normal((16, 8, 8, 8)).astype(np.float32)
    model = Model.from_torch(clipped, torch.from_numpy(x))
    before, _ = apply(model, StaticInt8(activations=type_), Examples({"input": x}))
    [quantize] = [n for n in before.ir.graph if n.op_type == "QuantizeLinear" and n.inputs[0].producer() is not None
                  and n.inputs[0].producer().op_type == "Clip"]  # fmt: skip
    name, zero = quantize.inputs[1].name, constant_array(quantize.inputs[2])
    assert zero is not None
    ends = np.iinfo(type_)
    # Labels that ask for more of everything.
    options = FineTune(steps=5, batch_size=16, optimizer="sgd", momentum=0.0, lr=50.0, schedule="constant")
    after, _ = apply(before, QuantizationAware(options), Examples({"input": x}, np.zeros(16, np.int64)))
    scale = scales(after)[name]
    assert scale != scales(before)[name]
    assert scale * np.float32(ends.max - int(zero)) <= np.float32(most)
    assert scale * np.float32(ends.min - int(zero)) >= np.float32(least)
    path = tmp_path / "optimized.onnx"
    options_ = onnxruntime.SessionOptions()
    options_.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(after.to_bytes(), options_, providers=["CPUExecutionProvider"])
    assert "Clip" not in {node.op_type for node in onnx.load(path).graph.node}
