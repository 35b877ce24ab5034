"""One training step, three ways: ONNX Runtime on its graph, `TorchModule` of the same graph, PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from archipel import Model, training
from archipel.training import StepRunner, losses, optimizers, schedules, transforms
from archipel.training.cloud.graphs.torch_module import TorchModule
from tests.training.cloud.programs.step_networks import NETWORKS, Network

STEPS = 10

torch.set_num_threads(1)

# What each program is made with; `options` are those of `step_graph`.
PROGRAMS: dict[str, tuple[Callable[[], optimizers.Optimizer], dict[str, Any]]] = {
    "sgd": (lambda: optimizers.sgd(lr=0.05), {}),
    "momentum": (lambda: optimizers.sgd(lr=0.05, momentum=0.9, nesterov=True), {}),
    "adam": (lambda: optimizers.adam(lr=schedules.cosine(0.01, 12)), {}),
    "clip": (
        lambda: optimizers.sgd(lr=0.5),
        {"transforms": [transforms.clip_by_norm(0.1), transforms.weight_decay(0.1), transforms.proximal(0.3)]},
    ),
    "accumulate": (lambda: optimizers.adam(lr=0.01), {"accumulate": 2}),
    "steps": (lambda: optimizers.sgd(lr=0.05, momentum=0.9), {"steps": 5}),
    "mixed": (lambda: optimizers.sgd(lr=0.05), {"precision": training.mixed(scale=256.0)}),
    "example": (lambda: optimizers.sgd(lr=0.05), {"per_example": training.per_example(0.2)}),
    "private": (lambda: optimizers.sgd(lr=0.05), {"per_example": training.per_example(0.2, 1.0)}),
    "kernels": (lambda: optimizers.sgd(lr=0.05), {"kernels": True}),
    "recompute": (lambda: optimizers.sgd(lr=0.05), {"recompute": "auto"}),
    "folded": (lambda: optimizers.sgd(lr=0.05), {"batch_norm": "folded"}),
}
# In the short suite each network, with what makes graphs most different.
SHORT = {
    ("cnn", "momentum"), ("cnn", "kernels"), ("mlp", "clip"), ("mlp", "private"), ("mlp", "mixed"),
    ("recurrent", "accumulate"), ("attention", "steps"),
}  # fmt: skip
TOLERANCE = {"mixed": 2e-3}  # what float16 rounds differs where ONNX Runtime keeps products in float32


def torch_runner(program: Model, **given: Any) -> StepRunner:
    return StepRunner(program, engine="torch:cpu", **given)


def pairs() -> list[Any]:
    chosen = []
    for network in NETWORKS.values():
        for name in PROGRAMS:
            if not (network.has_statistics and name in ("example", "private")):  # examples of a batch are not apart
                marks = [] if (network.name, name) in SHORT else [pytest.mark.slow]
                chosen.append(pytest.param(network, name, marks=marks, id=f"{network.name}-{name}"))
    return chosen


@pytest.mark.parametrize(("network", "name"), pairs())
@pytest.mark.sampled(every=6)
def test_a_step_graph_trains_as_on_onnx_runtime(network: Network, name: str) -> None:
    optimizer, options = PROGRAMS[name]
    program = training.step_graph(network.model(), losses.cross_entropy(), optimizer(), **options)
    ours, theirs = (
        build(program, seed=3, randomness=np.random.default_rng(0).bytes) for build in (torch_runner, StepRunner)
    )
    batches = [network.batch(i) for i in range(STEPS)]
    tolerance = TOLERANCE.get(name, 1e-5)
    for i in range(0, STEPS, theirs.steps):
        expected = theirs.run(batches[i : i + theirs.steps])
        for found, metrics in zip(ours.run(batches[i : i + theirs.steps]), expected, strict=True):
            assert found["loss"] == pytest.approx(metrics["loss"], rel=tolerance)
            assert found.get("accuracy") == metrics.get("accuracy")
    assert ours.tensors.keys() == theirs.tensors.keys()
    for tensor, value in theirs.tensors.items():
        found = ours.tensors[tensor]
        assert (found.shape, found.dtype) == (value.shape, value.dtype)
        scale = max(float(np.abs(value).max(initial=0.0)), 1e-2)
        assert float(np.abs(found.astype(np.float64) - value).max(initial=0.0)) < tolerance * scale, tensor


OPTIMIZERS: dict[str, tuple[Callable[[], optimizers.Optimizer], Callable[[Any], torch.optim.Optimizer]]] = {
    "momentum": (
        lambda: optimizers.sgd(lr=0.0625, momentum=0.875),
        lambda p: torch.optim.SGD(p, 0.0625, momentum=0.875),
    ),
    "adam": (lambda: optimizers.adam(lr=0.0078125), lambda p: torch.optim.Adam(p, 0.0078125)),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_implementations_of_one_step_agree(name: str) -> None:
    """In float64, without Dropout: ONNX Runtime, `TorchModule` of the step graph, and autograd with torch.optim."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4)).double()
    model = Model.from_torch(module, torch.zeros(2, 5, dtype=torch.float64))
    ours, native = OPTIMIZERS[name]
    program = training.step_graph(model, losses.cross_entropy(), ours())
    runners = [StepRunner(program), torch_runner(program)]
    optimizer = native(module.parameters())
    rng = np.random.default_rng(2)
    for _ in range(STEPS):
        x, y = rng.standard_normal((6, 5)), rng.integers(0, 4, 6)
        for runner in runners:
            runner.step((x, y))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    # The decay rates are float32 numbers in the graph, and those of torch.optim float64.
    tolerance = 1e-6 if name == "adam" else 1e-10
    for tensor, value in module.state_dict().items():
        np.testing.assert_allclose(runners[1].tensors[tensor], runners[0].tensors[tensor], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(runners[1].tensors[tensor], value.numpy(), rtol=tolerance, atol=tolerance)


def test_dropout_masks_are_those_of_onnx_runtime_bit_for_bit() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[batch, 64] x) => (float[batch, 64] y) <float[32, 64] w, float r = {0.3}>
        { a = Mul (x, w) b = Dropout (a, r) y = Dropout (b, r) }"""
    )
    ones = np.ones((32, 64), np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(ones, "w"))
    program = training.step_graph(Model.from_proto(proto), losses.l1(), optimizers.sgd())
    for seed in (0, 2**32 - 1):
        runners = [build(program, hyperparameters={"lr": 1.0}, seed=seed) for build in (StepRunner, torch_runner)]
        for step in range(3):
            kept = []
            for runner in runners:
                runner.resume({**runner.tensors, "w": ones}, step)
                runner.step({"x": ones, "label": np.zeros_like(ones)})
                kept.append(runner.tensors["w"] != 1)
            assert 0.4 < kept[0].mean() < 0.6  # 0.7 * 0.7 are kept
            np.testing.assert_array_equal(kept[1], kept[0])


def test_a_step_that_overflows_is_skipped() -> None:
    network = NETWORKS["mlp"]
    program = training.step_graph(
        network.model(), losses.cross_entropy(), optimizers.sgd(), precision=training.mixed(scale=1024.0)
    )
    x, y = network.batch(0)
    for runner in (StepRunner(program), torch_runner(program)):
        before = dict(runner.tensors)
        runner.step((np.full_like(x, np.inf), y))
        assert runner.tensors["loss_scale"] == 512.0
        assert all(np.array_equal(runner.tensors[name], before[name]) for name in program.initial)
        runner.step((x, y))
        assert not np.array_equal(runner.tensors["0.weight"], before["0.weight"])


def test_unsigned_inputs_and_outputs_have_the_types_of_the_graph() -> None:
    model = Model.from_proto(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["" : 21]>
            agraph (uint32[n] x, uint64[n] u, uint16[n] s) => (uint32[n] y, uint64[n] v, uint16[n] t)
            <uint32 k = {2654435761}, uint64 one = {1}>
            { y = Mul (x, k) v = BitShift <direction = "RIGHT"> (u, one) t = Add (s, s) }"""
        )
    )
    x = np.array([0, 1, 7, 2**31, 2**32 - 1], np.uint32)
    u = np.array([0, 1, 7, 2**63, 2**64 - 1], np.uint64)
    s = np.array([0, 1, 7, 2**15, 2**16 - 1], np.uint16)
    expected = [x * np.uint32(2654435761), u >> np.uint64(1), s + s]
    module = TorchModule(model)
    wide = [
        torch.from_numpy(x.astype(np.int64)),
        torch.from_numpy(u.view(np.int64)),
        torch.from_numpy(s).to(torch.int64),
    ]
    for given in ([torch.from_numpy(value) for value in (x, u, s)], wide):
        for found, value in zip(module(*given), expected, strict=True):
            assert found.dtype == torch.from_numpy(value).dtype
            np.testing.assert_array_equal(found.numpy(), value)


def test_weights_go_back_in_the_types_of_the_graph() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[n, 2] x) => (float[n, 2] y, uint32[2] z)
        { b = Cast <to = 1> (w) a = Mul (x, b) y = Add (a, f) z = Add (k, k) }"""
    )
    stored = [
        onnx.numpy_helper.from_array(np.array([1, 2**31 + 5], np.uint32), "k"),
        onnx.numpy_helper.from_array(np.ones(2, np.float32), "f"),
        onnx.helper.make_tensor("w", onnx.TensorProto.BFLOAT16, [2], [1.5, 2.0]),
    ]
    proto.graph.initializer.extend(stored)
    module = TorchModule(Model.from_proto(proto))
    assert module(torch.ones(1, 2))[1].tolist() == [2, 10]
    back = {
        tensor.name: tensor for tensor in onnx.load_from_string(module.double().to_model().to_bytes()).graph.initializer
    }
    for tensor in stored:
        assert back[tensor.name].data_type == tensor.data_type
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(back[tensor.name]), onnx.numpy_helper.to_array(tensor))
