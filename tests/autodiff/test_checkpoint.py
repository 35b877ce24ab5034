"""checkpoint: gradients stay the same to the last bit, less is alive at once, and the choice keeps within a budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import archipel
from archipel import Model, autodiff, models
from archipel.errors import AutodiffError, GraphError
from archipel.graph import check_model
from archipel.graph.liveness import execution_order, peak_bytes
from archipel.graph.sizes import Sizes
from archipel.graph.walk import origins

LAYERS, BATCH = 12, 256


def chain(layers: int = LAYERS, width: int = 64, dtype: str = "float") -> Model:
    """tanh(x w_i) of `layers` weights, one after the other, then the mean of squares."""
    weights = ", ".join(f"{dtype}[{width}, {width}] w{i}" for i in range(layers))
    body, last = [], "x"
    for i in range(layers):
        body += [f"p{i} = MatMul ({last}, w{i})", f"h{i} = Tanh (p{i})"]
        last = f"h{i}"
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g ({dtype}[batch, {width}] x, {weights}) => ({dtype} loss) {{
        {chr(10).join(body)}
        square = Mul ({last}, {last})
        loss = ReduceMean <keepdims = 0> (square)
    }}"""
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for i in range(layers):
        content = rng.standard_normal((width, width)) * 0.2
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(content.astype(np.float64 if dtype == "double" else np.float32), f"w{i}")
        )
    del proto.graph.input[1:]
    return Model.from_proto(proto)


def run(model: Model, x: np.ndarray) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    # Without fusions that differ between the first and the second computation: the numbers are then the same.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.to_bytes(), options, providers=["CPUExecutionProvider"])
    names = [port.name for port in model.outputs]
    return dict(zip(names, session.run(names, {model.inputs[0].name: x})))


def alive(model: Model, batch: int = BATCH) -> int:
    sizes = Sizes(model.ir, batch)
    return peak_bytes(execution_order(model.ir.graph), sizes.nbytes, model.ir.graph.outputs)


def products(model: Model) -> int:
    return sum(node.op_type in ("MatMul", "Gemm") for node in model.ir.graph)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("dtype", ["float", "double"])
def test_gradients_are_the_same_and_less_is_alive(dtype: str) -> None:
    model = chain(dtype=dtype)
    marked = autodiff.checkpoint(model)
    plain, small = (autodiff.gradient(each, wrt=[*each.parameter_names, "x"]) for each in (model, marked))
    x = np.random.default_rng(1).standard_normal((BATCH, 64)).astype(np.float64 if dtype == "double" else np.float32)
    assert same(run(plain, x), run(small, x))
    # 12 layers, of which sqrt(12) or so are kept, and as many alive in a part: 2 sqrt(n) of n (Chen et al. 2016).
    assert alive(small) < 0.75 * alive(plain)


@pytest.mark.sampled(every=3)
def test_the_model_itself_stays() -> None:
    model = chain()
    marked = autodiff.checkpoint(model)
    assert [node.name for node in marked.ir.graph] == [node.name for node in model.ir.graph]
    assert marked.parameter_names == model.parameter_names
    x = np.ones((2, 64), np.float32)
    assert same(run(marked, x), run(model, x))
    again = Model.from_proto(onnx.ModelProto.FromString(marked.to_bytes()))  # the marks are in the file
    grads = [autodiff.gradient(each, wrt=["w0"]) for each in (marked, again)]
    assert alive(grads[0]) == alive(grads[1])


@pytest.mark.sampled(every=3)
def test_values_to_keep_by_name() -> None:
    model = chain()
    plain = autodiff.gradient(model, wrt=model.parameter_names)
    small = autodiff.gradient(autodiff.checkpoint(model, at=["h3", "h7"]), wrt=model.parameter_names)
    x = np.random.default_rng(1).standard_normal((BATCH, 64)).astype(np.float32)
    assert same(run(plain, x), run(small, x))
    twins = {node.op_type for node in small.ir.graph if node.name.startswith("segment_0.again/")}
    assert {"MatMul", "Tanh"} <= twins
    assert not any("segment_2" in node.name for node in small.ir.graph)
    assert alive(small) < alive(plain)


