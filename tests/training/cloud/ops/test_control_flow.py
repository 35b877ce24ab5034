"""If, Loop and Scan where the gradient contract has no case: without iterations, nested, compiled, over many steps."""

from __future__ import annotations

import time

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import archipel
from archipel import Model
from archipel.training.cloud.graphs.torch_module import TorchModule
from archipel.training.cloud.ops.control_flow import MOST_UNROLLED

torch.set_num_threads(1)


def parsed(text: str, **weights: np.ndarray) -> Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return Model.from_proto(proto)


def check(model: Model, *arrays: np.ndarray) -> list[torch.Tensor]:
    """The module's outputs, which are ONNX Runtime's."""
    names = [info.name for info in model.inputs]
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    expected = session.run(None, dict(zip(names, arrays, strict=True)))
    found = TorchModule(model)(*(torch.from_numpy(array) for array in arrays))
    found = list(found) if isinstance(found, tuple) else [found]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.detach().numpy().dtype, tuple(ours.shape)) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-5, atol=1e-6)
    return found


LOOP = """agraph (int64 limit, float[2] x) => (float[2] last, float[n, 2] all, int64[n] numbers)
{ last, all, numbers = Loop (limit, , x) <body = b (int64 i, bool c, float[2] h) =>
    (bool c2, float[2] h2, float[2] y, int64 number)
    { c2 = Identity (c) h2 = Add (h, h) y = Identity (h) number = Identity (i) }> }"""


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_loop_stacks_what_its_iterations_give(limit: int) -> None:
    check(parsed(LOOP), np.array(limit), np.array([1.0, -2.0], np.float32))


SCAN = """agraph (float[2] start, float[t, 2] rows) => (float[2] last, float[3, t] columns)
{ last, columns = Scan <num_scan_inputs = 1, scan_output_axes = [1], body = b (float[2] h, float[2] row) =>
    (float[2] h2, float[3] y) { h2 = Add (h, row) y = Concat <axis = 0> (h2, one) }> (start, rows) }"""


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_scan_stacks_along_its_axis(steps: int) -> None:
    rows = np.random.default_rng(0).standard_normal((steps, 2), np.float32)
    model, start = parsed(SCAN, one=np.ones(1, np.float32)), np.zeros(2, np.float32)
    if steps:
        check(model, start, rows)
    else:  # ONNX Runtime refuses to run a Scan over nothing
        last, columns = TorchModule(model)(torch.from_numpy(start), torch.from_numpy(rows))
        assert last.tolist() == [0, 0]
        assert (columns.shape, columns.dtype) == ((3, 0), torch.float32)


NESTED = """agraph (int64 limit, float[n, 2] x, float most) => (float[n, 2] y, int64 count)
{ zero = Constant <value_int = 0> ()
  y, count = Loop (limit, , x, zero) <body = b (int64 i, bool c, float[n, 2] h, int64 k) =>
    (bool c2, float[n, 2] h2, int64 k2) {
      h2, k2 = Loop (i, , h, k) <body = d (int64 j, bool e, float[n, 2] g, int64 m) =>
        (bool e2, float[n, 2] g2, int64 m2) {
          p = MatMul (g, w) s = ReduceMax <keepdims = 0> (p) small = Less (s, most)
          g2 = If (small) <then_branch = t () => (float[n, 2] a) { q = Add (p, x) a = Tanh (q) },
                           else_branch = u () => (float[n, 2] b1) { b1 = Mul (p, half) }>
          m2 = Add (m, i) e2 = Identity (small) }>
      one = Constant <value_int = 1> ()
      limited = Sub (limit, one)
      c2 = Less (i, limited) }> }"""


def test_bodies_in_bodies_capture_from_all_levels_and_train() -> None:
    rng = np.random.default_rng(0)
    model = parsed(NESTED, w=rng.standard_normal((2, 2), np.float32), half=np.array(0.5, np.float32))
    x = rng.standard_normal((3, 2), np.float32)
    for most in (0.2, 5.0):
        y, _ = check(model, np.array(4), x, np.array(most, np.float32))
        module = TorchModule(model)
        y = module(torch.tensor(4), torch.from_numpy(x), torch.tensor(most))[0]
        y.sum().backward()
        weight = module.get_parameter("w")
        assert weight.grad is not None
        assert float(weight.grad.abs().sum()) > 0
        # Central differences along one direction, in float64.
        double = TorchModule(model).double()
        direction, size = torch.from_numpy(rng.standard_normal((2, 2))), 1e-5
        sums = []
        for sign in (1, -1):
            moved = double.state_dict() | {"w": weight.detach().double() + sign * size * direction}
            found = torch.func.functional_call(
                double, moved, (torch.tensor(4), torch.from_numpy(x).double(), torch.tensor(most).double())
            )
            sums.append(float(found[0].sum().detach()))
        slope = (sums[0] - sums[1]) / (2 * size)
        assert slope == pytest.approx(float((weight.grad * direction).sum()), rel=1e-3, abs=1e-4)


