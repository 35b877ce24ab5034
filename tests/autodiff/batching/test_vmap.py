"""vmap of whole models: names, sizes, programs, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.autodiff import RULES, gradient, rule, vjp, vmap
from archipel.errors import AutodiffError
from archipel.graph.functions import KEPT


def parse(text: str) -> Model:
    return Model.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}'))


def run(model: Model, **inputs: np.ndarray) -> list[np.ndarray]:
    found: list[np.ndarray] = ReferenceEvaluator(model.to_bytes()).run(None, inputs)
    return found


LINEAR = """agraph (float[n, 2] x, float[2] bias) => (float[n, 3] y, float[2] twice)
    <float[2, 3] weight = {1, 2, 3, 4, 5, 6}> {
    shifted = Add (x, bias)
    y = MatMul (shifted, weight)
    twice = Add (bias, bias)
}"""


def test_names_stay_and_outputs_without_lanes_keep_their_shape() -> None:
    model = parse(LINEAR)
    mapped = vmap(model, over=["x"])
    assert [(p.name, p.shape) for p in mapped.inputs] == [("x", ("lanes", "n", 2)), ("bias", (2,))]
    assert [(p.name, p.shape) for p in mapped.outputs] == [("y", ("lanes", "n", 3)), ("twice", (2,))]
    assert mapped.parameter_names == ("weight",)
    assert [p.shape for p in model.inputs] == [("n", 2), (2,)]  # the model stays as it was


def test_a_parameter_is_repeated() -> None:
    mapped = vmap(parse(LINEAR), over=["weight"], size=4)
    assert mapped.parameters["weight"].shape == (4, 2, 3)
    x, bias = np.ones((5, 2), np.float32), np.zeros(2, np.float32)
    y, twice = run(mapped, x=x, bias=bias)
    np.testing.assert_allclose(y, np.broadcast_to(run(parse(LINEAR), x=x, bias=bias)[0], (4, 5, 3)))
    assert twice.shape == (2,)


def test_a_parameter_without_size_becomes_an_input() -> None:
    model = parse(LINEAR)
    mapped = vmap(model, over=["weight", "x"])
    ports = [("x", ("lanes", "n", 2)), ("bias", (2,)), ("weight", ("lanes", 2, 3))]
    assert [(p.name, p.shape) for p in mapped.inputs] == ports
    assert mapped.parameter_names == ()
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((4, 5, 2), np.float32), rng.standard_normal((4, 2, 3), np.float32)
    y, _ = run(mapped, x=x, bias=np.ones(2, np.float32), weight=weight)
    np.testing.assert_allclose(y, (x + 1) @ weight, rtol=1e-5)
    assert model.parameter_names == ("weight",)  # the model stays as it was


def test_vmap_of_vmap() -> None:
    twice = vmap(vmap(parse(LINEAR), over=["x"]), over=["x", "bias"])
    assert [(p.name, p.shape) for p in twice.inputs] == [("x", ("lanes_2", "lanes", "n", 2)), ("bias", ("lanes_2", 2))]
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal((2, 3, 4, 2), np.float32), rng.standard_normal((2, 2), np.float32)
    y, _ = run(twice, x=x, bias=bias)
    for i in range(2):
        for j in range(3):
            np.testing.assert_allclose(y[i, j], run(parse(LINEAR), x=x[i, j], bias=bias[i])[0], rtol=1e-6)


def test_gradient_of_vmap_and_vmap_of_gradient() -> None:
    cubes = """agraph (float[2] x) => (float s) {
        y = Mul (x, x)
        z = Mul (y, x)
        s = ReduceSum <keepdims = 0> (z)
    }"""
    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    per_lane = vmap(gradient(parse(cubes), of="s", wrt=["x"]), over=["x"])
    np.testing.assert_allclose(run(per_lane, x=x)[1], 3 * x**2)
    pulled = vjp(vmap(parse(cubes), over=["x"]), of=["s"], wrt=["x"])
    weights = np.array([1, 10, 100], np.float32)
    found = run(pulled, **{"x": x, "s.cotangent": weights})[1]
    np.testing.assert_allclose(found, 3 * x**2 * weights[:, None])


REFUSED = {
    "unknown name": ({"over": ["z"]}, "the model has no input or initializer 'z'; it has: x, bias, weight"),
    "inner value": ({"over": ["shifted"]}, "no input or initializer 'shifted'"),
    "twice": ({"over": ["x", "x"]}, "names x twice"),
    "empty": ({"over": []}, "over is empty"),
    "size": ({"over": ["x"], "size": 0}, "size=0; expected the number of lanes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(AutodiffError, match=message):
        vmap(parse(LINEAR), **arguments)


UNEVEN = {
    "Range": "agraph (int64 n) => (int64[m] y) <int64 a = {0}, int64 b = {1}> { y = Range (a, n, b) }",
    "Reshape": "agraph (float[4] x, int64[2] n) => (float[a, b] y) { y = Reshape (x, n) }",
    "NonZero": "agraph (float[4] n) => (int64[1, m] y) { y = NonZero (n) }",
}


@pytest.mark.parametrize("op_type", UNEVEN)
def test_results_of_uneven_sizes_are_refused(op_type: str) -> None:
    with pytest.raises(AutodiffError, match=rf"^vmap: {op_type} '.*'.* from lane to lane"):
        vmap(parse(UNEVEN[op_type]), over=["n"])


def test_a_function_with_a_rule_of_its_own_keeps_it() -> None:
    """It runs lane by lane, so that a gradient of the vmap finds the rule."""
    rule("test.vmap", "Twice")(lambda ctx: [ctx.op.Mul(ctx.cotangent, 7.0)])
    try:
        proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21, "test.vmap" : 1]>
            agraph (float[n] x) => (float s) { y = test.vmap.Twice (x)  s = ReduceSum <keepdims = 0> (y) }
            <domain: "test.vmap", opset_import: ["" : 21]> Twice (a) => (b) { b = Add (a, a) }""")
        mapped = vmap(Model.from_proto(proto), over=["x"])
        x = np.ones((3, 4), np.float32)
        np.testing.assert_allclose(run(mapped, x=x)[0], [8, 8, 8])
        pulled = vjp(mapped, of=["s"], wrt=["x"])
        session = onnxruntime.InferenceSession(pulled.to_bytes(), providers=["CPUExecutionProvider"])
        (found,) = session.run(["x.grad"], {"x": x, "s.cotangent": np.ones(3, np.float32)})
        np.testing.assert_allclose(found, np.full((3, 4), 7.0))
    finally:
        del RULES["test.vmap", "Twice"]
        KEPT.discard(("test.vmap", "Twice"))
