from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Phase, generate_key, open_bundle
from archipel.errors import (
    NonFiniteLossError,
    RuntimeInputError,
    RuntimeLimitError,
    RuntimeProgramError,
    SignatureError,
)
from archipel.lite_runtime import Progress, Runtime, load
from tests.support.text_bundles import BundleMaker, Programs, Roles

Make = Callable[..., Runtime]

W0 = np.array([[0.5, -1.0], [0.25, 2.0], [1.0, 0.0]], np.float32)
B0 = np.array([0.1, -0.1], np.float32)

# Two linear outputs and half the squared error, mean over examples of the weighted sum over outputs.
FORWARD = "q = MatMul(x, w) \n p = Add(q, b) \n e = Sub(p, y)"
TRAIN = f"""train (float[n, 3] x, float[n, 2] y, float[3, 2] w, float[2] b, float lr)
  => (float[3, 2] w_new, float[2] b_new, float loss) {{
    {FORWARD}
    zero = Constant <value_ints = [0]> ()
    gw = Gemm <transA = 1> (x, e)
    gb = ReduceMean <keepdims = 0> (e, zero)
    ones = Mul(e, e)
    loss = ReduceMean <keepdims = 0> (ones)
    shape = Shape <start = 0, end = 1> (x)
    n1 = Squeeze(shape)
    count = Cast <to = 1> (n1)
    rate = Div(lr, count)
    uw = Mul(gw, rate)
    ub = Mul(gb, lr)
    w_new = Sub(w, uw)
    b_new = Sub(b, ub)
}}"""
EVALUATE = """evaluate (float[n, 2] p, float[n, 2] y, float[n] u) => (float error, float worst, float seen) {
    e = Sub(p, y)
    s = Mul(e, e)
    one = Constant <value_ints = [1]> ()
    rows = ReduceSum <keepdims = 0> (s, one)
    weighted = Mul(rows, u)
    all = ReduceSum <keepdims = 0> (weighted)
    seen = ReduceSum <keepdims = 0> (u)
    error = Div(all, seen)
    worst = ReduceMax <keepdims = 0> (rows)
}"""
# Stands for an int8 predict: its initializers are not the parameters but derive from them.
PREDICT = """predict (float[n, 3] x) => (float[n, 2] answer)
  <float[3, 2] w2 = {0, 0, 0, 0, 0, 0}, float[2] b2 = {0, 0}, float scale = {0.5}> {
    folded = Mul(w2, scale)
    q = MatMul(x, folded)
    answer = Add(q, b2)
}"""
REFRESH = """refresh (float[3, 2] w, float[2] b) => (float[3, 2] w2_new, float[2] b2_new) {
    two = Constant <value_float = 2.0> ()
    w2_new = Mul(w, two)
    b2_new = Identity(b)
}"""


@pytest.fixture
def programs(r: type[Roles]) -> Programs:
    w, b = r.parameter("w"), r.parameter("b")
    return {
        "predict": ("predict", PREDICT, {"x": r.example, "answer": r.output}),
        "refresh": ("refresh", REFRESH, {"w": w, "b": b, "w2_new": r.derived("w2"), "b2_new": r.derived("b2")}),
        "train": (
            "train",
            TRAIN,
            {
                "x": r.example, "y": r.label, "w": w, "b": b, "lr": r.hyper(0.1, 0.0, 1.0), "w_new": w, "b_new": b,
                "loss": r.metric(),
            },
        ),
        "evaluate": (
            "evaluate",
            EVALUATE,
            {
                "p": r.prediction("answer"), "y": r.label, "u": r.weight, "error": r.metric("mean"),
                "worst": r.metric("last"), "seen": r.metric("sum"),
            },
        ),
    }  # fmt: skip


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return {"w2": 2 * W0, "b2": B0.copy()}


@pytest.fixture
def rt(make: Make, programs: Programs, tensors: dict[str, np.ndarray]) -> Runtime:
    return make(programs, {"w": W0, "b": B0}, tensors)


