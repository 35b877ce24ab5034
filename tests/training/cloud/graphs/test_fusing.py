"""Groups of nodes that PyTorch has one function for: found where they are, with the values of the single nodes."""

from __future__ import annotations

import math

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from archipel import Model
from archipel.training.cloud import TorchModule
from archipel.training.cloud.graphs.fusing import find_fusions


class Attention(nn.Module):
    def __init__(self, causal: bool, masked: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.causal = causal
        self.masked = masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        q, k, v = self.project(x).reshape(batch, time, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.linspace(-1.0, 1.0, time * time).reshape(time, time) if self.masked else None
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)


class Written(nn.Module):
    """Attention as older exports have it: keys turned, scores divided, no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.project(x)
        scores = torch.softmax(x @ k.transpose(-1, -2) / math.sqrt(4), -1)
        return scores @ x


def calls(module: TorchModule, function: object) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if node.target is function]


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
@pytest.mark.sampled(every=8)
def test_attention_is_one_call(causal: bool, masked: bool) -> None:
    torch.manual_seed(0)
    native = Attention(causal, masked).eval()
    module = TorchModule(Model.from_torch(native, torch.zeros(2, 6, 8)))
    (call,) = calls(module, functional.scaled_dot_product_attention)
    assert call.args[5] is causal
    assert (call.args[3] is not None) == masked
    x = torch.randn(3, 6, 8)
    torch.testing.assert_close(module(x), native(x))
    torch.autograd.backward(module(x).square().sum())
    torch.autograd.backward(native(x).square().sum())
    for name, parameter in native.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)


@pytest.mark.sampled(every=4)
def test_attention_that_is_written_out() -> None:
    torch.manual_seed(0)
    native = Written().eval()
    module = TorchModule(Model.from_torch(native, torch.zeros(2, 3, 5, 4)))
    assert len(calls(module, functional.scaled_dot_product_attention)) == 1
    x = torch.randn(2, 3, 5, 4)
    torch.testing.assert_close(module(x), native(x))


@pytest.mark.sampled(every=4)
def test_scores_that_are_read_elsewhere_stay_nodes_of_their_own() -> None:
    class Shown(Written):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            scores = torch.softmax(x @ self.project(x).transpose(-1, -2), -1)
            return scores @ x, scores

    native = Shown().eval()
    module = TorchModule(Model.from_torch(native, torch.zeros(2, 3, 5, 4)))
    assert not calls(module, functional.scaled_dot_product_attention)
    x = torch.randn(2, 3, 5, 4)
    for ours, theirs in zip(module(x), native(x)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.sampled(every=4)
def test_a_linear_layer_over_more_axes_is_one_call() -> None:
    torch.manual_seed(0)
    native = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    model = Model.from_torch(native, torch.zeros(2, 5, 4))
    assert [node.op_type for node in model.ir.graph if node.op_type in ("MatMul", "Add")] == ["MatMul", "Add"] * 2
    assert len(find_fusions(model.ir.graph)) == 2
    module = TorchModule(model)
    assert len(calls(module, functional.linear)) == 2
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(module(x), native(x))


class Halves(nn.Module):
    """Parts of one tensor, as attention has them, with a gap, and beside another reader."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 12)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "parts":
            a, b, c = y.reshape(-1, 3, 4).unbind(1)
            return a * b + c.tanh()
        start = 6 if self.kind == "gap" else 5
        first, second = y.narrow(1, 0, 5), y.narrow(1, start, 12 - start)
        total = first.sum(1) * second.exp().sum(1)
        return total + y.sum(1) if self.kind == "read" else total


@pytest.mark.parametrize(("kind", "splits"), [("parts", 1), ("uneven", 1), ("gap", 0), ("read", 0)])
@pytest.mark.sampled(every=6)
def test_slices_that_follow_each_other_are_one_split(kind: str, splits: int) -> None:
    torch.manual_seed(0)
    native = Halves(kind)
    module = TorchModule(Model.from_torch(native, torch.zeros(2, 4)))
    assert len(calls(module, torch.split)) == splits
    x = torch.randn(5, 4)
    ours, theirs = module(x), native(x)
    torch.testing.assert_close(ours, theirs)
    torch.autograd.backward([ours.square().sum(), theirs.square().sum()])
    torch.testing.assert_close(module.get_parameter("linear.weight").grad, native.linear.weight.grad)


@pytest.mark.sampled(every=4)
def test_a_bias_of_zeros_that_the_exporter_adds_is_none() -> None:
    torch.manual_seed(0)
    native = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.Conv2d(2, 2, 3))
    model = Model.from_torch(native, torch.zeros(2, 1, 8, 8))
    assert [len([each for each in node.inputs if each is not None]) for node in model.ir.graph] == [3, 3]
    first, second = calls(module := TorchModule(model), functional.conv2d)
    assert first.args[2] is None
    assert second.args[2] is not None
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(module(x), native(x))


def test_parts_of_a_shape_stay_sizes() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> agraph (float[batch, time, 6] x) => (float[a, b, c, d] y) {
        shape = Shape (x)
        zero = Constant <value = int64[1] {0}> ()
        two = Constant <value = int64[1] {2}> ()
        three = Constant <value = int64[1] {3}> ()
        before = Slice (shape, zero, two, zero)
        last = Slice (shape, two, three, zero)
        half = Div (last, two)
        whole = Concat <axis = 0> (before, half, two)
        y = Reshape (x, whole)
    }"""
    module = TorchModule(Model.from_proto(onnx.parser.parse_model(text)))
    assert not calls(module, torch.split)
    x = torch.randn(3, 5, 6)
    torch.testing.assert_close(module(x), x.reshape(3, 5, 3, 2))
