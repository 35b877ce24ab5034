"""What every scheme must keep: what is exported is what was simulated, and `refresh` follows the parameters."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from archipel.compression import CompressedModel, Examples, FineTune, StaticInt8
from archipel.compression.deploy import deploy, refresh_program
from archipel.compression.part import Part
from archipel.compression.quantize.aware import QuantizationAware
from archipel.compression.quantize.dynamic import DynamicInt8
from archipel.compression.quantize.half import Float16
from archipel.compression.quantize.weight_only import WeightOnly
from archipel.graph import Model
from archipel.graph.check import check_model
from tests.support.quantized_network import Apply, Run, Stored

SCHEMES: dict[str, Part] = {
    "static": StaticInt8(narrow_convolutions="int8"),
    "static per tensor": StaticInt8(per_channel=False, calibration="mse", weights="mse"),
    "static int8": StaticInt8(activations="int8", calibration="percentile", weights="mse", reduce_range=True),
    "static fitted": StaticInt8(equalize=True, rounding="adaround", rounding_steps=60, bias_correction=True),
    "dynamic": DynamicInt8(convolutions=True),
    "dynamic per tensor": DynamicInt8(per_channel=False),
    "weights 8": WeightOnly(smallest=8),
    "weights 8 per channel": WeightOnly(block_size=None, smallest=8),
    "weights 4": WeightOnly(bits=4, block_size=16, smallest=8),
    "weights 4 shares": WeightOnly(bits=4, weights="mse", smallest=8),
    "weights 4 fitted": WeightOnly(bits=4, rounding="adaround", rounding_steps=60, smallest=8),
    "float16": Float16(),
    "float16 computed": Float16(compute="float16"),
}


@pytest.fixture(scope="module", params=SCHEMES)
def scheme(request: pytest.FixtureRequest, network: Model, examples: Examples, apply: Apply) -> CompressedModel:
    return apply(network, SCHEMES[request.param], examples)[0]


@pytest.mark.sampled(every=6)
def test_exported_is_what_was_simulated(scheme: CompressedModel, network: Model, examples: Examples, run: Run) -> None:
    deployed = scheme.deployed()
    assert (deployed.inputs, deployed.outputs) == (network.inputs, network.outputs)
    check_model(scheme.ir)
    check_model(deployed.ir)
    x = examples.fields["x"]
    exact, simulated, ran = run(network, x), run(scheme, x, optimized=False), run(deployed, x)
    step = (exact.max() - exact.min()) / 255
    assert np.abs(ran - simulated).max() <= step
    assert len(deployed.to_bytes()) < len(network.to_bytes())
    noise = np.square(ran - exact).mean() / np.square(exact).mean()
    assert 0 < noise < 2e-2


@pytest.mark.sampled(every=6)
def test_refresh_follows_the_parameters(scheme: CompressedModel, network: Model, stored: Stored) -> None:
    rng = np.random.default_rng(1)
    names = scheme.trainable_names
    moved = {n: (scheme.parameters[n] + 0.02 * rng.standard_normal(scheme.parameters[n].shape)).astype(np.float32)
             for n in names}  # fmt: skip
    start = {name: scheme.parameters[name] for name in names}
    deployment = deploy(scheme)
    program = refresh_program(deployment, start)
    assert program.signature is not None
    session = onnxruntime.InferenceSession(program.to_bytes(), providers=["CPUExecutionProvider"])
    fresh = session.run(None, {port.name: moved[port.name] for port in session.get_inputs()})
    found = stored(deployment.predict)
    changed = 0
    for port, value in zip(program.signature.outputs, fresh):
        changed += not np.array_equal(found[port.tensor], value)
        found[port.tensor] = value
    expected = stored(scheme.with_parameters(moved).deployed())
    assert found.keys() == expected.keys()
    assert changed > 0
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_it_still_trains(scheme: CompressedModel, network: Model, examples: Examples, apply: Apply) -> None:
    trained, _ = apply(scheme, QuantizationAware(FineTune(steps=2, batch_size=16, lr=1e-2)), examples)
    assert isinstance(trained, CompressedModel)
    assert trained.training_form is not None
    assert set(trained.training_form.parameter_names) == set(network.parameter_names)
    moved = [n for n in trained.trainable_names if not np.array_equal(trained.parameters[n], scheme.parameters[n])]
    assert len(moved) == len(trained.trainable_names)
    for name in trained.trainable_names:  # what devices train goes on from there
        np.testing.assert_array_equal(trained.training_form.parameters[name], trained.parameters[name])
    check_model(trained.deployed().ir)


@pytest.mark.parametrize(("choice", "integers"), [("float", 3), ("int8", 4)])
def test_convolutions_that_read_few_channels_stay_in_float(
    choice: Literal["float", "int8"], integers: int, network: Model, examples: Examples, apply: Apply, stored: Stored
) -> None:
    found, _ = apply(network, StaticInt8(narrow_convolutions=choice), examples)
    kinds = {name: content.dtype for name, content in stored(found.deployed()).items() if content.ndim > 1}
    assert sorted(map(str, kinds.values())) == ["float32"] * (4 - integers) + ["int8"] * integers
    assert [name for name, dtype in kinds.items() if dtype == np.float32 and "conv.weight" not in name] == []


def test_a_network_of_nothing_but_such_a_convolution_is_quantized(
    examples: Examples, apply: Apply, stored: Stored
) -> None:
    model = Model.from_torch(nn.Conv2d(2, 4, 3).eval(), torch.zeros(2, 2, 8, 8))
    found, _ = apply(model, StaticInt8(), Examples({"input": examples.fields["x"]}))
    assert np.int8 in {content.dtype.type for content in stored(found.deployed()).values()}
