"""Generated programs of nested If, Loop and Scan; pairs of networks written for both; that nothing is unrolled."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gradient_cases.case import try_examples
from gradient_cases.programs import Program, programs

from archipel import Model
from archipel.autodiff import gradient, hessian_vector, jvp
from archipel.errors import MissingRuleError, NotDifferentiableError
from archipel.graph import check_model
from archipel.graph.shapes import dims

INPUTS = "T[n, 3] x, T[n, 3] y, T[3, 3] w, T[4, n, 3] s, int64 k"
CONSTANTS = "<T zero = {0.0}, T limit = {6.0}, bool true = {1}, int64[1] first = {0}>"
WRT = ["x", "y", "w", "s"]
# Every input has a gradient, also one that a program reads for a condition alone.
SUM = """squares = Mul ({0}, {0}) total = ReduceSum <keepdims = 0> (squares) sx = ReduceSum <keepdims = 0> (x)
    sy = ReduceSum <keepdims = 0> (y) sw = ReduceSum <keepdims = 0> (w) ss = ReduceSum <keepdims = 0> (s)
    loss = Sum (total, sx, sy, sw, ss)"""


def parse(signature: str, results: str, nodes: str, constants: str = CONSTANTS, kind: str = "double") -> Model:
    text = f'<ir_version: 10, opset_import: ["" : 21]> agraph ({signature}) => ({results}) {constants} {{ {nodes} }}'
    for end in ("[", " "):
        text = text.replace(f" T{end}", f" {kind}{end}").replace(f"(T{end}", f"({kind}{end}")
    return Model.from_proto(onnx.parser.parse_model(text.replace("<T ", f"<{kind} ")))


def run(model: Model, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By ONNX Runtime, which also computes in float64; onnx.reference's Loop and Scan lack parts of the standard."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.to_bytes(), options, providers=["CPUExecutionProvider"])
    taken = {port.name for port in session.get_inputs()}
    names = [port.name for port in session.get_outputs()]
    return dict(zip(names, session.run(names, {name: value for name, value in feed.items() if name in taken})))


def draw_inputs(seed: int, rows: int = 2, k: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"x": (rows, 3), "y": (rows, 3), "w": (3, 3), "s": (4, rows, 3)}
    return {name: rng.uniform(-1, 1, shape) for name, shape in shapes.items()} | {"k": np.array(k)}


def close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    return found.shape == expected.shape and float(np.max(np.abs(found - expected), initial=0.0)) < tolerance * scale


@pytest.mark.parametrize(("depth", "examples"), [(2, 12), pytest.param(3, 60, marks=pytest.mark.slow)])
@pytest.mark.sampled(every=8)
def test_generated_programs(depth: int, examples: int) -> None:
    """First and second derivatives and jvp, against PyTorch; float32 against float64; the transpose of each other."""

    try_examples(check_program, programs(depth), examples)


def check_program(program: Program) -> None:
    feed = draw_inputs(len(program.text))
    nodes = f"{program.text} {SUM.format(program.result)}"
    model = parse(INPUTS, f"T loss, T[n, 3] {program.result}", nodes)
    rng = np.random.default_rng(1)
    moved = {name: rng.standard_normal(feed[name].shape) for name in WRT}

    tensors = {name: torch.tensor(value, requires_grad=name in WRT) for name, value in feed.items()}
    values = dict(tensors)
    program.run(values)
    loss = (values[program.result] ** 2).sum() + sum(tensors[name].sum() for name in WRT)
    exact = [tensors[name] for name in WRT]
    slopes = torch.autograd.grad(loss, exact, create_graph=True, allow_unused=True, materialize_grads=True)
    along = sum((slope * torch.tensor(moved[name])).sum() for name, slope in zip(WRT, slopes))
    curved = torch.autograd.grad(along, exact, allow_unused=True, materialize_grads=True)

    made = gradient(model, of="loss", wrt=WRT)
    check_model(made.ir)
    found = run(made, feed)
    assert close(found["loss"], loss.detach().numpy(), 1e-9)
    for name, slope in zip(WRT, slopes):
        assert close(found[f"{name}.grad"], slope.detach().numpy(), 1e-8), name
    single = run(
        gradient(parse(INPUTS, f"T loss, T[n, 3] {program.result}", nodes, kind="float"), of="loss", wrt=WRT),
        {name: value.astype(np.float32) if name in WRT else value for name, value in feed.items()},
    )
    for name in WRT:
        assert close(single[f"{name}.grad"], found[f"{name}.grad"], 1e-3), name

    tangents = feed | {f"{name}.tangent": value for name, value in moved.items()}
    second = hessian_vector(model, of="loss", wrt=WRT)
    check_model(second.ir)
    products = run(second, tangents)
    for name, expected in zip(WRT, curved):
        assert close(products[f"{name}.hvp"], expected.numpy(), 1e-7), name
    pushed = run(jvp(model, of=["loss"], wrt=WRT), tangents)["loss.tangent"]
    assert close(pushed, along.detach().numpy(), 1e-8)


def rnn(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(x.shape[1], w.shape[1], dtype=x.dtype)
    rows = []
    for item in x:
        h = torch.tanh(item @ w + h @ r)
        rows.append(h)
    return (torch.stack(rows) ** 2).sum()


def newton(a: torch.Tensor) -> torch.Tensor:
    z = a
    for _ in range(50):
        step = (z**3 - a) / (3 * z**2)
        z = z - step
        if step.abs().max().item() < 1e-12:
            break
    return z.sum()


def power_iteration(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    for _ in range(12):
        v = m @ v
        v = v / v.norm()
    return v @ m @ v


def huber(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    parts = [0.5 * e**2 if e.abs().item() < limit.item() else limit * (e.abs() - 0.5 * limit) for e in x]
    return torch.stack(parts).sum()


def powers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Row t is multiplied by w as often as its number says."""
    total = torch.zeros((), dtype=x.dtype)
    for t, row in enumerate(x):
        for _ in range(t):
            row = torch.sin(row @ w)
        total = total + row.sum()
    return total


