"""A fixed batch becomes symbolic, and batches of any size give what the source gives for its own."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from archipel import Model
from archipel.graph import check_model
from archipel.graph.flops import flops_per_example

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'

# name: graph over the input x, whose batch is 1 in every one
FREED = {
    "flatten by a written target": """g (float[1, 2, 3] x) => (float[1, 4] y) <int64[2] t = {1, 6}, float[6, 4] w> {
        f = Reshape (x, t)  y = MatMul (f, w) }""",
    "a target with -1": """g (float[1, 4, 3] x) => (float[1, 4, 3] y) <int64[2] t = {-1, 3}, int64[3] u = {1, -1, 3}> {
        f = Reshape (x, t)  s = Softmax (f)  y = Reshape (s, u) }""",
    "heads of attention": """g (float[1, 5, 6] x) => (float[1, 5, 6] y)
    <int64[3] t = {5, 2, 3}, int64[3] u = {5, 1, 6}, float[6, 6] w> {
        m = MatMul (x, w)  a = Transpose <perm = [1, 0, 2]> (m)  b = Reshape (a, t)
        h = Transpose <perm = [1, 0, 2]> (b)  k = Transpose <perm = [0, 2, 1]> (h)  s = MatMul (h, k)
        p = Softmax (s)  o = MatMul (p, h)  c = Transpose <perm = [1, 0, 2]> (o)  d = Reshape (c, u)
        y = Transpose <perm = [1, 0, 2]> (d) }""",
    "shapes computed from the input": """g (float[1, 2, 3] x) => (float[1, 6] y) <int64[1] m = {-1}, int64 i = {0}> {
        s = Shape (x)  b = Gather <axis = 0> (s, i)  z = Constant <value_ints = [0]> ()
        u = Unsqueeze (b, z)  t = Concat <axis = 0> (u, m)  y = Reshape (x, t) }""",
    "a token in front": """g (float[1, 4, 3] x) => (float[1, 5, 3] y) <float[1, 1, 3] token> {
        y = Concat <axis = 1> (token, x) }""",
    "sizes of a resize": """g (float[1, 1, 2, 2] x) => (float[1, 1, 4, 6] y) <int64[4] s = {1, 1, 4, 6}> {
        y = Resize <mode = "nearest"> (x, , , s) }""",
    "an expansion": """g (float[1, 1, 3] x) => (float[1, 4, 3] y) <int64[3] t = {1, 4, 3}> { y = Expand (x, t) }""",
    "states of a recurrent layer": """g (float[1, 5, 2] x) => (float[1, 3] y)
    <float[1, 12, 2] w, float[1, 12, 3] r, float[1, 1, 3] h, float[1, 1, 3] zero = {0, 0, 0}> {
        a = Transpose <perm = [1, 0, 2]> (x)  all, last = LSTM <hidden_size = 3> (a, w, r, , , h, zero)
        z = Constant <value_ints = [0]> ()  y = Squeeze (last, z) }""",
    "an output that no input reaches": """g (float[1, 2] x) => (float[1, 2] y, float[2, 2] anchors) <float[2, 2] w> {
        y = MatMul (x, w)  anchors = Neg (w) }""",
}

# name: graph, and the reason that is given
KEPT = {
    "picks the first": (
        """g (float[1, 3] x) => (float[3] y) <int64 i = {0}> { y = Gather <axis = 0> (x, i) }""",
        r"Gather '.*' removes the batch axis|Gather '.*' gives",
    ),
    "mean over the batch": (
        """g (float[1, 3] x) => (float[1, 3] y) <int64[1] a = {0}> {
            m = ReduceMean <keepdims = 1> (x, a)  y = Sub (x, m) }""",
        "examples of a batch influence each other",
    ),
    "squeezed": (
        """g (float[1, 3] x) => (float[3] y) <int64[1] a = {0}> { y = Squeeze (x, a) }""",
        r"Squeeze '.*'",
    ),
    "the batch merged into the output": (
        """g (float[1, 3] x) => (float[3] y) <int64[1] t = {3}> { y = Reshape (x, t) }""",
        "the output 'y' merges the batch with other axes: its first is 3",
    ),
    "a loop": (
        """g (float[1, 3] x) => (float[1, 3] y) <int64 n = {2}, bool c = {1}> {
            y = Loop (n, c, x) <body = b (int64 i, bool cc, float[1, 3] v) => (bool co, float[1, 3] w) {
                co = Identity (cc)  w = Add (v, v) }> }""",
        r"Loop '.*' has a body that reads values with the batch",
    ),
    "another free size": (
        """g (float[1, n] x) => (float[1, n] y) { y = Neg (x) }""",
        r"input 'x' has sizes that are known at run time only",
    ),
}


# name: graph over the input x, whose batch is 2
FREED_OF_TWO = {
    "a mask with a row for each example": """g (float[2, 3, 3] x) => (float[2, 3, 3] y)
    <bool[2, 1, 3] m = {1, 0, 1, 1, 0, 1}, float low = {-1}> { w = Where (m, x, low)  y = Softmax (w) }""",
    "a summand that an exporter has repeated": """g (float[2, 2] x) => (float[2, 2] y)
    <float[2, 2] b = {0.5, 2, 0.5, 2}> { y = Add (b, x) }""",
    "a summand that the graph repeats": """g (float[2, 3] x) => (float[2, 3] y) <int64[2] t = {2, 3}, float[1, 3] b> {
        e = Expand (b, t)  y = Mul (x, e) }""",
    "stacked factors": """g (float[2, 1, 2] x) => (float[2, 1, 2] y) <float[2, 2, 2] w = {1, 2, 3, 4, 1, 2, 3, 4}> {
        y = MatMul (x, w) }""",
    "a token for each example": """g (float[2, 4, 3] x) => (float[2, 5, 3] y) <float[2, 1, 3] t = {1, 2, 3, 1, 2, 3}> {
        y = Concat <axis = 1> (t, x) }""",
    "time and batch merged": """g (float[2, 5, 4] x) => (float[2, 5, 3] y)
    <int64[2] t = {10, 4}, int64[3] u = {5, 2, 3}, float[4, 3] w> {
        a = Transpose <perm = [1, 0, 2]> (x)  r = Reshape (a, t)  m = MatMul (r, w)  s = Reshape (m, u)
        y = Transpose <perm = [1, 0, 2]> (s) }""",
    "states of a recurrent layer": """g (float[2, 5, 2] x) => (float[2, 3] y)
    <float[1, 12, 2] w, float[1, 12, 3] r, float[1, 2, 3] h = {1, 2, 3, 1, 2, 3}> {
        a = Transpose <perm = [1, 0, 2]> (x)  all, last = LSTM <hidden_size = 3> (a, w, r, , , h, h)
        z = Constant <value_ints = [0]> ()  y = Squeeze (last, z) }""",
}

CUT = {
    "a summand that an exporter has repeated": ["b"],
    "stacked factors": ["w"],
    "a token for each example": ["t"],
    "states of a recurrent layer": ["h"],
}

KEPT_OF_TWO = {
    "a softmax over the batch": (
        """g (float[2, 3] x) => (float[2, 3] y) { y = Softmax <axis = 0> (x) }""",
        "examples of a batch influence each other",
    ),
    "the batch turned round": (
        """g (float[2, 3] x) => (float[2, 3] y) <int64[2] i = {1, 0}> { y = Gather <axis = 0> (x, i) }""",
        r"Gather '.*' removes the batch axis",
    ),
    "a summand of its own for each example": (
        """g (float[2, 3] x) => (float[2, 3] y) <float[2, 3] b = {1, 2, 3, 4, 5, 6}> { y = Add (x, b) }""",
        r"Add '.*' has an input 'b' that is not the same for all examples",
    ),
    "a summand for time and batch merged": (
        """g (float[2, 2, 3] x) => (float[4, 3] y) <int64[2] t = {4, 3}, float[4, 3] b> {
            r = Reshape (x, t)  y = Add (r, b) }""",
        r"Add '.*' joins the batch with 'b' of shape \[4, 3\]",
    ),
}


def saved(text: str, folder: Path) -> Path:
    """The graph as a file; weights without values get pseudo-random ones."""
    proto = onnx.parser.parse_model(HEAD + text)
    rng = np.random.default_rng(0)
    for value in proto.graph.value_info:  # declared without content
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    del proto.graph.value_info[:]
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def session(model: str | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("case", FREED)
def test_freed(case: str, tmp_path: Path) -> None:
    path = saved(FREED[case], tmp_path)
    model = Model.from_onnx(path)
    check_model(model.ir)
    assert model.inputs[0].shape[0] == "batch"
    assert model.outputs[0].shape[0] == "batch"
    report = model.import_report
    assert report is not None
    assert report.deviation is not None
    assert report.notes == ("the batch, 1 in the source, is symbolic; checked with batches of 1 and 3",)
    x = np.random.default_rng(5).standard_normal([4, *model.inputs[0].shape[1:]]).astype(np.float32)
    alone = np.concatenate([session(str(path)).run(["y"], {"x": x[i : i + 1]})[0] for i in range(4)])
    together = session(model.to_bytes()).run(["y"], {"x": x})[0]
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", KEPT)
def test_kept_with_a_reason(case: str, tmp_path: Path) -> None:
    text, reason = KEPT[case]
    path = saved(text, tmp_path)
    model = Model.from_onnx(path)
    assert model.inputs[0].shape[0] == 1
    report = model.import_report
    assert report is not None
    assert len(report.notes) == 1
    assert report.notes[0].startswith("the batch stays 1, as in the source: ")
    assert re.search(reason, report.notes[0]), report.notes[0]
    shape = [d if isinstance(d, int) else 3 for d in model.inputs[0].shape]
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(
        session(model.to_bytes()).run(None, {"x": x})[0], session(str(path)).run(None, {"x": x})[0]
    )


@pytest.mark.parametrize("case", FREED_OF_TWO)
def test_freed_of_two(case: str, tmp_path: Path) -> None:
    path = saved(FREED_OF_TWO[case], tmp_path)
    model = Model.from_onnx(path)
    check_model(model.ir)
    assert (model.inputs[0].shape[0], model.outputs[0].shape[0]) == ("batch", "batch")
    assert model.import_report is not None
    assert model.import_report.notes == (
        "the batch, 2 in the source, is symbolic; checked with batches of 1, 2 and 4",
        *(f"weights that were the same for each example have one row now: {name}" for name in CUT.get(case, ())),
    )
    x = np.random.default_rng(5).standard_normal([6, *model.inputs[0].shape[1:]]).astype(np.float32)
    pairs = np.concatenate([session(str(path)).run(["y"], {"x": x[i : i + 2]})[0] for i in (0, 2, 4)])
    run = session(model.to_bytes()).run
    for size in (1, 3, 6):
        found = np.concatenate([run(["y"], {"x": x[i : i + size]})[0] for i in range(0, 6, size)])
        np.testing.assert_allclose(found, pairs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", KEPT_OF_TWO)
def test_kept_of_two(case: str, tmp_path: Path) -> None:
    text, reason = KEPT_OF_TWO[case]
    path = saved(text, tmp_path)
    model = Model.from_onnx(path)
    assert model.inputs[0].shape[0] == 2
    assert model.import_report is not None
    (note,) = model.import_report.notes
    assert note.startswith("the batch stays 2, as in the source: ")
    assert re.search(reason, note), note


class Reading(nn.Module):
    """Attention over a token in front of the input, in PyTorch's own layer, which merges time and batch; then an LSTM
    with states that have a row for each example, and a view with the batch in its target."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(30, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        steps = torch.cat([self.token.expand(batch, -1, -1), x], 1).transpose(0, 1)
        mixed = self.attention(steps, steps, steps, need_weights=False)[0].transpose(0, 1)
        hidden = self.recurrent(mixed, (torch.zeros(1, batch, 6), torch.ones(1, batch, 6)))[0]
        return self.head(hidden.reshape(batch, -1))


@pytest.mark.sampled(every=3)
def test_pytorch_exported_with_a_batch_of_two(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Reading().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.randn(2, 4, 8),), tmp_path / "m.onnx", dynamo=False, opset_version=17)
    model = Model.from_onnx(tmp_path / "m.onnx")
    assert model.inputs[0].shape == ("batch", 4, 8)
    run = session(model.to_bytes()).run
    for size in (1, 2, 5):
        x = torch.randn(size, 4, 8)
        found = run(None, {model.inputs[0].name: x.numpy()})[0]
        np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_flops_of_one_example(tmp_path: Path) -> None:
    """By hand: two for each multiplication, 4 inputs times 3 outputs, whatever the batch of the graph."""
    path = saved("g (float[5, 4] x) => (float[5, 3] y) <float[4, 3] w> { y = MatMul (x, w) }", tmp_path)
    for dynamic in (True, False):
        assert flops_per_example(Model.from_onnx(path, dynamic_batch=dynamic)) == 24


def test_not_asked_for(tmp_path: Path) -> None:
    model = Model.from_onnx(saved(FREED["a token in front"], tmp_path), dynamic_batch=False)
    assert model.inputs[0].shape == (1, 4, 3)
    assert model.import_report is not None
    assert model.import_report.notes == ()
