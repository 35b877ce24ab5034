"""Bundles that are written by hand, in ONNX's text form: roles that no converted bundle of the tests has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import parser

from archipel import bundle as b
from archipel.bundle import roles

PRIVACY = b.PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.67, max_clip=10.0, max_bits=24)
DTYPES = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT64: "int64"}

Role = tuple[type[roles.Port], dict[str, Any]]
Programs = Mapping[str, tuple[str, str, Mapping[str, Role]]]

EXAMPLE: Role = (roles.Example, {})
LABEL: Role = (roles.Label, {})
WEIGHT: Role = (roles.ExampleWeight, {})
FEATURE: Role = (roles.Feature, {})
OUTPUT: Role = (roles.Output, {})
ANSWER: Role = (roles.Prediction, {"output": "answer"})
MEAN: Role = (roles.Metric, {"reduction": "mean"})
SUM: Role = (roles.Metric, {"reduction": "sum"})


def named(kind: type[roles.Port], tensor: str, **more: Any) -> Role:
    return kind, {"tensor": tensor, **more}


def delta(tensor: str, kind: str = "delta") -> Role:
    more = {"kind": kind, "weighting": "examples", "range": 100.0, "bits": 24, "clip": 10.0}
    return roles.Update, {"tensor": tensor, **more}


# The squared error of a linear model: g = mean over the batch of x * (x.w + b - y), loss = mean of the squares / 2.
GRADIENT = """
    q = MatMul(x, w)
    p = Add(q, bias)
    e = Sub(p, y)
    one = Constant <value_ints = [1]> ()
    zero = Constant <value_ints = [0]> ()
    column = Unsqueeze(e, one)
    products = Mul(x, column)
    g = ReduceMean <keepdims = 0> (products, zero)
    gb = ReduceMean <keepdims = 0> (e)
    squares = Mul(e, e)
    mean = ReduceMean <keepdims = 0> (squares)
    half = Constant <value_float = 0.5> ()
    loss = Mul(mean, half)