def data(count: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 3)).astype(np.float32), rng.standard_normal((count, 2)).astype(np.float32)


def reference_fit(
    x: np.ndarray, y: np.ndarray, orders: list[np.ndarray], lr: float
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    w, b, losses = W0.astype(np.float64), B0.astype(np.float64), []
    for batch in orders:
        e = x[batch] @ w + b - y[batch]
        losses.append(float(np.mean(e**2)))
        w, b = w - lr * x[batch].T @ e / len(batch), b - lr * e.mean(0)
    return w, b, losses


def test_predict_takes_an_array_or_a_dict(rt: Runtime) -> None:
    x, _ = data()
    expected = x @ W0 + B0
    np.testing.assert_allclose(rt.predict(x), expected, rtol=1e-5, atol=1e-6)
    answer = rt.predict({"x": x[:1]})
    assert list(answer) == ["answer"]
    np.testing.assert_allclose(answer["answer"], expected[:1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rt.predict(np.asfortranarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_predict_follows_fit_and_set_parameters_and_reset(rt: Runtime) -> None:
    x, y = data()
    before = rt.predict(x)
    rt.fit(x, y, epochs=2, batch_size=5)
    p = rt.parameters()
    assert not np.allclose(p["w"], W0)
    np.testing.assert_allclose(rt.predict(x), x @ p["w"] + p["b"], rtol=1e-5, atol=1e-6)
    rt.set_parameters({"b": np.array([7, 8], np.float32)})
    np.testing.assert_allclose(rt.predict(x), x @ p["w"] + [7, 8], rtol=1e-5, atol=1e-6)
    rt.reset("parameters")
    np.testing.assert_array_equal(rt.predict(x), before)


def test_fit_is_plain_sgd_in_the_given_order(rt: Runtime) -> None:
    x, y = data(11)
    steps: list[Progress] = []
    history = rt.fit(
        x, y, epochs=2, batch_size=4, shuffle=False, hyperparameters={"lr": 0.3},
        validation=(x, y), callbacks=[steps.append],
    )  # fmt: skip
    order = [np.arange(0, 4), np.arange(4, 8), np.arange(8, 11)] * 2
    w, b, losses = reference_fit(x, y, order, 0.3)
    np.testing.assert_allclose(history.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(rt.parameters()["w"], w, rtol=1e-4)
    np.testing.assert_allclose(rt.parameters()["b"], b, rtol=1e-4)
    assert (history.steps, history.examples) == (6, 11)
    assert [p.step for p in steps] == list(range(6))
    assert [p.epoch for p in steps] == [0, 0, 0, 1, 1, 1]
    assert [p.loss for p in steps] == history.losses == history.metrics["loss"]
    # Validated with the weights of the moment: the last entry is what evaluate says now.
    assert len(history.validation) == 2
    assert history.validation[1] == rt.evaluate(x, y)
    w1, b1, _ = reference_fit(x, y, order[:3], 0.3)
    expected = np.mean(((x @ w1 + b1 - y) ** 2).sum(1))
    assert history.validation[0]["error"] == pytest.approx(expected, rel=1e-4)


def test_fit_shuffles_by_seed(make: Make, programs: Programs, tensors: dict[str, np.ndarray]) -> None:
    x, y = data(16)
    runs = []
    for seed in (1, 1, 2):
        rt = make(programs, {"w": W0, "b": B0}, tensors)
        runs.append(rt.fit(x, y, epochs=1, batch_size=4, seed=seed).losses)
    assert runs[0] == runs[1] != runs[2]


def test_moves_limits_what_changes(rt: Runtime) -> None:
    x, y = data()
    rt.fit(x, y, batch_size=5, moves=["b"])
    np.testing.assert_array_equal(rt.parameters()["w"], W0)
    assert not np.allclose(rt.parameters()["b"], B0)


def test_a_callback_can_stop(rt: Runtime) -> None:
    x, y = data()
    history = rt.fit(x, y, epochs=9, batch_size=5, shuffle=False, callbacks=[lambda p: p.step == 2])
    assert history.steps == 3
    w, _, _ = reference_fit(x, y, [np.arange(0, 5), np.arange(5, 10), np.arange(10, 15)], 0.1)
    np.testing.assert_allclose(rt.parameters()["w"], w, rtol=1e-4)


def test_an_error_in_a_callback_leaves_everything_as_it_was(rt: Runtime) -> None:
    x, y = data()

    def fail(progress: Progress) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rt.fit(x, y, callbacks=[fail])
    np.testing.assert_array_equal(rt.parameters()["w"], W0)


@pytest.mark.parametrize("bad", [0, 1, 5])
def test_a_loss_that_is_not_finite_stops_with_the_last_good_weights(rt: Runtime, bad: int) -> None:
    x, y = data(24)
    x[bad * 4] = np.nan
    with pytest.raises(NonFiniteLossError, match=f"step {bad}"):
        rt.fit(x, y, batch_size=4, shuffle=False)
    # The weights whose loss was last known to be finite: those that step bad - 1 started from.
    w, b, _ = reference_fit(x, y, [np.arange(i * 4, i * 4 + 4) for i in range(max(bad - 1, 0))], 0.1)
    np.testing.assert_allclose(rt.parameters()["w"], w, rtol=1e-4)
    np.testing.assert_allclose(rt.parameters()["b"], b, rtol=1e-4)
    good, _ = data(4, seed=3)
    assert np.isfinite(rt.predict(good)).all()


def test_weights_that_overflow_in_the_last_step_are_not_kept(rt: Runtime) -> None:
    x, y = data(8)
    x[4:] *= np.float32(1e19)
    y[4:] = 0
    rt.set_parameters({"w": W0 * np.float32(1e-10), "b": B0 * 0})
    # The loss of the second step is finite, but its gradient is not.
    with pytest.raises(NonFiniteLossError):
        rt.fit(x * np.float32(1e8), y, batch_size=4, shuffle=False, hyperparameters={"lr": 1.0})
    assert np.isfinite(rt.parameters()["w"]).all()


@pytest.mark.parametrize("batch_size", [1, 3, 7, 20, 64])
def test_evaluate_reduces_as_declared(rt: Runtime, batch_size: int) -> None:
    x, y = data()
    u = np.linspace(0.5, 2, 20).astype(np.float32)
    rows = ((x @ W0 + B0 - y) ** 2).sum(1)
    plain = rt.evaluate(x, y, batch_size=batch_size)
    assert plain["error"] == pytest.approx(rows.mean(), rel=1e-4)
    assert plain["seen"] == 20
    assert plain["worst"] == pytest.approx(rows[(19 // batch_size) * batch_size :].max(), rel=1e-4)
    weighted = rt.evaluate({"x": x, "y": y, "u": u}, batch_size=batch_size)
    assert weighted["error"] == pytest.approx(np.average(rows, weights=u), rel=1e-4)


def test_graphs_for_one_batch_size_get_padding_of_weight_zero(make: Make, programs: Programs, r: type[Roles]) -> None:
    fixed = {
        name: (kind, text.replace("[n", "[8"), roles)
        for name, (kind, text, roles) in programs.items()
        if name in ("predict", "evaluate")
    }
    train = """train (float[8, 3] x, float[8] u, float[3] s) => (float[3] s_new, float loss) {
        one = Constant <value_ints = [1]> ()
        zero = Constant <value_ints = [0]> ()
        column = Unsqueeze(u, one)
        weighted = Mul(x, column)
        sum = ReduceSum <keepdims = 0> (weighted, zero)
        s_new = Add(s, sum)
        loss = ReduceSum <keepdims = 0> (u)
    }"""
    s = r.parameter("s")
    rt = make(
        {
            **fixed,
            "train": (
                "train", train, {"x": r.example, "u": r.weight, "s": s, "s_new": s, "loss": r.metric("sum")}
            ),
        },
        {"s": np.zeros(3, np.float32)},
        {"w2": 2 * W0, "b2": B0},
    )  # fmt: skip
    x, y = data(21)
    rows = ((x @ W0 + B0 - y) ** 2).sum(1)
    assert rt.evaluate(x, y)["error"] == pytest.approx(rows.mean(), rel=1e-4)
    history = rt.fit(x, batch_size=8)
    assert history.losses == [8, 8, 5]
    np.testing.assert_allclose(rt.parameters()["s"], x.sum(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeInputError, match="made for batches of 8"):
        rt.fit(x, batch_size=7)


def test_wrong_validation_data_are_told_before_the_first_step(rt: Runtime, make: Make, programs: Programs) -> None:
    x, y = data()
    steps: list[Progress] = []
    for validation, error, text in (
        ((x, None), RuntimeInputError, "validation: field 'y'"),
        ((x[:, :2], y), RuntimeInputError, "validation: 'x' must be float32"),
        ((x, y[:3]), RuntimeInputError, "'y' has 3 examples"),
    ):
        with pytest.raises(error, match=text):
            rt.fit(x, y, validation=validation, callbacks=[steps.append])
    without = make({"train": programs["train"]}, {"w": W0, "b": B0})
    with pytest.raises(RuntimeProgramError, match="no evaluate program"):
        without.fit(x, y, validation=(x, y), callbacks=[steps.append])
    assert steps == []
    np.testing.assert_array_equal(rt.parameters()["w"], W0)


def test_without_weights_a_fixed_batch_leaves_the_rest_out(make: Make, programs: Programs) -> None:
    kind, text, roles = programs["train"]
    rt = make({"train": (kind, text.replace("[n", "[8"), roles)}, {"w": W0, "b": B0})
    x, y = data(21)
    history = rt.fit(x, y, batch_size=8)
    assert (history.steps, history.examples) == (2, 16)
    with pytest.raises(RuntimeInputError, match="7 examples"):
        rt.fit(x[:7], y[:7], batch_size=8)


def test_predict_can_read_parameters_directly(make: Make, r: type[Roles]) -> None:
    text = "predict (float[n, 3] x, float[3, 2] w) => (float[n, 2] p, float[n, 2] q) { p = MatMul(x, w) \n q = Neg(p) }"
    rt = make(
        {"p": ("predict", text, {"x": r.example, "w": r.parameter("w"), "p": r.output, "q": r.output})}, {"w": W0}
    )
    x, _ = data()
    np.testing.assert_allclose(rt.predict({"x": x})["q"], -(x @ W0), rtol=1e-5, atol=1e-6)
    rt.set_parameters({"w": W0 * 3})
    np.testing.assert_allclose(rt.predict({"x": x})["p"], 3 * (x @ W0), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeInputError, match="give and take dicts"):
        rt.predict(x)


def test_personal_tensors_and_state_reach_predict_and_can_be_reset(make: Make, r: type[Roles]) -> None:
    train = """train (float[n, 3] x, float v, float k) => (float v_new, float k_new) {
        one = Constant <value_float = 1.0> ()
        v_new = Add(v, one)
        k_new = Add(k, v_new)
    }"""
    predict = "predict (float[n, 3] x, float v, float k) => (float[n, 3] p) { q = Mul(x, v) \n p = Mul(q, k) }"
    v, k = r.personal("v"), r.state("k", "device", 10.0)
    rt = make(
        {
            "train": ("train", train, {"x": r.example, "v": v, "v_new": v, "k": k, "k_new": k}),
            "predict": ("predict", predict, {"x": r.example, "v": v, "k": k, "p": r.output}),
        },
        {"w": W0},
        {"v": np.array(2, np.float32)},
    )
    x, _ = data(4)
    np.testing.assert_allclose(rt.predict(x), x * 2 * 10)
    rt.fit(x, batch_size=4)
    np.testing.assert_allclose(rt.predict(x), x * 3 * 13)
    rt.reset("personal")
    np.testing.assert_allclose(rt.predict(x), x * 2 * 13)
    rt.reset("state")
    np.testing.assert_allclose(rt.predict(x), x * 2 * 10)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda rt, x, y: rt.predict(x.astype(np.float64)), r"'x' must be float32\[n, 3\], got float64\[20, 3\]; conv"),
        (lambda rt, x, y: rt.predict(x[0]), r"'x' must be float32\[n, 3\], got float32\[3\]$"),
        (lambda rt, x, y: rt.fit(x[0], y), r"got float32\[3\]; add the batch axis"),
        (lambda rt, x, y: rt.predict(x[:, :2]), r"got float32\[20, 2\] \(axis 1 differs\)"),
        (lambda rt, x, y: rt.predict(x.tolist()), "must be a numpy array .* got list"),
        (lambda rt, x, y: rt.predict({"y": x}), "field 'x' is missing; given: y"),
        (lambda rt, x, y: rt.predict({"x": x, "z": x}), "z is not a field"),
        (lambda rt, x, y: rt.fit(x), r"field 'y' \(float32\[n, 2\]\) is missing; given: x"),
        (lambda rt, x, y: rt.fit(x, y[:5]), "'y' has 5 examples, the fields before it have 20"),
        (lambda rt, x, y: rt.fit(x[:0], y[:0]), "no examples"),
        (lambda rt, x, y: rt.fit(x, y, epochs=0), "at least 1"),
        (lambda rt, x, y: rt.fit(x, y, seed=-1), "seed must be from 0 to 4294967295"),
        (lambda rt, x, y: rt.fit(x, y, hyperparameters={"lr": 2.0}), "'lr' must be from 0 to 1, got 2"),
        (lambda rt, x, y: rt.fit(x, y, hyperparameters={"lr": float("nan")}), "'lr' must be from 0 to 1, got nan"),
        (lambda rt, x, y: rt.fit(x, y, hyperparameters={"mu": 0.1}), "'mu' is not one of this bundle's: lr"),
        (lambda rt, x, y: rt.fit(x, y, moves=["v"]), "'v' is not one that 'train' writes: w, b"),
        (lambda rt, x, y: rt.evaluate(x, y, batch_size=0), "batch_size must be at least 1"),
        (lambda rt, x, y: rt.set_parameters({"v": x}), "'v' is not one of bundle 'test': w, b"),
        (lambda rt, x, y: rt.set_parameters({"w": x}), r"'w' must be float32\[3, 2\], got float32\[20, 3\]"),
        (lambda rt, x, y: rt.reset("all"), "got 'all'"),
    ],
)
def test_wrong_input_is_named(
    rt: Runtime, call: Callable[[Runtime, np.ndarray, np.ndarray], object], text: str
) -> None:
    x, y = data()
    with pytest.raises(RuntimeInputError, match=text):
        call(rt, x, y)


def test_what_a_bundle_lacks_is_named(make: Make, programs: Programs, r: type[Roles]) -> None:
    rt = make({"predict": programs["predict"]}, {"w": W0, "b": B0}, {"w2": 2 * W0, "b2": B0})
    x, y = data()
    with pytest.raises(RuntimeProgramError, match="no train program, so it cannot learn"):
        rt.fit(x, y)
    with pytest.raises(RuntimeProgramError, match="no finish program, so it cannot take part in a round"):
        rt.local_round(x, y, seed=0)
    with pytest.raises(RuntimeProgramError, match="no evaluate program"):
        rt.evaluate(x, y)
    other = make({"a": programs["train"], "b": programs["train"]}, {"w": W0, "b": B0})
    with pytest.raises(RuntimeProgramError, match=r"several train programs \(a, b\)"):
        other.fit(x, y)
    assert other.fit(x, y, program="b").steps == 1


def test_a_missing_broadcast_is_named(make: Make, r: type[Roles]) -> None:
    text = "train (float[n, 3] x, float[3] c) => (float loss) { loss = ReduceSum <keepdims = 0> (c) }"
    rt = make({"train": ("train", text, {"x": r.example, "c": r.broadcast("c"), "loss": r.metric()})}, {"w": W0})
    x, _ = data()
    with pytest.raises(RuntimeInputError, match=r"broadcast 'c' \(float32\[3\]\) is missing"):
        rt.fit(x)
    with pytest.raises(RuntimeInputError, match=r"must be float32\[3\], got float32\[2\]"):
        rt.fit(x, broadcast={"c": np.zeros(2, np.float32)})
    assert rt.fit(x, broadcast={"c": np.ones(3, np.float32)}).losses == [3.0]


def test_a_round_needs_all_parameters(make: Make, programs: Programs, r: type[Roles]) -> None:
    finish = "finish (float[3, 2] w) => (float[3, 2] d) { d = Identity(w) }"
    rt = make(
        {**programs, "finish": ("finish", finish, {"w": r.parameter("w"), "d": r.update("w")})},
        {"w": W0, "b": B0},
        {"w2": 2 * W0, "b2": B0},
        schedule=[Phase(program="train", epochs=1, batch_size=4)],
    )
    x, y = data()
    with pytest.raises(RuntimeInputError, match="b missing"):
        rt.local_round(x, y, seed=0, parameters={"w": W0})
    x[3] = np.inf
    with pytest.raises(NonFiniteLossError):
        rt.local_round(x, y, seed=0)


def test_continuous_gaussian_noise_is_refused(make: Make, r: type[Roles]) -> None:
    text = "finish (float[3] z) => (float[3] out) { out = Identity(z) }"
    with pytest.raises(RuntimeProgramError, match=r"only discrete_gaussian.*Mironov 2012"):
        make({"finish": ("finish", text, {"z": r.noise("gaussian", 1.0), "out": r.update("z", "value")})}, {"w": W0})


def test_manifest_and_graph_must_agree(make_bundle: BundleMaker, key: Ed25519PrivateKey, programs: Programs) -> None:
    folder = make_bundle(programs, {"w": W0, "b": B0}, {"w2": 2 * W0, "b2": B0})
    bundle = open_bundle(folder, [key.public_key().public_bytes_raw()])
    (folder / "predict.onnx").write_bytes((folder / "train.onnx").read_bytes())
    with pytest.raises(RuntimeProgramError, match="disagree about its inputs"):
        Runtime(bundle).predict(data()[0])
    (folder / "predict.onnx").write_bytes(b"\x08\x0a garbage")
    with pytest.raises(RuntimeProgramError, match="'predict' cannot be loaded"):
        Runtime(bundle).predict(data()[0])


def test_load_checks_signature_and_memory(make_bundle: BundleMaker, key: Ed25519PrivateKey, programs: Programs) -> None:
    folder: Path = make_bundle(programs, {"w": W0, "b": B0}, {"w2": 2 * W0, "b2": B0}, peak_bytes=5000)
    trusted = [key.public_key().public_bytes_raw()]
    with pytest.raises(SignatureError):
        load(folder, [generate_key().public_key().public_bytes_raw()])
    with pytest.raises(RuntimeLimitError, match="up to 5000 bytes of memory, the limit here is 4999"):
        load(folder, trusted, memory_limit=4999)
    rt = load(folder, trusted, memory_limit=5000, threads=2)
    assert rt.predict(data()[0]).shape == (20, 2)


def test_parameters_cannot_be_changed_from_outside(rt: Runtime) -> None:
    mine = np.ones((3, 2), np.float32)
    rt.set_parameters({"w": mine})
    mine[...] = 9
    assert (rt.parameters()["w"] == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        rt.parameters()["w"][0, 0] = 5


@pytest.mark.sampled(every=3)
def test_importing_the_runtime_loads_nothing_else() -> None:
    code = """
import sys, archipel.lite_runtime
banned = {"onnx", "onnx_ir", "torch", "flask", "sqlalchemy", "onnxruntime", "urllib3"}
found = sorted(banned & set(sys.modules))
assert not found, found
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("archipel.")}
known = "errors library_errors durable engine_registry importer_registry mode permutations zips".split()
known += "bundle lite_runtime".split()
assert rooms <= set(known), rooms
"""
    subprocess.run([sys.executable, "-c", code], check=True)
