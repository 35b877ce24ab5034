"""Costs of a graph's operators against PyTorch's own counts."""

from __future__ import annotations

import functools

import onnx
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from archipel import Model
from archipel.errors import TrainingError
from archipel.training.cloud.planner.costs import Costs, costs
from tests.training.cloud.parallel.networks import batch, network


@functools.cache
def model(name: str) -> Model:
    return Model.from_torch(network(name).eval(), batch(name)[0])


def of(name: str, batch_size: int) -> Costs:
    return costs(model(name), batch_size)


@pytest.mark.parametrize("name", ["mlp", "transformer", "cnn"])
@pytest.mark.sampled(every=4)
def test_flops_of_both_passes_are_those_that_pytorch_counts(name: str) -> None:
    module, (inputs, labels) = network(name), batch(name)
    # The counter does not know the CPU's fused attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        loss = nn.functional.cross_entropy(module(inputs), labels)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(loss)
    found = of(name, len(inputs))
    assert sum(unit.flops for unit in found.units) == forward.get_total_flops()
    # PyTorch counts the gradient of a weight in 8 groups as if there were one: 8 times the multiply-accumulates.
    too_much = 7 * 2 * (16 * 8 * 8 * 8 * 9) if name == "cnn" else 0
    assert sum(unit.flops * unit.backward for unit in found.units) == backward.get_total_flops() - too_much


@pytest.mark.parametrize("name", ["mlp", "transformer", "cnn"])
@pytest.mark.sampled(every=4)
def test_parameters_are_the_modules(name: str) -> None:
    found = of(name, 4)
    expected = {key: tuple(tensor.shape) for key, tensor in network(name).named_parameters()}
    assert {parameter.name: parameter.shape for parameter in found.parameters} == expected
    read = {parameter.name for unit in found.units for parameter in unit.parameters}
    assert read == set(expected)


@pytest.mark.sampled(every=3)
def test_work_grows_with_the_batch_and_parameters_do_not() -> None:
    small, large = of("cnn", 4), of("cnn", 32)
    assert sum(u.flops for u in large.units) == 8 * sum(u.flops for u in small.units)
    assert sum(u.saved for u in large.units) == 8 * sum(u.saved for u in small.units)
    assert large.parameter_bytes == small.parameter_bytes


def test_another_symbolic_size_is_named() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        sums (float[batch, length] x) => (float[batch, length] y) { y = Relu(x) }"""
    with pytest.raises(TrainingError, match=r"'length' is not known; give it: model.fix"):
        costs(Model.from_proto(onnx.parser.parse_model(text)), 4)
