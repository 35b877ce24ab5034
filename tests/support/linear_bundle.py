"""A linear model with a hand-written gradient, and each device's own examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import parser

from archipel import bundle as b
from archipel.bundle import roles

POPULATION = "pupils"
W0 = np.array([0.1, 0.2, 0.3], np.float32)
TRAIN = """<ir_version: 10, opset_import: ["": 21]>
train (float[n, 3] x, float[n] y, float[3] w, float seen, float lr) => (float[3] w_new, float seen_new, float loss) {
    p = MatMul(x, w)
    e = Sub(p, y)
    one = Constant <value_ints = [1]> ()
    zero = Constant <value_ints = [0]> ()
    column = Unsqueeze(e, one)
    products = Mul(x, column)
    g = ReduceMean <keepdims = 0> (products, zero)
    squares = Mul(e, e)
    loss = ReduceMean <keepdims = 0> (squares)
    u = Mul(g, lr)
    w_new = Sub(w, u)
    unit = Constant <value_float = 1.0> ()
    seen_new = Add(seen, unit)
}"""
FINISH = """<ir_version: 10, opset_import: ["": 21]>
finish (float[3] w, float[3] w0, float n) => (float[3] dw, float weight) {
    scale = Constant <value_float = 0.01> ()
    share = Mul(n, scale)
    most = Constant <value_float = 4.0> ()
    weight = Min(share, most)
    change = Sub(w, w0)
    low = Constant <value_float = -1.0> ()
    high = Constant <value_float = 1.0> ()
    bounded = Clip(change, low, high)
    dw = Mul(bounded, weight)
}"""
EQUAL_FINISH = """<ir_version: 10, opset_import: ["": 21]>
finish (float[3] w, float[3] w0) => (float[3] dw) {
    change = Sub(w, w0)
    low = Constant <value_float = -1.0> ()
    high = Constant <value_float = 1.0> ()
    dw = Clip(change, low, high)
}"""
PREDICT = """<ir_version: 10, opset_import: ["": 21]>
predict (float[n, 3] x, float[3] w) => (float[n] p) {
    p = MatMul(x, w)
}"""
EVALUATE = """<ir_version: 10, opset_import: ["": 21]>
evaluate (float[n] p, float[n] y) => (float mse) {
    e = Sub(p, y)
    squares = Mul(e, e)
    mse = ReduceMean <keepdims = 0> (squares)
}"""
LOOK = """<ir_version: 10, opset_import: ["": 21]>
look (float[n] y) => (float total, float count, float[4] bins) {
    total = ReduceSum <keepdims = 0> (y)
    shape = Shape(y)
    n = Cast <to = 1> (shape)
    count = Squeeze(n)
    edges = Constant <value_floats = [-1.0, 0.0, 1.0]> ()
    last = Constant <value_ints = [1]> ()
    column = Unsqueeze(y, last)
    above = GreaterOrEqual(column, edges)
    numbers = Cast <to = 1> (above)
    first = Constant <value_ints = [0]> ()
    reached = ReduceSum <keepdims = 0> (numbers, first)
    upper = Concat <axis = 0> (n, reached)
    zero = Constant <value_floats = [0.0]> ()
    lower = Concat <axis = 0> (reached, zero)
    bins = Sub(upper, lower)
}"""


def make_bundle(folder: Path, key: Ed25519PrivateKey, *, weighting: str = "examples", **policy: Any) -> Path:
    """A linear model with hand-written gradient; device state counts its steps. Returns the .bundle file.

    `weighting` "uniform": every device weighs 1, and sends no weight.
    """
    weighted = weighting == "examples"
    finish = FINISH if weighted else EQUAL_FINISH
    f32: dict[str, Any] = {"dtype": "float32"}
    w = roles.Parameter(name="w", tensor="w", shape=(3,), **f32)
    seen: dict[str, Any] = {"tensor": "seen", "lifetime": "device", "shape": (), **f32}
    update: dict[str, Any] = {"weighting": weighting, "range": 4.0, "bits": 20, **f32}
    programs = {
        "train": b.Program(
            kind="train",
            file="train.onnx",
            inputs=(
                roles.Example(name="x", shape=("n", 3), **f32),
                roles.Label(name="y", shape=("n",), **f32),
                w,
                roles.State(name="seen", **seen),
                roles.Hyperparameter(name="lr", shape=(), default=0.1, minimum=0.0, maximum=1.0, **f32),
            ),
            outputs=(
                roles.Parameter(name="w_new", tensor="w", shape=(3,), **f32),
                roles.State(name="seen_new", **seen),
                roles.Metric(name="loss", shape=(), reduction="mean", **f32),
            ),
        ),
        "finish": b.Program(
            kind="finish",
            file="finish.onnx",
            inputs=(
                w,
                roles.Start(name="w0", tensor="w", shape=(3,), **f32),
                *([roles.Count(name="n", shape=(), of="examples", **f32)] if weighted else []),
            ),
            outputs=(
                roles.Update(name="dw", tensor="w", kind="delta", shape=(3,), clip=2.0, **update),
                *(
                    [roles.Update(name="weight", tensor="weight", kind="weight", shape=(), lowest=0.01, **update)]
                    if weighted
                    else []
                ),
            ),
        ),
    }
    x, y = programs["train"].inputs[:2]
    counted: dict[str, Any] = {"kind": "value", "weighting": "uniform", "range": 2.0**18 - 1, "bits": 19, **f32}
    programs["predict"] = b.Program(
        kind="predict",
        file="predict.onnx",
        inputs=(x, w),
        outputs=(roles.Output(name="p", shape=("n",), **f32),),
    )
    programs["evaluate"] = b.Program(
        kind="evaluate",
        file="evaluate.onnx",
        inputs=(roles.Prediction(name="p", shape=("n",), output="p", **f32), y),
        outputs=(roles.Metric(name="mse", shape=(), reduction="mean", **f32),),
    )
    programs["look"] = b.Program(
        kind="analyze",
        file="look.onnx",
        inputs=(y,),
        outputs=(
            roles.Update(name="total", tensor="y/sum", shape=(), **{**counted, "range": 100.0}),
            roles.Update(name="count", tensor="y/count", shape=(), **counted),
            roles.Update(name="bins", tensor="spread/histogram", shape=(4,), **counted),
        ),
    )
    statistics = (
        b.Statistic(name="y", kind="mean", program="look"),
        b.Statistic(name="spread", kind="histogram", program="look", edges=(-1.0, 0.0, 1.0)),
    )
    limits = {"peak_bytes": 1 << 16, "flops_per_example": 12, "upload_bytes": 16, **policy.pop("limits", {})}
    privacy = {
        "modes": ("secure",),
        "min_cohort": 3,
        "threshold": 0.6,
        "max_clip": 2.0,
        "max_bits": 20,
        "colluders": 0.0,
        "min_contributors": 1,
        **policy,
    }
    b.write_bundle(
        folder,
        name="linear",
        programs=programs,
        graphs={f"{name}.onnx": parser.parse_model(text).SerializeToString() for name, text in
                (("train", TRAIN), ("finish", finish), ("predict", PREDICT), ("evaluate", EVALUATE), ("look", LOOK))},
        statistics=statistics,
        weights=b.write_weights({"w": W0}),
        parameters=b.parameter_specs({"w": W0}, ["w"]),
        limits=b.Limits(**limits),
        privacy=b.PrivacyPolicy(**privacy),
        key=key,
        schedule=(b.Phase(program="train", epochs=2, batch_size=4),),
        strategy="fedavg",
    )  # fmt: skip
    file = folder.with_suffix(".bundle")
    b.pack(folder, file)
    return file


def local_data(number: int) -> dict[str, np.ndarray]:
    """Device `number`'s own examples: 5 + number of them."""
    rng = np.random.default_rng(number)
    x = rng.standard_normal((5 + number, 3)).astype(np.float32)
    return {"x": x, "y": (x @ np.array([1, -1, 2]) + number).astype(np.float32)}