def test_what_weights_alone_make_is_kept() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    agraph (float[n, 2] x) => (float loss) <float[2, 2] w = {1, 2, 3, 4}> {
        e = Exp (w)  p = MatMul (x, e)  h = Tanh (p)  q = MatMul (h, e)  y = Tanh (q)  r = MatMul (y, w)
        loss = ReduceSum <keepdims = 0> (r)
    }"""
    marked = autodiff.checkpoint(Model.from_proto(onnx.parser.parse_model(text)), at=["y"])
    graph = autodiff.gradient(marked, wrt=["w", "x"]).ir.graph
    again = {node.op_type for node in graph if ".again/" in str(node.name)}
    assert "MatMul" in again
    assert "Exp" not in again


def test_a_part_that_passes_its_cotangent_on() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> agraph (float[n] x, float[n] z) => (float loss) {
        v = Sin (x)  u = Add (v, z)  square = Mul (u, u)  loss = ReduceSum <keepdims = 0> (square)
    }"""
    marked = autodiff.checkpoint(Model.from_proto(onnx.parser.parse_model(text)), at=["v", "u"])
    session = onnxruntime.InferenceSession(autodiff.gradient(marked, wrt=["x"]).to_bytes())
    x, z = np.array([0.3, -1.2], np.float32), np.array([2.0, 0.5], np.float32)
    (found,) = session.run(["x.grad"], {"x": x, "z": z})
    np.testing.assert_allclose(found, 2 * (np.sin(x) + z) * np.cos(x), rtol=1e-6)


def test_a_part_waits_for_the_gradients_behind_it() -> None:
    marked = autodiff.checkpoint(chain(), at=["h3", "h7"])
    graph = autodiff.gradient(marked, wrt=marked.parameter_names).ir.graph
    gradients = {value.name: value for value in graph.outputs}
    for part, behind in (("segment_1", range(8, 12)), ("segment_0", range(4, 8))):
        twins = [node for node in graph if node.name.startswith(f"{part}.again/") and node.op_type == "Tanh"]
        assert twins
        for node in twins:
            before = set(origins(node.outputs[0]))
            assert all(gradients[f"w{i}.grad"] in before for i in behind)
    # Each part waits, with the one value that it starts from, for an element of a cotangent and of four gradients.
    late = [node for node in graph if ".again/" in str(node.name)]
    assert [len(node.inputs) for node in late if node.op_type == "Concat"] == [5, 5]
    assert [node.op_type for node in late].count("Add") == 2


@pytest.mark.parametrize("share", [0.9, 0.75])
@pytest.mark.sampled(every=4)
def test_budget_is_kept_with_less_work_the_larger_it_is(share: float) -> None:
    model = chain()
    plain = autodiff.vjp(model, ["loss"], model.parameter_names)
    budget = int(share * alive(plain))
    marked = autodiff.checkpoint(model, budget_bytes=budget, batch=BATCH)
    small = autodiff.vjp(marked, ["loss"], model.parameter_names)
    assert alive(small) <= budget
    least = autodiff.vjp(autodiff.checkpoint(model, batch=BATCH), ["loss"], model.parameter_names)
    assert products(plain) < products(small) <= products(least)


@pytest.mark.sampled(every=3)
def test_a_budget_that_is_large_enough_marks_nothing() -> None:
    model = chain()
    marked = autodiff.checkpoint(autodiff.checkpoint(model), budget_bytes=10**9)
    plain, same_ = (autodiff.gradient(each, wrt=["w0"]) for each in (model, marked))
    assert len(plain.ir.graph) == len(same_.ir.graph)


@pytest.mark.sampled(every=4)
def test_the_smallest_budget_that_an_error_names_is_reached() -> None:
    model = chain()
    with pytest.raises(
        AutodiffError, match=r"a budget of 1000 bytes .* with batches of 256; the smallest that is: "
    ) as error:
        autodiff.checkpoint(model, budget_bytes=1000, batch=BATCH)
    smallest = int(re.findall(r"\d+", str(error.value))[-1])
    marked = autodiff.checkpoint(model, budget_bytes=smallest, batch=BATCH)
    assert alive(autodiff.vjp(marked, ["loss"], model.parameter_names)) <= smallest


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"at": ["nothing"]}, "no node of the model computes a value 'nothing'"),
        ({"at": ["w0"]}, "no node of the model computes a value 'w0'"),
        ({"at": []}, "at is empty"),
        ({"at": ["h1", "h1"]}, "at names h1 twice"),
        ({"at": ["h1"], "budget_bytes": 10}, "budget_bytes chooses the parts, and so do names in at"),
        ({"budget_bytes": 0}, "budget_bytes must be a whole number of bytes, 1 or more, is 0"),
        ({"budget_bytes": 1.5}, "budget_bytes must be a whole number of bytes, 1 or more, is 1.5"),
        ({"batch": 0}, "batch must be a whole number of examples, 1 or more, is 0"),
    ],
)
def test_errors(arguments: dict, text: str) -> None:
    with pytest.raises(AutodiffError, match=re.escape(text)):
        autodiff.checkpoint(chain(4), **arguments)


