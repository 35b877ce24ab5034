"""Models of functions: names, weights, symbolic sizes, the same bytes; differentiated and trained like any other."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipel
from archipel import Model, autodiff, bundle, lite_runtime, training
from archipel.converter import Signing, Training
from archipel.graph import check_model
from archipel.training import losses, optimizers
from tests.frontend.test_functions import compare, runtime

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 3))
WEIGHT = RNG.standard_normal((3, 3)) * 0.5
TABLE = np.array([4, 5, 6])
OFFSET = np.ones(3)
FACTOR = np.float64(0.5)


def _ports(ports: Any) -> dict[str, tuple[Any, ...]]:
    return {port.name: (port.dtype, *port.shape) for port in ports}


def test_names_of_inputs_outputs_and_weights() -> None:
    closure = np.ones(3)

    class Layer:
        def __init__(self) -> None:
            self.bias = np.zeros(3)
            self.inner = {"scale": np.ones(3), "count": np.array(3)}

        def __call__(self, v: Any) -> Any:
            return v * self.inner["scale"] + self.bias + self.inner["count"]

    layer, stack = Layer(), [np.ones(3) * 2, np.ones(3) * 3]

    def f(x, n, offset=OFFSET, mode="sum"):
        y = layer(x @ WEIGHT) + closure * FACTOR + TABLE + offset
        for each in stack:
            y = y * each
        return (y.sum(), n) if mode == "sum" else {"loss": y.mean(), "rows": y}

    model = archipel.function(f, (X, 2))
    assert _ports(model.inputs) == {"x": ("float64", 4, 3), "n": ("int64",)}
    assert _ports(model.outputs) == {"output_0": ("float64",), "output_1": ("int64",)}
    assert set(model.parameters) == {"WEIGHT", "bias", "inner.scale", "closure", "offset", "stack.0", "stack.1"}
    np.testing.assert_array_equal(model.parameters["WEIGHT"], WEIGHT)
    named = archipel.function(functools.partial(f, mode="mean"), (X, 2))
    assert _ports(named.outputs) == {"loss": ("float64",), "rows": ("float64", 4, 3)}
    assert "Python (f)" in str(model.import_report)
    method = archipel.function(layer, (X,))
    assert _ports(method.inputs) == {"v": ("float64", 4, 3)}
    assert set(method.parameters) == {"bias", "inner.scale"}
    single = archipel.function(lambda x: x + 1, X)
    assert _ports(single.outputs) == {"output": ("float64", 4, 3)}


def test_two_weights_of_one_name() -> None:
    first, second = {"w": np.ones(3)}, {"w": np.zeros(3)}
    with pytest.raises(archipel.errors.FunctionError, match="two arrays are called 'w'; give one of the variables"):
        archipel.function(lambda x: x + first["w"] + second["w"], (X,))
    same = {"v": first["w"]}
    assert archipel.function(lambda x: x * first["w"] + same["v"], (X,)).parameter_names == ("w",)


def network(x, params):
    """A recurrent network with an early end: loops, branches and weights of a dict."""
    h = np.zeros((x.shape[0], 3), x.dtype)
    for t in range(x.shape[1]):
        z = np.tanh(x[:, t] @ params["in"]["weight"] + h @ params["state"] + params["in"]["bias"])
        if (z * z).mean() < 0.02:
            continue
        h = h + z if t % 2 == 0 else h - z * 0.5
        if (h * h).sum() > 1000:
            break
    return h @ params["head"]


def _params(dtype: type = np.float64) -> dict[str, Any]:
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.7).astype(dtype)

    return {"in": {"weight": draw(2, 3), "bias": draw(3)}, "state": draw(3, 3), "head": draw(3, 2)}


def test_a_symbolic_batch() -> None:
    params = _params()
    model = archipel.function(network, (np.zeros((4, 5, 2)), params), dynamic_batch=True)
    check_model(model.ir)
    assert _ports(model.inputs) == {"x": ("float64", "batch", 5, 2)}
    assert _ports(model.outputs) == {"output": ("float64", "batch", 2)}
    for batch in (1, 4, 7):
        x = RNG.standard_normal((batch, 5, 2))
        (found,) = runtime(model)({"x": x})
        compare(found, network(x, params), f"batch {batch}")


def test_symbolic_names_stay() -> None:
    def f(x, y):
        n, _ = x.shape
        z = x
        for _ in range(3):
            z = z + np.zeros((n, 3)) if z.sum() > 0 else -z
        if y.sum() > 0:
            return z.reshape(n, -1), np.arange(n), y[: len(y)] * 2, z @ z.T
        return z.reshape(len(x), 3), np.arange(n) * 2, y, z @ x.T

    model = archipel.function(f, (X, np.ones(2)), symbolic={"x": ["rows", None], "y": {0: "others"}})
    assert [port.shape for port in model.outputs][:2] == [("rows", 3), ("rows",)]
    assert model.outputs[3].shape == ("rows", "rows")
    for n, m in ((2, 3), (5, 1)):
        x, y = RNG.standard_normal((n, 3)), RNG.standard_normal(m)
        for ours, theirs in zip(runtime(model)({"x": x, "y": y}), f(x, y), strict=True):
            compare(ours, theirs, "symbolic")


def test_the_same_bytes_again() -> None:
    first, second = (archipel.function(network, (np.zeros((4, 5, 2)), _params())).to_bytes() for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_the_same_bytes_in_every_process() -> None:
    code = (
        "import hashlib, numpy as np, archipel; from tests.frontend.test_models import _params, network; "
        "print(hashlib.sha256(archipel.function(network, (np.zeros((4, 5, 2)), _params())).to_bytes()).hexdigest())"
    )
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    )
    assert first == second
    assert len(first) == 65


def loss(x, params):
    out = network(x, params)
    return (out * out).sum()


def power(x, params):
    y, n = x[:, 0], 0
    while (y * y).sum() < 40 and n < 9:
        y = y * 1.4 + np.sin(y) * params["state"][0, 0]
        n += 1
    return y.sum() if n > 2 else -y.mean()


def filled(x, params):
    y = np.zeros(6)
    for i in range(5):
        y[i + 1] = y[i] * params["state"][0, 1] + x[i % 3, 0, 1]
    return (y * y).sum()


@pytest.mark.parametrize("function", [loss, power, filled])
@pytest.mark.sampled(every=4)
def test_gradients(function: Any) -> None:
    """Of inputs and weights, against central differences of the function itself."""
    params, x = _params(), np.random.default_rng(5).standard_normal((3, 5, 2))
    model = archipel.function(function, (x, params))
    names = list(model.parameter_names)
    found = dict(zip(["output", "x.grad", *(f"{n}.grad" for n in names)], _run(gradient_of(model, names), {"x": x})))
    arrays = {"x": x, "in.weight": params["in"]["weight"], "in.bias": params["in"]["bias"]}
    arrays |= {"state": params["state"], "head": params["head"]}
    for name in ("x", *names):
        array = arrays[name]
        numeric = np.zeros_like(array)
        for at in np.ndindex(array.shape):
            kept = array[at]
            values = []
            for shift in (1e-6, -1e-6):
                array[at] = kept + shift
                values.append(function(x, params))
            array[at] = kept
            numeric[at] = (values[0] - values[1]) / 2e-6
        np.testing.assert_allclose(found[f"{name}.grad"], numeric, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("function", [power, filled])
@pytest.mark.sampled(every=4)
def test_other_transformations(function: Any) -> None:
    """Forward mode against differences, lanes against a loop."""
    params, x = _params(), np.random.default_rng(5).standard_normal((3, 5, 2))
    tangent = np.random.default_rng(6).standard_normal(x.shape)
    model = archipel.function(function, (x, params))
    forward = autodiff.jvp(model, of=["output"], wrt=["x"])
    found = dict(zip([port.name for port in forward.outputs], _run(forward, {"x": x, "x.tangent": tangent})))
    numeric = (function(x + 1e-6 * tangent, params) - function(x - 1e-6 * tangent, params)) / 2e-6
    np.testing.assert_allclose(found["output.tangent"], numeric, rtol=1e-6)
    lanes = np.stack([x, x * 0.5, x * 2])
    (together,) = _run(autodiff.vmap(model, over=["x"]), {"x": lanes})
    np.testing.assert_allclose(together, [function(each, params) for each in lanes], rtol=1e-12)


def test_gradient_of_a_list_that_a_break_leaves_shorter() -> None:
    def mean(x: np.ndarray, most: float) -> np.ndarray:
        rows = []
        for j in range(3):
            rows.append(x * (j + 1))
            if j + 1 >= most:
                break
        return np.mean(rows, axis=0)

    x = np.array([0.5, -1.5])
    model = autodiff.vjp(archipel.function(mean, (x, 1.0)), of=["output"], wrt=["x"])
    for most in (1, 2, 3):
        found = _run(model, {"x": x, "most": np.array(float(most)), "output.cotangent": x})
        np.testing.assert_allclose(found, [mean(x, most), x * (most + 1) / 2], rtol=1e-12)


def gradient_of(model: Model, names: list[str]) -> Model:
    return autodiff.gradient(model, of="output", wrt=["x", *names])


def _run(model: Model, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return runtime(model)(feed)


@pytest.mark.slow
def test_a_device_predicts_and_trains(tmp_path: Path) -> None:
    """The function, a bundle, the runtime of a device."""
    model = archipel.function(network, (np.zeros((4, 5, 2), np.float32), _params(np.float32)), dynamic_batch=True)
    key = bundle.generate_key()
    learn = Training(losses.mse(), optimizers.sgd())
    archipel.convert(model, tmp_path / "f.bundle", training=learn, signing=Signing(key))
    runtime = lite_runtime.load(tmp_path / "f.bundle", trusted_keys=[key.public_key().public_bytes_raw()])
    x = RNG.standard_normal((32, 5, 2)).astype(np.float32)
    np.testing.assert_allclose(runtime.predict(x), network(x, _params(np.float32)), rtol=1e-4, atol=1e-5)
    label = np.zeros((32, 2), np.float32)
    history = runtime.fit(x, label, epochs=3, batch_size=8, hyperparameters={"lr": 0.05})
    assert history.losses[-1] < 0.5 * history.losses[0]


def test_a_training_step() -> None:
    """The weights of a function learn as those of any model do; the first step is that of the gradient."""
    model = archipel.function(network, (np.zeros((4, 5, 2), np.float32), _params(np.float32)), dynamic_batch=True)
    step = training.step_graph(model, losses.mse(), optimizers.sgd(lr=0.1))
    x, label = RNG.standard_normal((8, 5, 2)).astype(np.float32), RNG.standard_normal((8, 2)).astype(np.float32)
    seen = training.run_steps(step, [{"x": x, "label": label}] * 40)
    assert seen[0] == pytest.approx(float(np.mean((network(x, _params(np.float32)) - label) ** 2)), rel=1e-5)
    assert seen[-1] < 0.5 * seen[0]


def test_a_lambda_within_another_one() -> None:
    made = (lambda: archipel.function(lambda x: x * 2, (X,)))()
    np.testing.assert_array_equal(runtime(made)({"x": X})[0], X * 2)


def test_a_jump_is_its_condition() -> None:
    """No If whose branches are true and false, and none for a test that is cheap to compute in vain."""

    def grow(x):
        count = 0
        while count < 100:
            x = x * 2
            count += 1
            if x.max() > 50:
                break
        return x, count

    model = archipel.function(grow, (OFFSET,))
    assert "If" not in {node.op_type for node in model.ir.graph.all_nodes()}
    compare(runtime(model)({"x": OFFSET})[1], np.int64(6), "count")
