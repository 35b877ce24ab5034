"""What a test gives to the command and gets from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import parser

from archipel import bundle as b
from archipel.bundle import roles

Command = Callable[..., tuple[str, str]]
# A linear model of 3 classes: its predict reads the weights as external data, its train moves them.
GRAPHS = {
    "predict": """predict (float[n, 4] x) => (float[n, 3] y) <float[4, 3] w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}> {
        y = MatMul(x, w)
    }""",
    "evaluate": """evaluate (float[n, 3] y, int64[n] label) => (float correct, float count) {
        best = ArgMax <axis = 1, keepdims = 0> (y)
        same = Equal(best, label)
        hits = Cast <to = 1> (same)
        correct = ReduceSum <keepdims = 0> (hits)
        ones = Mul(hits, hits)
        size = Shape(label)
        scalar = Squeeze(size)
        count = Cast <to = 1> (scalar)
    }""",
    "train": """train (float[n, 4] x, int64[n] label, float[4, 3] w, float lr) => (float[4, 3] w_new, float loss) {
        p = MatMul(x, w)
        three = Constant <value_int = 3> ()
        values = Constant <value_floats = [0.0, 1.0]> ()
        target = OneHot(label, three, values)
        e = Sub(p, target)
        s = Mul(e, e)
        loss = ReduceMean <keepdims = 0> (s)
        g = Gemm <transA = 1> (x, e)
        scaled = Mul(g, lr)
        w_new = Sub(w, scaled)
    }""",
}


class Linear(NamedTuple):
    """A signed bundle in a folder, its weights, and the arguments that open it."""

    folder: Path
    w: np.ndarray
    arguments: tuple[str, ...]


def make_linear(folder: Path) -> Linear:
    """Below that folder."""
    w = np.random.default_rng(5).standard_normal((4, 3)).astype(np.float32)
    weights = b.write_weights({"w": w})
    place = b.weights_layout(weights, len(weights))["w"]
    graphs = {}
    for name, text in GRAPHS.items():
        model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
        for tensor in model.graph.initializer:
            tensor.ClearField("float_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for field, value in {"location": b.WEIGHTS_FILE, "offset": place.offset, "length": place.nbytes}.items():
                tensor.external_data.add(key=field, value=str(value))
        graphs[f"{name}.onnx"] = model.SerializeToString()
    x = roles.Example(name="x", dtype="float32", shape=("n", 4))
    prediction = roles.Prediction(name="y", dtype="float32", shape=("n", 3), output="y")
    label = roles.Label(name="label", dtype="int64", shape=("n",))
    parameter: dict[str, Any] = {"tensor": "w", "dtype": "float32", "shape": (4, 3)}
    metric: dict[str, Any] = {"dtype": "float32", "shape": ()}
    lr = roles.Hyperparameter(name="lr", dtype="float32", shape=(), default=0.01, minimum=0.0, maximum=1.0)
    derived = {
        "predict": ("predict", (x,), (roles.Output(name="y", dtype="float32", shape=("n", 3)),)),
        "evaluate": ("evaluate", (prediction, label), (
            roles.Metric(name="correct", reduction="sum", **metric),
            roles.Metric(name="count", reduction="sum", **metric),
        )),
        "train": ("train", (x, label, roles.Parameter(name="w", **parameter), lr), (
            roles.Parameter(name="w_new", **parameter), roles.Metric(name="loss", reduction="mean", **metric),
        )),
        "refresh": ("refresh", (roles.Parameter(name="w", **parameter),), (
            roles.Derived(name="w_copy", dtype="float32", shape=(4, 3), tensor="w"),
        )),
    }  # fmt: skip
    refresh = "refresh (float[4, 3] w) => (float[4, 3] w_copy) { w_copy = Identity(w) }"
    graphs["refresh.onnx"] = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> {refresh}'
    ).SerializeToString()
    key = b.generate_key()
    b.save_public_key(key, folder / "k.pub")
    b.write_bundle(
        folder / "linear", name="linear", key=key, graphs=graphs, weights=weights,
        programs={
            name: b.Program(kind=kind, file=f"{name}.onnx", inputs=inputs, outputs=outputs)  # type: ignore[arg-type]
            for name, (kind, inputs, outputs) in derived.items()
        },
        parameters=b.parameter_specs({"w": w}, ["w"]),
        limits=b.Limits(peak_bytes=1000, flops_per_example=1, upload_bytes=1),
        privacy=b.PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=16,
                                  colluders=0.0, min_contributors=1),
    )  # fmt: skip
    return Linear(folder / "linear", w, (str(folder / "linear"), "--key", str(folder / "k.pub")))