@pytest.mark.sampled(every=3)
def test_composes_with_second_derivatives() -> None:
    model = chain(4, 3, "double")
    marked = autodiff.checkpoint(model, at=["h1"])
    x = np.random.default_rng(1).standard_normal((2, 3))

    def results(each: Model) -> list[dict[str, np.ndarray]]:
        curvature = autodiff.hessian_vector(each, wrt=["x"])
        twice = autodiff.vjp(autodiff.gradient(each, wrt=["x"]), ["x.grad"], ["w0"])
        pushed = autodiff.jvp(each, ["loss"], ["x"])
        found = []
        for graph in (curvature, twice, pushed):
            session = onnxruntime.InferenceSession(graph.to_bytes(), providers=["CPUExecutionProvider"])
            names = [port.name for port in graph.outputs]
            found.append(dict(zip(names, session.run(names, {port.name: x for port in graph.inputs}))))
        return found

    for plain, small in zip(results(model), results(marked)):
        for name, value in plain.items():
            np.testing.assert_allclose(small[name], value, rtol=1e-12, atol=1e-15)


def test_lanes() -> None:
    model = chain(4, 3)
    x = np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)
    results = []
    for each in (model, autodiff.checkpoint(model, at=["h1"])):
        lanes = autodiff.vmap(autodiff.gradient(each, wrt=["w0", "x"]), over=["x"])
        results.append(onnxruntime.InferenceSession(lanes.to_bytes()).run(["w0.grad", "x.grad"], {"x": x}))
    for a, b in zip(*results):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-8)


