"""float16: what is stored, what is computed."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from archipel.compression import Examples, Float16
from archipel.errors import CompressionError
from archipel.graph import Model
from tests.support.quantized_network import Apply, Run, Stored


@pytest.mark.sampled(every=3)
def test_weights_are_stored_in_half_the_bytes(apply: Apply, run: Run, stored: Stored) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3))
    x = np.random.default_rng(0).standard_normal((5, 30)).astype(np.float32)
    model = Model.from_torch(network, torch.from_numpy(x))
    found = apply(model, Float16())[0].deployed()
    kept = stored(found)
    halves = [value for value in kept.values() if value.dtype == np.float16]
    assert sum(value.size for value in halves) == sum(value.size for value in model.parameters.values())
    assert not [name for name, value in kept.items() if value.dtype == np.float32 and value.size > 1]
    with torch.no_grad():
        for tensor in network.parameters():
            tensor.copy_(tensor.half().float())
        expected = network(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(run(found, x), expected, atol=1e-6)


def test_everything_computed_in_half(network: Model, examples: Examples, apply: Apply, run: Run) -> None:
    """All values between the input and the output are float16; nearly what float32 computes comes out."""
    found = apply(network, Float16(compute="float16"))[0].deployed()
    assert (found.inputs, found.outputs) == (network.inputs, network.outputs)
    inferred = onnx.shape_inference.infer_shapes(onnx.load_from_string(found.to_bytes()), strict_mode=True)
    kinds = {value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    assert kinds - {onnx.TensorProto.INT64} == {onnx.TensorProto.FLOAT16}
    x = examples.fields["x"]
    exact = run(network, x)
    np.testing.assert_allclose(run(found, x), exact, atol=5e-3 * np.abs(exact).max())


def test_the_model_that_was_given_stays(network: Model, apply: Apply) -> None:
    """Graphs share their types when they are copied."""
    apply(network, Float16(compute="float16"))
    kinds = {value.dtype for node in network.ir.graph for value in node.outputs}
    assert ir.DataType.FLOAT16 not in kinds


def test_what_an_operator_takes_in_float32_only_stays_so(apply: Apply, run: Run) -> None:
    """Scales of Resize; a number type that is asked for."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    graph (float[batch, 2, 3, 3] x) => (float[batch, 4, 6, 6] y)
        <float[4, 2, 1, 1] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[4] s = {1, 1, 2, 2}>
    { c = Conv (x, w)  i = Cast <to = 6> (c)  f = Cast <to = 1> (i)  h = Add (c, f)
      y = Resize <mode = "nearest"> (h, , s) }"""
    model = Model.from_proto(onnx.parser.parse_model(text), ["w"])
    x = np.random.default_rng(0).standard_normal((2, 2, 3, 3)).astype(np.float32)
    found = apply(model, Float16(compute="float16"))[0]
    np.testing.assert_allclose(run(found.deployed(), x), run(model, x), rtol=5e-3, atol=5e-2)


def test_errors(network: Model, apply: Apply) -> None:
    large = network.copy()
    content = network.parameters["dense.weight"] * 1e7
    large.ir.graph.initializers["dense.weight"].const_value = ir.tensor(content, name="dense.weight")
    with pytest.raises(CompressionError, match=r"'dense.weight' has values beyond 65504; exclude it"):
        apply(large, Float16())
    apply(large, Float16(exclude=("dense.weight",)))
    with pytest.raises(CompressionError, match="compute is one of float32, float16, got 'int8'"):
        Float16(compute="int8")  # type: ignore[arg-type]
