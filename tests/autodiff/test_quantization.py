"""Straight through quantization: as PyTorch's fake quantization, and only where an integer was quantized."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from archipel import Model, autodiff
from archipel.errors import NotDifferentiableError

PAIR = """
agraph (float[n] x, float s) => (float[n] y, float loss) <uint8 z = {3}, float half = {0.5}>
{
    q = QuantizeLinear (x, s, z)
    %s
    loss = ReduceSum <keepdims = 0> (y)
}
"""
BACK = "y = DequantizeLinear (q, s, z)"


def model(middle: str = BACK) -> Model:
    text = PAIR % middle
    return Model.from_proto(onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]>\n' + text))


def run(m: Model, output: str, x: np.ndarray, s: float) -> np.ndarray:
    session = onnxruntime.InferenceSession(m.to_bytes(), providers=["CPUExecutionProvider"])
    feed = {"x": x.astype(np.float32), "s": np.array(s, np.float32)}
    return session.run([output], {port.name: feed[port.name] for port in session.get_inputs()})[0]


def test_equals_fake_quantization_in_pytorch() -> None:
    rng = np.random.default_rng(0)
    x, s = rng.uniform(-4, 30, 400).astype(np.float32), 0.1
    tx, ts = torch.tensor(x, requires_grad=True), torch.tensor([s], requires_grad=True)
    y = torch._fake_quantize_learnable_per_tensor_affine(tx, ts, torch.tensor([3.0]), 0, 255, 1.0)
    grad_x, grad_s = torch.autograd.grad(y.sum(), [tx, ts])
    g = autodiff.gradient(model(), of="loss", wrt=["x", "s"])
    np.testing.assert_array_equal(run(g, "x.grad", x, s), grad_x.numpy())
    assert 0 < grad_x.sum() < 400
    np.testing.assert_allclose(run(g, "s.grad", x, s), grad_s.item(), rtol=1e-3)


def test_one_scale_cancels() -> None:
    """Between the two operators the gradient is not scaled and scaled back."""
    g = autodiff.gradient(model(), of="loss", wrt=["x"])
    nodes = [node.op_type for node in onnx.load_from_string(g.to_bytes()).graph.node]
    assert nodes.count("Div") == 1  # x / s, for the mask
    assert nodes.count("Mul") == 1


def test_an_integer_read_twice_adds_up() -> None:
    g = autodiff.gradient(
        model("a = DequantizeLinear (q, s, z)  b = DequantizeLinear (q, half)  y = Add (a, b)"), of="loss", wrt=["x"]
    )
    np.testing.assert_allclose(run(g, "x.grad", np.array([0.4, 1e4]), 0.25), [1 + 0.5 / 0.25, 0.0])


@pytest.mark.parametrize(
    ("middle", "stop"),
    [
        ("y = Cast <to = 1> (q)", "Cast"),
        ("t = Transpose (q)  y = DequantizeLinear (t, half, z)", "Transpose"),
        (
            "e = Cast <to = 6> (q)  y = DequantizeLinear (e, half)",
            "Cast",
        ),
    ],
)
def test_other_readers_of_the_integer_pass_nothing_on(middle: str, stop: str) -> None:
    with pytest.raises(NotDifferentiableError, match=f"with respect to 'x' does not exist.*only through {stop}"):
        autodiff.gradient(model(middle), of="loss", wrt=["x"])


@pytest.mark.parametrize(("of", "wrt"), [("q", "x"), ("loss", "q"), ("loss", "z")])
def test_integers_have_no_gradient_of_their_own(of: str, wrt: str) -> None:
    with pytest.raises(NotDifferentiableError, match="is uint8; only floating-point values have gradients"):
        autodiff.vjp(model(), of=[of], wrt=[wrt])