def test_what_a_body_drops_follows_training_mode() -> None:
    model = parsed(
        """agraph (float[4, 64] rows) => (float[4, 64] y)
        { y = Scan <num_scan_inputs = 1, body = b (float[64] row) => (float[64] z)
            { z = Dropout (row, r) }> (rows) }""",
        r=np.array(0.5, np.float32),
    )
    module, ones = TorchModule(model), torch.ones(4, 64)
    assert torch.equal(module(ones), ones)
    dropped = module.train()(ones)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(dropped[0], dropped[1])


def recurrent(x, h):
    for row in x:
        h = np.tanh(h * 0.5 + row)
    return h


def time_of_a_step(steps: int) -> float:
    x, h = np.zeros((steps, 64, 64), np.float32), np.zeros((64, 64), np.float32)
    module = TorchModule(archipel.function(recurrent, (x, h)))
    given = torch.from_numpy(x).requires_grad_()
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        module(given, torch.from_numpy(h)).sum().backward()
        best = min(best, time.process_time() - start)
    return best


def test_time_of_a_loop_grows_with_its_iterations_and_not_their_square() -> None:
    # 8 times the iterations; a gradient of the whole sequence in each of them would take 64 times as long.
    assert time_of_a_step(512) < 24 * time_of_a_step(64)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the compiler warns of is PyTorch's own
def test_loops_under_torch_compile_give_the_same() -> None:
    rng = np.random.default_rng(0)
    for steps in (5, MOST_UNROLLED + 1):
        x, h = rng.standard_normal((steps, 3, 4), np.float32), np.zeros((3, 4), np.float32)
        module = TorchModule(archipel.function(recurrent, (x, h)))
        compiled: nn.Module = torch.compile(module, fullgraph=steps <= MOST_UNROLLED)
        found = []
        for run in (module, compiled):
            given = torch.from_numpy(x.copy()).requires_grad_()
            y = run(given, torch.from_numpy(h))
            y.sum().backward()
            found.append((y.detach().numpy(), given.grad.numpy()))
        for ours, theirs in zip(*found):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


BRANCH = """agraph (bool on, float[n, 2] x) => (float[n, 2] y)
{ y = If (on) <then_branch = t () => (float[n, 2] a) { a = Tanh (x) },
               else_branch = e () => (float[n, 2] b) { b = Neg (x) }> }"""


def test_a_branch_for_each_lane() -> None:
    """Under torch.func.vmap with a condition of each lane, values and gradients are those of the lanes one by one."""
    module = TorchModule(parsed(BRANCH))
    on, x = torch.tensor([True, False, True]), torch.randn(3, 4, 2)
    for over in ((0, 0), (0, None)):
        given = x if over[1] == 0 else x[0]
        found = torch.func.vmap(module, over)(on, given)
        for lane in range(3):
            torch.testing.assert_close(found[lane], module(on[lane], x[lane] if over[1] == 0 else x[0]))
    gradients = torch.func.vmap(torch.func.grad(lambda x, on: module(on, x).sum()))(x, on)
    torch.testing.assert_close(gradients[1], torch.full((4, 2), -1.0))
    torch.testing.assert_close(gradients[0], 1 - torch.tanh(x[0]) ** 2)


def test_branches_of_different_shapes_for_each_lane() -> None:
    text = BRANCH.replace("a = Tanh (x)", "zero = Constant <value_ints = [0]> () a = ReduceSum (x, zero)")
    with pytest.raises(archipel.errors.TrainingError, match=r"differs from lane to lane.*\[1, 2\] or \[4, 2\]"):
        torch.func.vmap(TorchModule(parsed(text)), (0, None))(torch.tensor([True, False]), torch.randn(4, 2))