"""
LR: Role = (roles.Hyperparameter, {"default": 0.1, "minimum": 0.0, "maximum": 10.0})


def personal() -> tuple[Any, ...]:
    """A personal head and a shared part in two phases, control variates, a broadcast, `begin` and counts."""
    head, control = named(roles.Personal, "head", init=None), named(roles.State, "ci", lifetime="device", init=0.0)
    fresh = named(roles.State, "anchor", lifetime="round", init=0.0)
    model = {"w": named(roles.Parameter, "w"), "bias": head}
    train = f"""train (float[n, 3] x, float[n] y, float[3] w, float bias, float[3] c, float[3] ci, float[3] anchor,
        float lr) => (float[3] w_new, float bias_new, float loss) {{
        {GRADIENT}
        correction = Sub(c, ci)
        pull = Mul(anchor, half)
        away = Add(correction, pull)
        all = Add(g, away)
        u = Mul(all, lr)
        ub = Mul(gb, lr)
        w_new = Sub(w, u)
        bias_new = Sub(bias, ub)
    }}"""
    begin = "begin (float[3] w, float[3] c) => (float[3] anchor) { anchor = Mul(w, c) }"
    finish = """finish (float[3] w, float[3] w0, float[3] ci, float lr, float n, int64 steps)
      => (float[3] dw, float weight, float[3] ci_new, float made) {
        change = Sub(w, w0)
        dw = Mul(change, n)
        weight = Identity(n)
        made = Cast <to = 1> (steps)
        scale = Mul(made, lr)
        average = Div(change, scale)
        ci_new = Sub(ci, average)
    }"""
    predict = """predict (float[n, 3] x, float[3] w, float bias) => (float[n] answer) {
        q = MatMul(x, w)
        answer = Add(q, bias)
    }"""
    evaluate = """evaluate (float[n] p, float[n] y, float[n] k) => (float worst, float error) {
        e = Sub(p, y)
        squares = Mul(e, e)
        kept = Mul(squares, k)
        worst = ReduceSum <keepdims = 0> (kept)
        total = ReduceSum <keepdims = 0> (k)
        error = Div(worst, total)
    }"""
    c = named(roles.Broadcast, "c")
    programs: Programs = {
        "train": (
            "train",
            train,
            {**model, "x": EXAMPLE, "y": LABEL, "c": c, "ci": control, "anchor": fresh, "lr": LR, "w_new": model["w"],
             "bias_new": head, "loss": MEAN},
        ),
        "begin": ("begin", begin, {"w": model["w"], "c": c, "anchor": fresh}),
        "finish": (
            "finish",
            finish,
            {"w": model["w"], "w0": named(roles.Start, "w"), "ci": control, "lr": LR, "ci_new": control,
             "n": (roles.Count, {"of": "examples"}), "steps": (roles.Count, {"of": "steps"}), "dw": delta("w"),
             "weight": delta("weight", "weight"), "made": (roles.Metric, {"reduction": "last"})},
        ),
        "predict": ("predict", predict, {**model, "x": EXAMPLE, "answer": OUTPUT}),
        "evaluate": ("evaluate", evaluate, {"p": ANSWER, "y": LABEL, "k": WEIGHT, "worst": SUM, "error": MEAN}),
    }  # fmt: skip
    rng = np.random.default_rng(4)
    x = rng.standard_normal((22, 3)).astype(np.float32)
    y = (x @ np.array([1, -2, 0.5], np.float32) + 3).astype(np.float32)
    data = {"x": x, "y": y, "k": rng.uniform(0.5, 2, 22).astype(np.float32)}
    data["broadcast/c"] = np.array([0.1, -0.05, 0.02], np.float32)
    schedule = [
        b.Phase(program="train", steps=7, batch_size=4, moves=("head",)),
        b.Phase(program="train", epochs=2, batch_size=5, moves=("w",)),
    ]
    parameters = {"w": np.array([0.1, 0.2, 0.3], np.float32)}
    tensors = {"head": np.float32(0.5)}
    fit = {"epochs": 10, "batch_size": 5, "seed": 2}
    return programs, parameters, tensors, schedule, data, fit, {"seed": 8, "hyperparameters": {"lr": 0.05}}


def features() -> tuple[Any, ...]:
    """A frozen layer whose results are kept; graphs made for 4 rows, filled up with weight 0; exact noise."""
    # The values are those of weights.safetensors; the text form asks for some.
    initializer = f"<float[6, 3] A = {{{', '.join(['0'] * 18)}}}>"
    backbone = f"""features (float[n, 6] x) => (float[n, 3] z) {initializer} {{
        h = MatMul(x, A)
        z = Tanh(h)
    }}"""
    train = """train (float[4, 3] z, float[4] y, float[4] k, float[3] w, float lr)
      => (float[3] w_new, float loss) {
        p = MatMul(z, w)
        e = Sub(p, y)
        kept = Mul(e, k)
        total = ReduceSum <keepdims = 0> (k)
        one = Constant <value_ints = [1]> ()
        zero = Constant <value_ints = [0]> ()
        column = Unsqueeze(kept, one)
        products = Mul(z, column)
        all = ReduceSum <keepdims = 0> (products, zero)
        g = Div(all, total)
        squares = Mul(kept, e)
        sum = ReduceSum <keepdims = 0> (squares)
        loss = Div(sum, total)
        u = Mul(g, lr)
        w_new = Sub(w, u)
    }"""
    predict = f"""predict (float[n, 6] x, float[3] w) => (float[n] answer) {initializer} {{
        h = MatMul(x, A)
        z = Tanh(h)
        answer = MatMul(z, w)
    }}"""
    evaluate = """evaluate (float[4] p, float[4] y, float[4] k) => (float error) {
        e = Sub(p, y)
        kept = Mul(e, k)
        squares = Mul(kept, e)
        sum = ReduceSum <keepdims = 0> (squares)
        total = ReduceSum <keepdims = 0> (k)
        error = Div(sum, total)
    }"""
    finish = """finish (float[3] w, float[3] w0, float[3] r) => (float[3] dw) {
        change = Sub(w, w0)
        dw = Add(change, r)
    }"""
    w = named(roles.Parameter, "w")
    noise: Role = (roles.Noise, {"distribution": "discrete_gaussian", "scale": 2.5})
    programs: Programs = {
        "features": ("features", backbone, {"x": EXAMPLE, "z": FEATURE}),
        "train": (
            "train",
            train,
            {"z": FEATURE, "y": LABEL, "k": WEIGHT, "w": w, "lr": LR, "w_new": w, "loss": MEAN},
        ),
        "predict": ("predict", predict, {"x": EXAMPLE, "w": w, "answer": OUTPUT}),
        "evaluate": ("evaluate", evaluate, {"p": ANSWER, "y": LABEL, "k": WEIGHT, "error": MEAN}),
        "finish": ("finish", finish, {"w": w, "w0": named(roles.Start, "w"), "r": noise, "dw": delta("w")}),
    }
    rng = np.random.default_rng(5)
    x = rng.standard_normal((18, 6)).astype(np.float32)
    matrix = rng.standard_normal((6, 3)).astype(np.float32) / 2
    y = (np.tanh(x @ matrix) @ np.array([1, -1, 2], np.float32)).astype(np.float32)
    schedule = [b.Phase(program="train", epochs=3, batch_size=4)]
    fit = {"epochs": 10, "batch_size": 4, "seed": 1, "hyperparameters": {"lr": 0.3}}
    return programs, {"w": np.zeros(3, np.float32)}, {"A": matrix}, schedule, {"x": x, "y": y}, fit, {"seed": 9}


FIXTURES: Mapping[str, Callable[[], tuple[Any, ...]]] = {"personal": personal, "features": features}


def write(
    folder: Path,
    name: str,
    programs: Programs,
    parameters: Mapping[str, np.ndarray],
    tensors: Mapping[str, np.ndarray],
    schedule: Sequence[b.Phase],
    key: Any,
) -> Path:
    values = {**parameters, **tensors}
    weights = b.write_weights(values)
    layout = b.weights_layout(weights, len(weights))
    graphs, signatures = {}, {}
    for program, (kind, text, meaning) in programs.items():
        model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
        for tensor in model.graph.initializer:
            _make_external(tensor, layout[tensor.name])
        graphs[f"{program}.onnx"] = model.SerializeToString(deterministic=True)
        signatures[program] = b.Program(
            kind=kind,  # type: ignore[arg-type]
            file=f"{program}.onnx",
            inputs=tuple(_port(value, meaning) for value in model.graph.input),
            outputs=tuple(_port(value, meaning) for value in model.graph.output),
        )
    b.write_bundle(
        folder, name=name, programs=signatures, graphs=graphs, weights=weights,
        parameters=b.parameter_specs(values, list(parameters)),
        limits=b.Limits(peak_bytes=10_000, flops_per_example=1, upload_bytes=100), privacy=PRIVACY, key=key,
        schedule=tuple(schedule),
    )  # fmt: skip
    return folder


def _port(value: onnx.ValueInfoProto, meaning: Mapping[str, Role]) -> Any:
    kind, more = meaning[value.name]
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return kind(name=value.name, dtype=DTYPES[tensor.elem_type], shape=shape, **more)


def _make_external(tensor: onnx.TensorProto, place: b.TensorPlace) -> None:
    name, dims, dtype = tensor.name, list(tensor.dims), tensor.data_type
    tensor.Clear()
    tensor.name, tensor.data_type, tensor.data_location = name, dtype, onnx.TensorProto.EXTERNAL
    tensor.dims.extend(dims)
    pairs = {"location": b.WEIGHTS_FILE, "offset": str(place.offset), "length": str(place.nbytes)}
    for key, value in pairs.items():
        tensor.external_data.add(key=key, value=value)
