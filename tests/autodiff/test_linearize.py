"""linearize as users call it: two models that together are the jvp, the second of them linear."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from gradient_cases.reference import evaluator

from archipel import Model, autodiff
from archipel.graph import check_model

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'

MODELS = {
    "network": """agraph (double[batch, 5] x, int64[batch] labels) => (double[batch, 3] y, double loss)
        <double[5, 4] w = {0.3, -1, 0.5, 2, 1, 0.1, -0.4, 0.7, 1, -1, 0.2, 0.6, -0.8, 1.5, 0.9, -0.3, 0.4, 1, -2, 0.5},
         double[4] b = {0.1, -0.2, 0.3, 0}, double[4, 3] v = {1, 0.5, -1, 2, -0.3, 0.7, 0.2, -1, 1, 0.4, 0.6, -0.9}> {
        a = MatMul (x, w)  z = Add (a, b)  h = Tanh (z)  y = MatMul (h, v)
        loss = SoftmaxCrossEntropyLoss (y, labels)
    }""",
    "convolution": """agraph (double[batch, 2, 5, 5] x) => (double[batch, 3, 5, 5] y)
        <double[3, 2, 3, 3] w = {0.1, 0.2, -0.3, 0.4, 0.5, -0.6, 0.7, 0.8, -0.9, 1.0, 1.1, -1.2, 1.3, 1.4, -1.5, 1.6,
         1.7, -1.8, 0.3, -1, 0.5, 2, 1, 0.1, -0.4, 0.7, 1, -1, 0.2, 0.6, -0.8, 1.5, 0.9, -0.3, 0.4, 1, 0.1, 0.2, 0.3,
         0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8}> {
        c = Conv <pads = [1, 1, 1, 1]> (x, w)  s = Sigmoid (c)  y = Relu (s)
    }""",
}


def model(text: str) -> Model:
    return Model.from_proto(onnx.parser.parse_model(HEAD + text))


def run(m: Model, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [port.name for port in m.outputs]
    return dict(zip(names, evaluator(m.to_bytes()).run(names, feed)))


@pytest.mark.parametrize(
    ("name", "of", "wrt"),
    [
        ("network", ["y", "loss"], ["x"]),
        ("network", ["loss"], ["x", "w", "b", "v"]),
        ("network", ["y"], ["z"]),
        ("convolution", ["y"], ["x"]),
        ("convolution", ["y"], ["x", "w"]),
    ],
)
def test_the_two_models_are_the_jvp(name: str, of: list[str], wrt: list[str]) -> None:
    m, rng = model(MODELS[name]), np.random.default_rng(3)
    at_point, linear = autodiff.linearize(m, of=of, wrt=wrt)
    pushed = autodiff.jvp(m, of=of, wrt=wrt)
    for made in (at_point, linear):
        check_model(made.ir)
    tangents, residuals = pushed.inputs[len(m.inputs) :], at_point.outputs[len(m.outputs) :]
    assert at_point.inputs == m.inputs
    assert at_point.outputs[: len(m.outputs)] == m.outputs
    assert linear.inputs == (*tangents, *residuals)
    assert all(port.name.endswith(".residual") for port in residuals)
    assert [port.name for port in linear.outputs] == [f"{n}.tangent" for n in of]
    assert set(linear.parameter_names) <= set(m.parameter_names)

    feed = {port.name: rng.standard_normal([2 if d == "batch" else d for d in port.shape]) for port in m.inputs}
    if "labels" in feed:
        feed["labels"] = np.array([2, 0])
    found = run(at_point, feed)
    for n, value in run(m, feed).items():
        np.testing.assert_array_equal(found[n], value)
    kept = {port.name: found[port.name] for port in residuals}

    def moved(scales: tuple[float, float]) -> dict[str, np.ndarray]:
        drawn = np.random.default_rng(4)
        parts = {
            port.name: [drawn.standard_normal([2 if d == "batch" else d for d in port.shape]) for _ in scales]
            for port in tangents
        }
        directions = {n: sum(s * p for s, p in zip(scales, both)) for n, both in parts.items()}
        result = run(linear, directions | kept)
        expected = run(pushed, feed | directions)
        for n, value in result.items():
            np.testing.assert_allclose(value, expected[n], rtol=1e-12, atol=1e-12)
        return result

    one, other, both = moved((1.0, 0.0)), moved((0.0, 1.0)), moved((2.0, -3.0))
    for n, value in both.items():
        np.testing.assert_allclose(value, 2 * one[n] - 3 * other[n], rtol=1e-9, atol=1e-12)


def test_nothing_of_the_model_is_computed_twice() -> None:
    """The linear part holds no activation, and only the products that the tangents go through."""
    _, linear = autodiff.linearize(model(MODELS["network"]), of=["y"], wrt=["x"])
    assert sorted(node.op_type for node in linear.ir.graph) == ["MatMul", "MatMul", "Mul"]
    assert [port.name for port in linear.inputs[1:]] == ["node_2.vjp/Sub.residual"]
    _, linear = autodiff.linearize(model(MODELS["convolution"]), of=["y"], wrt=["x"])
    assert {"Conv"} <= {node.op_type for node in linear.ir.graph} <= {"Conv", "Mul", "Cast"}
    masks = [port for port in linear.inputs if port.dtype == "bool"]
    assert len(masks) == 1  # of Relu; a real number would be eight times as large


def test_what_is_linear_needs_no_residuals() -> None:
    m = model("""agraph (double[n, 2] x) => (double[n, 2] y, double[n, 2] z) <double[2, 2] w = {1, 2, 3, 4}> {
        y = MatMul (x, w)  z = Exp (x)
    }""")
    at_point, linear = autodiff.linearize(m, of=["y"], wrt=["x"])
    assert [port.name for port in at_point.outputs] == ["y", "z"]
    assert [port.name for port in linear.inputs] == ["x.tangent"]
    assert linear.parameter_names == ("w",)


def test_inputs_outputs_and_zeros_as_residuals() -> None:
    m = model("""agraph (double[n] x, double[n] z) => (double[n] y, double[n] u) { y = Mul (x, z) u = Exp (z) }""")
    at_point, linear = autodiff.linearize(m, of=["y", "u"], wrt=["x"])
    feed = {"x": np.array([1.0, 2.0]), "z": np.array([0.5, -1.0])}
    found = run(at_point, feed)
    np.testing.assert_array_equal(found["z.residual"], feed["z"])
    kept = {port.name: found[port.name] for port in linear.inputs[1:]}
    result = run(linear, {"x.tangent": np.array([3.0, 4.0])} | kept)
    assert result["y.tangent"].tolist() == [1.5, -4.0]
    assert result["u.tangent"].tolist() == [0.0, 0.0]
    both = autodiff.linearize(m, of=["u"], wrt=["z"])
    assert [port.name for port in both[0].outputs] == ["y", "u", "u.residual"]


def test_residuals_whose_names_are_taken() -> None:
    proto = onnx.parser.parse_model(
        HEAD + "agraph (double[n] x, double[n] z, double[n] r) => (double[n] y) { a = Mul (x, z) y = Mul (a, r) }"
    )
    proto.graph.input[2].name = proto.graph.node[1].input[1] = "z.residual"
    at_point, linear = autodiff.linearize(Model.from_proto(proto), of=["y"], wrt=["x"])
    found = run(at_point, {"x": np.array([1.0]), "z": np.array([5.0]), "z.residual": np.array([7.0])})
    kept = {port.name: found[port.name] for port in linear.inputs[1:]}
    assert run(linear, {"x.tangent": np.array([2.0])} | kept)["y.tangent"].tolist() == [70.0]


def test_a_linear_model_is_differentiated_like_any_other() -> None:
    """Its transpose is the vjp: what each of the two gives for the same point."""
    m, rng = model(MODELS["network"]), np.random.default_rng(0)
    at_point, linear = autodiff.linearize(m, of=["y"], wrt=["x"])
    feed = {"x": rng.standard_normal((2, 5)), "labels": np.array([0, 1])}
    found = run(at_point, feed)
    cotangent = rng.standard_normal((2, 3))
    transposed = autodiff.vjp(linear, of=["y.tangent"], wrt=["x.tangent"])
    given = {port.name: found[port.name] for port in linear.inputs[1:]} | {"x.tangent": np.zeros((2, 5))}
    back = run(transposed, given | {"y.tangent.cotangent": cotangent})["x.tangent.grad"]
    expected = run(autodiff.vjp(m, of=["y"], wrt=["x"]), feed | {"y.cotangent": cotangent})["x.grad"]
    np.testing.assert_allclose(back, expected, rtol=1e-12)