LOOPS = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 4] x, bool c) => (float loss) <float[4, 4] w, int64 k = {3}, bool t = {1}> {
    a = MatMul (x, w)
    b = Tanh (a)
    y = Loop <body = body (int64 i, bool go, float[n, 4] h) => (bool on, float[n, 4] next) {
        p = MatMul (h, w)  q = Add (p, b)  next = Tanh (q)  on = Identity (go) }> (k, t, b)
    d = MatMul (y, w)
    e = If (c) <then_branch = th () => (float[n, 4] m) { m = Mul (d, y) },
        else_branch = el () => (float[n, 4] s) { s = Sin (d) }>
    f = Tanh (e)
    loss = ReduceSum <keepdims = 0> (f)
}"""


@pytest.mark.parametrize("at", [["e"], ["b", "d"]])
@pytest.mark.sampled(every=4)
def test_loops_and_branches_that_capture_values(at: list[str]) -> None:
    proto = onnx.parser.parse_model(LOOPS)
    w = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    model = Model.from_proto(proto)
    plain, small = (autodiff.gradient(each, wrt=["w", "x"]) for each in (model, autodiff.checkpoint(model, at=at)))
    assert any(node.op_type == "Loop" and "again" in node.name for node in small.ir.graph)
    sessions = [onnxruntime.InferenceSession(each.to_bytes()) for each in (plain, small)]
    for c in (True, False):
        feed = {"x": w[:3], "c": np.array(c)}
        for a, b in zip(*(session.run(None, feed) for session in sessions)):
            np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-7)


@pytest.mark.sampled(every=3)
def test_loops_that_only_their_condition_ends() -> None:
    """Parts are chosen for an assumed number of iterations; a budget needs the largest number."""
    proto = onnx.parser.parse_model(LOOPS.replace("x, bool c)", "x, bool c, int64 k)").replace("int64 k = {3}, ", ""))
    w = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    model = Model.from_proto(proto)
    plain, small = (autodiff.gradient(each, wrt=["w"]) for each in (model, autodiff.checkpoint(model)))
    assert any("again" in node.name for node in small.ir.graph)
    feed = {"x": w[:3], "c": np.array(True), "k": np.array(5)}
    loss, slope = onnxruntime.InferenceSession(plain.to_bytes()).run(None, feed)
    again = onnxruntime.InferenceSession(small.to_bytes()).run(None, feed)
    np.testing.assert_allclose(again[0], loss, rtol=1e-6)
    np.testing.assert_allclose(again[1], slope, rtol=1e-5, atol=1e-6)
    with pytest.raises(GraphError, match=r"no fixed number of iterations.*Model\.limit_loops"):
        autodiff.checkpoint(model, budget_bytes=1)


def test_a_maximum_is_looked_for_among_the_values_that_it_is_of() -> None:
    """Values may come out with another last bit the second time: a pool's gradient then divided by 0."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[n, 3, 8] x, float[3, 1] b) => (float loss) <float[4] w = {1, 2, 3, 4}> {
        s = Add (x, b)  t = Tanh (s)  p = MaxPool <kernel_shape = [2], strides = [2]> (t)
        q = Mul (p, w)  u = Tanh (q)  loss = ReduceSum <keepdims = 0> (u)
    }"""
    model = autodiff.checkpoint(Model.from_proto(onnx.parser.parse_model(text)), at=["p"])
    graph = autodiff.gradient(model, wrt=["b", "w"]).ir.graph
    [equal] = [node for node in graph if node.op_type == "Equal"]
    values, spread = (value.producer() for value in equal.inputs)
    assert (values.op_type, spread.op_type) == ("Tanh", "Resize")
    pool = spread.inputs[0].producer()
    assert pool.op_type == "MaxPool"
    assert pool.inputs[0].producer() is values
    assert "again" in values.name


@pytest.mark.slow
def test_recurrent_and_transformer() -> None:
    for network, tolerance in ((models.transformer(0), 0.0), (models.char_rnn(0, cell="lstm"), 2e-6)):
        tokens = np.random.default_rng(0).integers(0, 80, (2, 64))
        model = Model.from_torch(network, tokens)
        wrt, of = list(model.parameter_names), [model.outputs[0].name]
        plain = autodiff.vjp(model, of, wrt)
        small = autodiff.vjp(autodiff.checkpoint(model), of, wrt)
        assert alive(small) < 0.8 * alive(plain)
        results = []
        for graph in (plain, small):
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            session = onnxruntime.InferenceSession(graph.to_bytes(), options, providers=["CPUExecutionProvider"])
            cotangent = np.random.default_rng(2).standard_normal((2, 64, 80)).astype(np.float32)
            feed = {graph.inputs[0].name: tokens, graph.inputs[1].name: cotangent}
            results.append(session.run(None, feed))
        for a, b in zip(*results):
            # The LSTM's first computation is ONNX Runtime's own, the second one a loop that rounds differently.
            np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.abs(a).max())


def moving_average(x):
    means = []
    for i in range(len(x) - 2):
        means.append(x[i : i + 3].mean())
    return (np.stack(means) ** 2).sum()


def root(x):
    """Of y^3 + y - sum(x), by bisection and one step of Newton's iteration, through which the derivative passes."""
    low, high, c = 0.0, 8.0, x.sum()
    while high - low > 1e-4:
        middle = (low + high) / 2
        if middle**3 + middle > c:
            high = middle
        else:
            low = middle
    return low - (low**3 + low - c) / (3 * low**2 + 1)


@pytest.mark.parametrize(("function", "at"), [(moving_average, "auto"), (moving_average, ["Loop"]), (root, "auto")])
@pytest.mark.sampled(every=4)
def test_loops_of_python_functions(function: Callable[..., Any], at: Any) -> None:
    """Their bodies hold constants, and their gradients are so small that no budget below the whole is reached."""
    x = np.random.default_rng(0).uniform(0.5, 1, 5)
    model = archipel.function(function, (x,))
    marked = autodiff.gradient(autodiff.checkpoint(model, at=at), of="output", wrt=["x"])
    check_model(marked.ir)
    expected = [(function(x + e) - function(x - e)) / 2e-5 for e in 1e-5 * np.eye(5)]
    np.testing.assert_allclose(run(marked, x)["x.grad"], expected, rtol=1e-6)
