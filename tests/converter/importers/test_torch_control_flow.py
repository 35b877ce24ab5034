"""PyTorch programs with cond, while_loop, scan and map, beside PyTorch itself; gradients beside torch.autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from archipel import Model, autodiff
from archipel.graph import check_model

# PyTorch warns about its own calls.
pytestmark = pytest.mark.filterwarnings("ignore")


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(3, 3)
        self.w = torch.nn.Parameter(torch.randn(3))


class TwoOutputs(Base):
    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> Any:
        return torch.cond(flag, lambda a: (a + self.w, a.sum()), lambda a: (self.fc(a), a.mean()), (x,))


class NestedCond(Base):
    def forward(self, x: torch.Tensor) -> Any:
        def inner(a: torch.Tensor) -> torch.Tensor:
            return torch.cond(a.mean() > 0.4, lambda v: self.fc(v), lambda v: torch.sin(v) * self.w, (a,))

        return torch.cond(x.sum() > 0, inner, lambda a: torch.tanh(self.fc(a)), (x,))


class WhileWithCond(Base):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        def step(i: torch.Tensor, n: torch.Tensor, v: torch.Tensor) -> Any:
            v = torch.cond(v.sum() > 0, lambda a: torch.tanh(self.fc(a)), lambda a: a * 0.5 + self.w, (v,))
            return i + 1, n.clone(), v

        start = (torch.zeros((), dtype=torch.int64), n, x)
        i, _, v = while_loop(lambda i, n, v: (i < n) & (v.abs().sum() < 30), step, start)
        return i, v

    def unrolled(self, x: torch.Tensor, n: int) -> Any:
        """The same in plain Python, which autograd differentiates."""
        i = 0
        while i < n and x.abs().sum() < 30:
            x = torch.tanh(self.fc(x)) if x.sum() > 0 else x * 0.5 + self.w
            i += 1
        return x


class ReversedScan(Base):
    def forward(self, x: torch.Tensor) -> Any:
        def step(carried: Any, item: torch.Tensor) -> Any:
            h, k = carried
            h = torch.tanh(self.fc(item) * self.w + h)
            return (h, k + 1.0), (h.sum(-1), h * k)

        return scan(step, (torch.zeros_like(x[:, 0]), torch.ones((), dtype=x.dtype)), x, dim=1, reverse=True)


class MapRows(Base):
    def forward(self, x: torch.Tensor) -> Any:
        return map_rows(lambda row: torch.tanh(self.fc(row)), x)


RNG = np.random.default_rng(0)
SIGNS = [RNG.standard_normal((4, 3)), RNG.standard_normal((4, 3)) + 0.8, RNG.standard_normal((4, 3)) - 0.8]
CASES: dict[str, tuple[type[Base], list[tuple[np.ndarray, ...]], set[str]]] = {
    "nested": (NestedCond, [(x,) for x in SIGNS], {"If"}),
    "while": (WhileWithCond, [(x, np.array(n)) for x, n in zip(SIGNS, (3, 0, 5))], {"If", "Loop"}),
    "scan": (ReversedScan, [(RNG.standard_normal((4, 5, 3)),)], {"Scan"}),
    "two": (TwoOutputs, [(SIGNS[0], np.array(flag)) for flag in (True, False)], {"If"}),
    "map": (MapRows, [(SIGNS[0],)], {"Scan"}),
}
QUICK = ("while", "scan")
ALL = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]


def _run(model: Model, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    return dict(zip([port.name for port in model.outputs], session.run(None, feed)))


def _flat(value: Any) -> list[torch.Tensor]:
    return [t for item in value for t in _flat(item)] if isinstance(value, tuple | list) else [value]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.sampled(every=8)
def test_values_and_gradients(name: str) -> None:
    kind, inputs, operators = CASES[name]
    module = kind().double().eval()
    example = tuple(torch.from_numpy(np.array(x)) for x in inputs[0])
    model = Model.from_torch(module, example, dynamic_batch=False)
    check_model(model.ir)
    assert {node.op_type for node in model.ir.graph.all_nodes()} & {"If", "Loop", "Scan"} == operators
    floats = [port.name for port in model.outputs if port.dtype == "float64"]
    weights = model.parameter_names
    assert set(weights) <= set(module.state_dict())
    gradient = autodiff.vjp(model, of=floats, wrt=["x", *weights])
    forward: Callable[..., Any] = getattr(module, "unrolled", module)
    for arrays in inputs:
        x = torch.from_numpy(arrays[0].copy()).requires_grad_()
        others = tuple(torch.from_numpy(np.array(a)) for a in arrays[1:])
        with torch.no_grad():
            expected = _flat(module(x, *others))
        feed = {port.name: np.asarray(a) for port, a in zip(model.inputs, arrays)}
        found = _run(model, feed)
        for ours, theirs in zip(found.values(), expected, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-9, atol=1e-12)
        cotangents = {f"{n}.cotangent": RNG.standard_normal(found[n].shape) for n in floats}
        ports = {port.name for port in gradient.inputs}
        assert set(cotangents) <= ports, ports
        ours = _run(gradient, {**feed, **cotangents})
        answers = [t for t in _flat(forward(x, *others)) if t.is_floating_point()]
        tensors = [x, *(module.get_parameter(n) for n in weights)]
        theirs = torch.autograd.grad(
            answers, tensors, [torch.from_numpy(c) for c in cotangents.values()], allow_unused=True
        )
        for n, tensor in zip(["x", *weights], theirs):
            wanted = np.zeros(ours[f"{n}.grad"].shape) if tensor is None else tensor.numpy()
            np.testing.assert_allclose(ours[f"{n}.grad"], wanted, rtol=1e-7, atol=1e-10, err_msg=n)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_programs_with_a_symbolic_batch(name: str) -> None:
    """The importer itself compares the graph with the program."""
    kind, inputs, operators = CASES[name]
    example = tuple(torch.from_numpy(np.array(x)).to(torch.float32 if x.ndim else None) for x in inputs[0])
    model = Model.from_torch(torch.export.export(kind().eval(), example))
    assert {node.op_type for node in model.ir.graph.all_nodes()} & {"If", "Loop", "Scan"} == operators
    # A fixed batch that a Scan's body reads stays, and a note says so; a module's own batch is symbolic.
    assert (model.inputs[0].shape[0] == "batch") or model.import_report.notes
    assert Model.from_torch(kind().eval(), example).inputs[0].shape[0] == "batch"
