"""LSTM, GRU and RNN beyond the contract test: the reference itself, sizes of use, any length, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gradient_cases.loop_reference import LOOPS
from gradient_cases.recurrent_reference import ACTIVATIONS, RECURRENT
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.autodiff import hessian_vector, vjp
from archipel.errors import MissingRuleError

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def inputs(op_type: str, sizes: tuple[int, int, int, int], directions: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32, by name, in the node's order; `sizes`: time, batch, features, hidden."""
    rng = np.random.default_rng(seed)
    steps, batch, features, hidden = sizes
    rows = GATES[op_type] * hidden
    shapes = {
        "x": (steps, batch, features),
        "w": (directions, rows, features),
        "r": (directions, rows, hidden),
        "b": (directions, 2 * rows),
        "lengths": (batch,),
        "h": (directions, batch, hidden),
        "c": (directions, batch, hidden),
        "p": (directions, 3 * hidden),
    }
    found = {name: rng.uniform(-1, 1, shape).astype(np.float32) / hidden**0.5 for name, shape in shapes.items()}
    found["lengths"] = rng.integers(0, steps + 1, batch).astype(np.int32)
    return found


def model(op_type: str, given: dict[str, np.ndarray], free: bool = False, **attributes: Any) -> onnx.ModelProto:
    order = ["x", "w", "r", "b", "lengths", "h", *(["c", "p"] if op_type == "LSTM" else [])]
    hidden = given["r"].shape[2]
    ports = []
    for name in given:
        shape = ["time", "batch", given[name].shape[2]] if free and name == "x" else given[name].shape
        ports.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(given[name].dtype), shape))
    results = ["y", "y_h", "y_c"][: 3 if op_type == "LSTM" else 2]
    names = [name if name in given else "" for name in order]
    node = helper.make_node(op_type, names, results, name="layer", hidden_size=hidden, **attributes)
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
    graph = helper.make_graph([node], "layer", ports, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(
    proto: onnx.ModelProto | bytes, feed: dict[str, np.ndarray], outputs: list[str] | None = None
) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    content = proto if isinstance(proto, bytes) else proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    taken = {port.name for port in session.get_inputs()}
    return session.run(outputs, {name: value for name, value in feed.items() if name in taken})


FORMS: dict[str, tuple[set[str], dict[str, Any]]] = {
    "plain": ({"x", "w", "r"}, {}),
    "bias": ({"x", "w", "r", "b"}, {}),
    "states": ({"x", "w", "r", "b", "h", "c"}, {"direction": "reverse"}),
    "lengths": ({"x", "w", "r", "b", "lengths", "h", "c"}, {"direction": "bidirectional"}),
    "clip": ({"x", "w", "r", "b", "h"}, {"clip": 0.3}),
    "peepholes": ({"x", "w", "r", "b", "h", "c", "p"}, {"clip": 0.4}),
    "input_forget": ({"x", "w", "r", "b", "c", "p"}, {"input_forget": 1}),
    "linear_before_reset": ({"x", "w", "r", "b", "lengths", "h"}, {"linear_before_reset": 1, "clip": 0.5}),
}
ONLY = {"peepholes": "LSTM", "input_forget": "LSTM", "linear_before_reset": "GRU"}
PAIRS = [(op_type, form) for op_type in GATES for form in FORMS if ONLY.get(form, op_type) == op_type]
# Without parameters ONNX Runtime takes zeros for these, where ONNX's operators of the same names take ones.
NEED_PARAMETERS = ("Affine", "ThresholdedRelu", "ScaledTanh")


@pytest.mark.parametrize(("op_type", "form"), PAIRS)
def test_the_reference_is_what_onnx_runtime_computes(op_type: str, form: str) -> None:
    names, attributes = FORMS[form]
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    names = names if op_type == "LSTM" else names - {"c", "p"}
    given = {name: value for name, value in inputs(op_type, (4, 3, 2, 3), directions).items() if name in names}
    given = {name: value * 3 if value.dtype == np.float32 else value for name, value in given.items()}
    proto = model(op_type, given, **attributes)
    reference = ReferenceEvaluator(proto, new_ops=RECURRENT)
    for ours, kernel in zip(reference.run(None, given), run(proto, given)):
        np.testing.assert_allclose(ours, kernel, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [(name, given) for name in ACTIVATIONS for given in (True, False) if given or name not in NEED_PARAMETERS],
)
def test_the_reference_activations_are_those_of_onnx_runtime(name: str, parameters: bool) -> None:
    given = {"x": np.linspace(-3, 3, 13, dtype=np.float32).reshape(1, 13, 1)}
    given |= {"w": np.ones((1, 1, 1), np.float32), "r": np.zeros((1, 1, 1), np.float32)}
    attributes = {"activation_alpha": [0.3], "activation_beta": [0.2]} if parameters else {}
    proto = model("RNN", given, activations=[name], **attributes)
    ours = ReferenceEvaluator(proto, new_ops=[*RECURRENT, *LOOPS]).run(["y"], given)
    np.testing.assert_allclose(ours[0], run(proto, given, ["y"])[0], atol=1e-6)


@pytest.mark.parametrize("op_type", ["LSTM", "GRU"])
def test_a_long_layer_in_float32_agrees_with_pytorch(op_type: str) -> None:
    steps, batch, features, hidden = 60, 5, 8, 48
    given = {k: v for k, v in inputs(op_type, (steps, batch, features, hidden)).items() if k in ("x", "w", "r", "b")}
    attributes = {"linear_before_reset": 1} if op_type == "GRU" else {}
    cotangent = np.random.default_rng(1).standard_normal((steps, 1, batch, hidden)).astype(np.float32)
    ours = run(
        vjp(Model.from_proto(model(op_type, given, **attributes)), of=["y"], wrt=list(given)).to_bytes(),
        {**given, "y.cotangent": cotangent},
        ["y", *(f"{name}.grad" for name in given)],
    )

    order = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}[op_type]
    leaves = {name: torch.from_numpy(value).requires_grad_() for name, value in given.items()}

    def reordered(value: torch.Tensor) -> torch.Tensor:
        blocks = value.chunk(GATES[op_type])
        return torch.cat([blocks[i] for i in order])

    names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    values = [leaves["w"][0], leaves["r"][0], *leaves["b"][0].chunk(2)]
    network = getattr(torch.nn, op_type)(features, hidden)
    parameters = dict(zip(names, map(reordered, values)))
    y, _ = torch.func.functional_call(network, parameters, (leaves["x"],))
    expected = [y[:, None], *torch.autograd.grad(y, list(leaves.values()), torch.from_numpy(cotangent[:, 0]))]
    for found, theirs in zip(ours, expected):
        array = theirs.detach().numpy()
        np.testing.assert_allclose(found, array, atol=1e-4 * np.abs(array).max())


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("op_type", GATES)
def test_one_graph_serves_every_length_and_batch(op_type: str) -> None:
    names = ("x", "w", "r", "b")
    small = {k: v for k, v in inputs(op_type, (2, 2, 3, 4)).items() if k in names}
    free = vjp(Model.from_proto(model(op_type, small, free=True)), of=["y"], wrt=list(names))
    for steps, batch in ((1, 1), (7, 3)):
        given = {k: v for k, v in inputs(op_type, (steps, batch, 3, 4)).items() if k in names}
        fixed = vjp(Model.from_proto(model(op_type, given)), of=["y"], wrt=list(names))
        assert abs(nodes(free) - nodes(fixed)) < 20  # nothing is unrolled
        feed = {**given, "y.cotangent": np.ones((steps, 1, batch, 4), np.float32)}
        outputs = [f"{name}.grad" for name in names]
        for a, b in zip(run(free.to_bytes(), feed, outputs), run(fixed.to_bytes(), feed, outputs)):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def nodes(found: Model) -> int:
    return sum(1 for _ in found.ir.graph.all_nodes())


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"activations": ["Sigmoid", "Gelu", "Tanh"]}, r"LSTM 'layer': activation 'Gelu': known are affine"),
        ({"activations": ["Sigmoid", "Affine", "Tanh"]}, "give activation_alpha and activation_beta"),
        ({"activations": ["Sigmoid", "LeakyRelu", "Tanh"], "activation_alpha": [-0.5]}, "alpha=-0.5"),
        ({"activations": ["Sigmoid", "Tanh"]}, "3 for each of 1 directions"),
    ],
)
def test_activations_without_derivative_are_refused(attributes: dict[str, Any], message: str) -> None:
    given = {k: v for k, v in inputs("LSTM", (2, 2, 3, 4)).items() if k in ("x", "w", "r")}
    with pytest.raises(MissingRuleError, match=message):
        vjp(Model.from_proto(model("LSTM", given, **attributes)), of=["y"], wrt=["x"])


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("op_type", GATES)
def test_second_derivatives(op_type: str) -> None:
    """Hessian times tangent, on ONNX Runtime, against PyTorch with the same equations."""
    given = {k: v for k, v in inputs(op_type, (3, 2, 3, 4)).items() if k in ("x", "w", "r")}
    proto = model(op_type, given)
    proto.graph.node.append(helper.make_node("ReduceSumSquare", ["y"], ["total"], keepdims=0))
    proto.graph.output.append(helper.make_tensor_value_info("total", TensorProto.FLOAT, []))
    made = hessian_vector(Model.from_proto(proto), of="total", wrt=list(given))
    rng = np.random.default_rng(1)
    tangents = {name: rng.standard_normal(v.shape).astype(np.float32) for name, v in given.items()}
    found = run(made.to_bytes(), given | {f"{n}.tangent": v for n, v in tangents.items()}, [f"{n}.hvp" for n in given])

    def total(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        gates, hidden = GATES[op_type], r.shape[2]
        zeros = torch.zeros(x.shape[1], hidden, dtype=x.dtype)
        h, c, sum_of_squares = zeros, zeros, torch.zeros((), dtype=x.dtype)
        for item in x:
            a = [(item @ part.T) for part in w[0].chunk(gates)]
            b = list(r[0].chunk(gates))
            if op_type == "RNN":
                h = torch.tanh(a[0] + h @ b[0].T)
            elif op_type == "GRU":  # linear_before_reset = 0
                z, reset = (torch.sigmoid(a[i] + h @ b[i].T) for i in range(2))
                h = (1 - z) * torch.tanh(a[2] + (reset * h) @ b[2].T) + z * h
            else:
                i, o, f = (torch.sigmoid(a[k] + h @ b[k].T) for k in range(3))
                c = f * c + i * torch.tanh(a[3] + h @ b[3].T)
                h = o * torch.tanh(c)
            sum_of_squares = sum_of_squares + (h * h).sum()
        return sum_of_squares

    exact = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in given.values()]
    slopes = torch.autograd.grad(total(*exact), exact, create_graph=True)
    moved = [torch.tensor(v, dtype=torch.float64) for v in tangents.values()]
    expected = torch.autograd.grad(sum((s * v).sum() for s, v in zip(slopes, moved)), exact)
    for ours, theirs in zip(found, expected):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-3, atol=1e-4)
