"""Gradients of attention, whose Softmax takes part of its gradient from the product behind it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gradient_cases.reference import evaluator

from archipel import Model, autodiff
from archipel.graph.shapes import dims

ATTENTION = """
<ir_version: 10, opset_import: ["" : 21]>
attention (real[batch, heads, query, 3] q, real[KEYS, 3] k, real[KEYS, SIZE] v, real[query, KEY] mask)
    => (real[batch, query, heads, SIZE] y, real[batch, heads, query, KEY] p) {
    kt = Transpose <perm = [PERM]> (k)  qk = MatMul (q, kt)  s = Add (qk, mask)
    p = Softmax (s)  m = MatMul (p, v)  y = Transpose <perm = [0, 2, 1, 3]> (m)
}
"""
SHAPES = {  # keys, size, whether the values are the same for all examples and heads
    "of known size": (7, 4, False),
    "of symbolic size": ("key", 4, False),
    "shared": (7, 4, True),
    "with more columns than keys": (3, 5, False),
}


def attention(case: str, dtype: str) -> Model:
    key, size, is_shared = SHAPES[case]
    text = ATTENTION.replace("KEYS", "KEY" if is_shared else "batch, heads, KEY").replace("KEY", str(key))
    text = text.replace("SIZE", str(size)).replace("PERM", "1, 0" if is_shared else "0, 1, 3, 2")
    return Model.from_proto(onnx.parser.parse_model(text.replace("real", dtype)))


def draw(case: str) -> dict[str, np.ndarray]:
    key, size, is_shared = SHAPES[case]
    key, lead, rng = 7 if key == "key" else key, () if is_shared else (2, 3), np.random.default_rng(3)
    shapes = {"q": (2, 3, 5, 3), "k": (*lead, key, 3), "v": (*lead, key, size)}
    feed = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    # Causal from the first key on, so that no row is empty.
    return feed | {"mask": np.where(np.tril(np.ones((5, key))) > 0, 0.0, -1e9)}


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(q @ k.mT + mask, -1) @ v).transpose(1, 2)


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("dtype", ["double", "float"])
def test_gradients_and_their_gradients_equal_pytorch(case: str, dtype: str) -> None:
    names, rng = ["q", "k", "v"], np.random.default_rng(4)
    once = autodiff.vjp(attention(case, dtype), of=["y"], wrt=names)
    twice = autodiff.vjp(once, of=["k.grad"], wrt=["q", "v"])
    feed = draw(case)
    tensors = {name: torch.tensor(value, requires_grad=name in names) for name, value in feed.items()}
    y = torch_attention(**tensors)
    feed["y.cotangent"] = rng.standard_normal(y.shape)
    feed["k.grad.cotangent"] = rng.standard_normal(feed["k"].shape)
    wanted = [tensors[name] for name in names]
    first = torch.autograd.grad(y, wanted, torch.from_numpy(feed["y.cotangent"]), create_graph=True)
    second = torch.autograd.grad(
        first[1], [tensors["q"], tensors["v"]], torch.from_numpy(feed["k.grad.cotangent"]), retain_graph=True
    )
    outputs = ["y", "q.grad", "k.grad", "v.grad", "q.grad.grad", "v.grad.grad"]
    if dtype == "double":
        found = evaluator(twice.to_bytes()).run(outputs, feed)
    else:
        session = onnxruntime.InferenceSession(twice.to_bytes(), providers=["CPUExecutionProvider"])
        found = session.run(outputs, {name: value.astype(np.float32) for name, value in feed.items()})
    for name, ours, theirs in zip(outputs, found, (y, *first, *second)):
        tolerance = 1e-11 if dtype == "double" else 2e-5
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("case", SHAPES)
def test_long_rows_are_read_once(case: str) -> None:
    """Where there are more keys than columns no row of theirs is summed: its sum comes from the shorter rows."""
    key, size, _ = SHAPES[case]
    graph = autodiff.vjp(attention(case, "float"), of=["y"], wrt=["q"]).ir.graph
    summed = [dims(node.inputs[0])[1:] for node in graph if node.op_type == "ReduceSum"]
    joined = isinstance(key, str) or key > size  # of the joined heads, which are kept anyway
    assert summed == [("query", "heads", size) if joined else ("heads", "query", key)]


def test_probabilities_that_are_read_elsewhere() -> None:
    """The gradient of p is not that of the product alone then."""
    m = autodiff.vjp(attention("of known size", "double"), of=["y", "p"], wrt=["q"])
    feed, rng = draw("of known size"), np.random.default_rng(5)
    tensors = {name: torch.tensor(value, requires_grad=name == "q") for name, value in feed.items()}
    p = torch.softmax(tensors["q"] @ tensors["k"].mT + tensors["mask"], -1)
    y = (p @ tensors["v"]).transpose(1, 2)
    feed |= {"y.cotangent": rng.standard_normal(y.shape), "p.cotangent": rng.standard_normal(p.shape)}
    given = [torch.from_numpy(feed[name]) for name in ("y.cotangent", "p.cotangent")]
    (expected,) = torch.autograd.grad([y, p], [tensors["q"]], given)
    (found,) = evaluator(m.to_bytes()).run(["q.grad"], feed)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-11, atol=1e-11)


def test_a_client_axis() -> None:
    """vmap of the gradient gives each client's."""
    m = autodiff.vjp(attention("of known size", "float"), of=["y"], wrt=["q", "v"])
    many = autodiff.vmap(m, over=["q", "v", "y.cotangent"])
    rng, feed = np.random.default_rng(6), {n: v.astype(np.float32) for n, v in draw("of known size").items()}
    clients = {name: rng.standard_normal((3, *feed[name].shape)).astype(np.float32) for name in ("q", "v")}
    clients["y.cotangent"] = rng.standard_normal((3, 2, 5, 3, 4)).astype(np.float32)

    def run(model: Model, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
        return session.run(["q.grad", "v.grad"], inputs)

    at_once = run(many, feed | clients)
    for i in range(3):
        for ours, expected in zip(at_once, run(m, feed | {name: value[i] for name, value in clients.items()})):
            np.testing.assert_allclose(ours[i], expected, rtol=1e-5, atol=1e-5)