PAIRS = {
    "rnn": (
        rnn,
        {"x": (5, 2, 3), "w": (3, 4), "r": (4, 4)},
        """start = Shape <start = 1, end = 2> (x)  four = Constant <value_ints = [4]> ()
        size = Concat <axis = 0> (start, four)  h0 = Expand (zero, size)
        h, hs = Scan <num_scan_inputs = 1, body = b (T[n, 4] hi, T[n, 3] xi) => (T[n, 4] ho, T[n, 4] yi) {
            p = MatMul (xi, w) q = MatMul (hi, r) a = Add (p, q) ho = Tanh (a) yi = Identity (ho) }> (h0, x)
        s = ReduceSumSquare <keepdims = 0> (hs)""",
    ),
    "newton": (
        newton,
        {"a": (3,)},
        """z = Loop <body = b (int64 i, bool c, T[3] zi) => (bool co, T[3] zo) {
            z2 = Mul (zi, zi) z3 = Mul (z2, zi) d = Sub (z3, a) e = Mul (three, z2) step = Div (d, e)
            zo = Sub (zi, step) f = Abs (step) g = ReduceMax <keepdims = 0> (f) co = GreaterOrEqual (g, tiny) }>
            (fifty, true, a)
        s = ReduceSum <keepdims = 0> (z)""",
    ),
    "power iteration": (
        power_iteration,
        {"m": (3, 3), "v": (3,)},
        """z = Loop <body = b (int64 i, bool c, T[3] vi) => (bool co, T[3] vo) {
            u = MatMul (m, vi) l = ReduceL2 <keepdims = 0> (u) vo = Div (u, l) co = Identity (c) }> (twelve, , v)
        mz = MatMul (m, z) s = MatMul (z, mz)""",
    ),
    "piecewise": (
        huber,
        {"x": (7,), "limit": ()},
        """none, each = Scan <num_scan_inputs = 1, body = b (T state, T e) => (T same, T part) {
            same = Identity (state) size = Abs (e) inside = Less (size, limit)
            part = If (inside) <
                then_branch = t () => (T one) { sq = Mul (e, e) one = Mul (half, sq) },
                else_branch = f () => (T two) { hl = Mul (half, limit) d = Sub (size, hl) two = Mul (limit, d) }> }>
            (zero, x)
        s = ReduceSum <keepdims = 0> (each)""",
    ),
    "loops of different lengths": (
        powers,
        {"x": (4, 3), "w": (3, 3)},
        """nought = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()
        t, ends = Scan <num_scan_inputs = 1, body = b (int64 ti, T[3] row) => (int64 to, T[3] last) {
            to = Add (ti, one)
            last = Loop <body = inner (int64 i, bool c, T[3] ri) => (bool co, T[3] ro) {
                p = MatMul (ri, w) ro = Sin (p) co = Identity (c) }> (ti, true, row) }> (nought, x)
        s = ReduceSum <keepdims = 0> (ends)""",
    ),
}
NUMBERS = """<T zero = {0.0}, T half = {0.5}, T three = {3.0}, T tiny = {0.000000000001}, bool true = {1},
    int64 fifty = {50}, int64 twelve = {12}>"""


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.sampled(every=6)
def test_as_pytorch_runs_it(case: str) -> None:
    """First and second derivatives against torch.autograd of the same program in Python."""
    function, shapes, nodes = PAIRS[case]
    rng = np.random.default_rng(3)
    feed = {name: np.asarray(rng.uniform(0.5, 1.5, shape)) for name, shape in shapes.items()}
    moved = {name: np.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    ports = ", ".join(f"T{[*shape]} {name}" if shape else f"T {name}" for name, shape in shapes.items())
    model = parse(ports.replace("[5, 2,", "[t, n,"), "T s", nodes, NUMBERS)
    tensors = [torch.tensor(value, requires_grad=True) for value in feed.values()]
    value = function(*tensors)
    slopes = torch.autograd.grad(value, tensors, create_graph=True)
    along = sum((slope * torch.tensor(t)).sum() for slope, t in zip(slopes, moved.values()))
    curved = torch.autograd.grad(along, tensors)

    found = run(gradient(model, of="s", wrt=list(shapes)), feed)
    assert close(found["s"], value.detach().numpy(), 1e-10)
    tangents = feed | {f"{name}.tangent": v for name, v in moved.items()}
    second = run(hessian_vector(model, of="s", wrt=list(shapes)), tangents)
    for name, slope, product in zip(shapes, slopes, curved):
        assert close(found[f"{name}.grad"], slope.detach().numpy(), 1e-8), name
        assert close(second[f"{name}.hvp"], product.numpy(), 1e-7), name


ITERATED = """y, ys = Loop <body = b (int64 i, bool c, T[n, 3] h) => (bool co, T[n, 3] ho, T[n, 3] out) {{
    p = MatMul (h, w) ho = Tanh (p) co = Identity (c) out = Mul (ho, x) }}> (steps, true, x)
    s = ReduceSum <keepdims = 0> (ys)"""


def test_nothing_is_unrolled() -> None:
    """The graph of the gradient, and of its gradient, is the same for 3 and for 1000 iterations."""
    sizes = []
    for steps in (3, 1000):
        fixed = f"<bool true = {{1}}, int64 steps = {{{steps}}}>"
        model = parse("T[n, 3] x, T[3, 3] w", "T s", ITERATED.format(), fixed)
        once = gradient(model, of="s", wrt=["x", "w"])
        twice = hessian_vector(model, of="s", wrt=["w"])
        sizes.append([len(list(made.ir.graph.all_nodes())) for made in (once, twice)])
    assert sizes[0] == sizes[1]


def test_only_what_the_way_back_needs_is_kept() -> None:
    """A linear loop keeps the number of its iterations: neither states nor sums, for their shapes. One that ends with
    tanh of a product keeps the states, which are tanh in the iteration after. One that goes on from there keeps the
    product, too, and computes tanh again."""
    kept = {}
    for kind, nodes in {
        "linear": "m = ReduceSum <keepdims = 1> (h, axis) p = Add (h, m) ho = Sub (p, x)",
        "last": "p = MatMul (h, w) ho = Tanh (p)",
        "not last": "p = MatMul (h, w) t = Tanh (p) ho = Mul (t, x)",
    }.items():
        body = f"b (int64 i, bool c, T[n, 3] h) => (bool co, T[n, 3] ho) {{ {nodes} co = Identity (c) }}"
        text = f"y = Loop <body = {body}> (k, true, x) s = ReduceSumSquare <keepdims = 0> (y)"
        constants = "<bool true = {1}, int64[1] axis = {1}>"
        made = gradient(parse("T[n, 3] x, T[3, 3] w, int64 k", "T s", text, constants), of="s", wrt=["x", "w"])
        (loop,) = (node for node in made.ir.graph if node.op_type == "Loop")
        kept[kind] = [(str(value.dtype), dims(value)[1:]) for value in loop.outputs[1:]]
    assert kept == {"linear": [("INT64", ())], "last": [("DOUBLE", ("n", 3))], "not last": [("DOUBLE", ("n", 3))] * 2}


@pytest.mark.parametrize("k", [0, 1])
def test_a_loop_without_iterations_passes_its_states_through(k: int) -> None:
    nodes = """y = Loop <body = b (int64 i, bool c, T[n, 3] h) => (bool co, T[n, 3] ho) { p = MatMul (h, w) ho = Sin (p)
        co = Identity (c) }> (k, true, x) s = ReduceSumSquare <keepdims = 0> (y)"""
    feed = draw_inputs(0, k=k)
    x, w = (torch.tensor(feed[name], requires_grad=True) for name in ("x", "w"))
    value = ((torch.sin(x @ w) if k else x + 0 * w.sum()) ** 2).sum()
    found = run(gradient(parse("T[n, 3] x, T[3, 3] w, int64 k", "T s", nodes), of="s", wrt=["x", "w"]), feed)
    for name, expected in zip("xw", torch.autograd.grad(value, [x, w])):
        assert close(found[f"{name}.grad"], expected.numpy(), 1e-9)


def test_bounds_on_values_that_are_computed_again() -> None:
    """The mean is computed again from another place in memory, where ONNX Runtime may give another last bit."""
    body = """body (int64 i, bool on, double[3] before) => (bool more, double[3] after) {
        more = Identity (on) mean = ReduceMean <keepdims = 1> (before) centred = Sub (before, mean)
        product = Mul (centred, before) moved = Add (product, five) high = Max (moved, low) after = Min (high, top) }"""
    model = parse(
        "T[3] x", "T s", f"y = Loop <body = {body}> (count, true, x) s = ReduceSum <keepdims = 0> (y)",
        "<int64 count = {3}, bool true = {1}, T five = {5.0}, T low = {-50.0}, T top = {50.0}>",
    )  # fmt: skip
    derived = gradient(model, of="s", wrt=["x"])
    for x in np.random.default_rng(0).standard_normal((20, 3)):
        given = torch.tensor(x, requires_grad=True)
        value = given
        for _ in range(3):
            value = ((value - value.mean()) * value + 5).clamp(-50, 50)
        value.sum().backward()
        np.testing.assert_allclose(run(derived, {"x": x})["x.grad"], given.grad, rtol=1e-9)


@pytest.mark.sampled(every=3)
def test_three_orders() -> None:
    """The third derivative of x -> sin applied twice in a Loop, in closed form by PyTorch."""
    model = parse(
        "T x",
        "T y",
        """y = Loop <body = b (int64 i, bool c, T h) => (bool co, T ho) { ho = Sin (h) co = Identity (c) }>
            (two, true, x)""",
        "<bool true = {1}, int64 two = {2}>",
    )
    made = model
    for order in range(3):
        made = gradient(made, of="y" if order == 0 else "x" + ".grad" * order, wrt=["x"])
    found = run(made, {"x": np.array(0.7)})
    x = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    expected = torch.sin(torch.sin(x))
    for order in range(1, 4):
        (expected,) = torch.autograd.grad(expected, x, create_graph=True)
        assert close(found["x" + ".grad" * order], expected.detach().numpy(), 1e-10)


def test_random_numbers_in_a_body_are_drawn_once() -> None:
    """The way back reads the mask of the way there: where y is 0, its gradient is."""
    nodes = """h, y = Scan <num_scan_inputs = 1, body = b (T[64] a, T[64] row) => (T[64] ao, T[64] yi) {
        ao = Identity (a) q = Mul (row, row) yi = Dropout (q, half, true) }> (x0, x)
        s = ReduceSum <keepdims = 0> (y)"""
    model = parse("T[5, 64] x, T[64] x0", "T s, T[5, 64] y", nodes, "<T half = {0.5}, bool true = {1}>")
    x = np.random.default_rng(0).uniform(1, 2, (5, 64))
    found = run(gradient(model, of="s", wrt=["x"]), {"x": x, "x0": x[0]})
    assert 0.3 < float(np.mean(found["y"] == 0)) < 0.7
    np.testing.assert_allclose(found["x.grad"], 2 * found["y"] / x)


GROWING = (
    r"^Loop 'node': the carried value 'h': it has the shape .* before the first iteration and .*; give it the largest "
    "shape from the start and mask"
)
REFUSED = {
    "growing": (
        MissingRuleError,
        """y = Loop <body = b (int64 i, bool c, T[m, 3] h) => (bool co, T[p, 3] ho) { hs = Sin (h)
            ho = Concat <axis = 0> (hs, x) co = Identity (c) }> (k, true, fixed)
        s = ReduceSumSquare <keepdims = 0> (y)""",
        GROWING,
    ),
    "growing, and its content is not needed": (
        MissingRuleError,
        """y = Loop <body = b (int64 i, bool c, T[m, 3] h) => (bool co, T[p, 3] ho) {
            ho = Concat <axis = 0> (h, x) co = Identity (c) }> (k, true, fixed)
        s = ReduceSumSquare <keepdims = 0> (y)""",
        GROWING,
    ),
    "sequence": (
        MissingRuleError,
        """l0 = SequenceEmpty <dtype = 11> ()
        l = Loop <body = b (int64 i, bool c, seq(T[n, 3]) li) => (bool co, seq(T[n, 3]) lo) { p = Sin (x)
            lo = SequenceInsert (li, p) co = Identity (c) }> (k, true, l0)
        y = ConcatFromSequence <axis = 0> (l) s = ReduceSum <keepdims = 0> (y)""",
        "^no gradient passes through ConcatFromSequence",
    ),
    "carried sequence": (
        MissingRuleError,
        """l0 = SequenceConstruct (fixed)
        y, l = Loop <body = b (int64 i, bool c, T[n, 3] h, seq(T[n, 3]) li) => (bool co, T[n, 3] ho, seq(T[n, 3]) lo) {
            p = Mul (x, h) lo = SequenceInsert (li, p) last = SequenceAt (li, i) ho = Sin (last) co = Identity (c) }>
            (k, true, fixed, l0)
        s = ReduceSum <keepdims = 0> (y)""",
        r"^Loop 'node_1': the carried value 'li': sequences have no gradient; carry a tensor",
    ),
    "random in a nested loop": (
        MissingRuleError,
        """y = Loop <body = b (int64 i, bool c, T[n, 3] h) => (bool co, T[n, 3] ho) { co = Identity (c)
            ho = Loop <body = b2 (int64 i2, bool c2, T[n, 3] h2) => (bool co2, T[n, 3] ho2) { co2 = Identity (c2)
                r = RandomNormalLike (h2) q = Mul (r, h2) ho2 = Sin (q) }> (k, true, h) }> (k, true, x)
        s = ReduceSum <keepdims = 0> (y)""",
        r"^Loop 'node': Loop .* in the body: its random numbers cannot be drawn again .*; give them to the model",
    ),
    "only by the number of iterations": (
        NotDifferentiableError,
        """y = Loop <body = b (int64 i, bool c, T[n, 3] h) => (bool co, T[n, 3] ho) { ho = Sin (h)
            l = ReduceMax <keepdims = 0> (x) co = Less (l, limit) }> (k, true, fixed)
        s = ReduceSum <keepdims = 0> (y)""",
        "^the gradient with respect to 'x' does not exist: .* only through Loop 'node', which passes no derivative on",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_node_and_the_remedy(case: str) -> None:
    error, nodes, message = REFUSED[case]
    model = parse("T[2, 3] x, T[2, 3] fixed, int64 k", "T s, T[p, 3] y", nodes.replace("[n, 3]", "[2, 3]"))
    with pytest.raises(error, match=message) as caught:
        gradient(model, of="s", wrt=["x"])
    assert "\n" not in str(caught.value)
