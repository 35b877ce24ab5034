"""What operators take by a cluster's speeds, and which plans are about equal."""

from __future__ import annotations

import functools
import importlib

import msgspec
import pytest
import torch
from torch import nn

from archipel import Model
from archipel.training.cloud.planner import Cluster, plan
from archipel.training.cloud.planner.calibrate import operator_speeds
from archipel.training.cloud.planner.compute import convolution_kind, unit_seconds
from archipel.training.cloud.planner.costs import Unit, costs
from archipel.training.cloud.planner.plan import are_about_equal

CLUSTER = Cluster(
    devices=2,
    memory_bytes=2**30,
    flops_per_second={"float32": 1e9},
    memory_bytes_per_second=1e9,
    launch_seconds=0.0,
    link_bytes_per_second=1e8,
    latency_seconds=1e-3,
)


@functools.cache
def units() -> dict[str, Unit]:
    network = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5, bias=False))
    model = Model.from_torch(network.eval(), torch.zeros(2, 3, 4, 4))
    return {unit.op_type: unit for unit in costs(model, 2).units}


@pytest.mark.sampled(every=3)
def test_an_operator_that_is_slower_than_memory() -> None:
    pool = units()["MaxPool"]
    # [2, 4, 4, 4] read and [2, 4, 2, 2] written, in float32; a backward pass of twice that.
    moved = 3 * 4 * (128 + 32)
    assert unit_seconds(pool, CLUSTER) == pytest.approx(moved / 1e9)
    slow = msgspec.structs.replace(CLUSTER, operator_bytes_per_second={"MaxPool": 1e6})
    assert unit_seconds(pool, slow) == pytest.approx(moved / 1e6)
    assert unit_seconds(pool, slow, 0.5) == pytest.approx(moved / 2e6)


def test_a_convolution_of_few_channels() -> None:
    convolution = units()["Conv"]
    flops = 2 * 2 * 16 * 4 * 3
    quick = msgspec.structs.replace(CLUSTER, memory_bytes_per_second=1e12)
    narrow = msgspec.structs.replace(quick, convolution_share={"narrow": 0.25, "depthwise": 0.1})
    # Both passes: the data have no gradient, so two products.
    assert unit_seconds(convolution, quick) == pytest.approx(2 * flops / 1e9)
    assert unit_seconds(convolution, narrow) == pytest.approx(8 * flops / 1e9)
    assert [convolution_kind(*shape) for shape in ((16, 1), (15, 1), (1, 40), (64, 2))] == [
        "",
        "narrow",
        "depthwise",
        "",
    ]


def test_products_copy_their_factors_and_then_compute() -> None:
    product = next(unit for kind, unit in units().items() if kind in ("MatMul", "Gemm"))
    copying = msgspec.structs.replace(CLUSTER, operator_bytes_per_second={"MatMul": 1e8})
    flops, moved = 2 * 2 * 16 * 5, 4 * (2 * 16 + 16 * 5 + 2 * 5)
    assert unit_seconds(product, copying) == pytest.approx(3 * (flops / 1e9 + moved / 1e8))


@pytest.mark.sampled(every=3)
def test_plans_that_take_about_as_long_say_so() -> None:
    assert are_about_equal(1.0, 1.049)
    assert not are_about_equal(1.0, 1.051)
    assert not are_about_equal(float("inf"), float("inf"))
    # Exchanges in no time: ddp and fsdp compute the same.
    links = msgspec.structs.replace(
        CLUSTER, link_bytes_per_second=1e15, memory_bytes_per_second=1e15, latency_seconds=0.0, exchange_seconds=0.0
    )
    network = nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 4))
    found = plan(Model.from_torch(network.eval(), torch.zeros(2, 3, 4, 4)), links, 64)
    assert "fsdp" in found.about_equal("ddp")
    assert "ddp" in found.about_equal("fsdp")
    assert "about equal: fsdp" in found.table()
    assert found.about_equal("auto") == found.about_equal("hybrid") == ()


def test_calibration_solves_for_rate_and_copying() -> None:
    """A device of which everything is known: what is told follows from the times that the timer gives."""
    times = iter(
        [6 * 448**3 / 1e10 + 12 * 3 * 448**2 / 1e9, 6 * 12 * 3600**2 / 1e10 + 12 * (2 * 12 * 3600 + 3600**2) / 1e9]
    )
    found = operator_speeds(torch.device("cpu"), lambda call: next(times, 1.0), torch.contiguous_format)
    assert found["flops_per_second"]["float32"] == pytest.approx(1e10, rel=1e-6)
    assert found["operator_bytes_per_second"]["MatMul"] == pytest.approx(1e9, rel=1e-6)
    # One second for 3 passes over 24 x 40 x 28 x 28 numbers and a quarter as many.
    assert found["operator_bytes_per_second"]["MaxPool"] == pytest.approx(3 * 4 * 1.25 * 24 * 40 * 28 * 28)


@pytest.mark.sampled(every=3)
def test_fsdp_holds_the_gathered_segments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("archipel.training.cloud.planner.plan"), "SEGMENT_BYTES", 1024)
    network = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
    model = Model.from_torch(network.eval(), torch.zeros(2, 32))
    layer, saved = 4 * 32**2, 5 * 4 * 8 * 32
    found = plan(model, CLUSTER, 8, optimizer="sgd")["fsdp"]
    # Half of each parameter and gradient; of one layer the whole, its gradient, and the whole of the next.
    assert found.memory_bytes == 5 * layer * 2 / 2 + 3 * layer + saved / 2


@pytest.mark.sampled(every=3)
def test_devices_wait_for_each_other_at_every_exchange_of_a_divided_operator() -> None:
    """Two products, by columns and by rows: one sum of activations (Shoeybi et al. 2019)."""
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    model = Model.from_torch(network.eval(), torch.zeros(2, 8))
    waiting = msgspec.structs.replace(CLUSTER, wait_seconds=10.0)
    before, after = (plan(model, cluster, 4) for cluster in (CLUSTER, waiting))
    more = {way: after[way].seconds - before[way].seconds for way in ("ddp", "pipeline", "tensor")}
    # The data have no gradient, so the way back needs none; the bias behind the sum is whole, and so is its gradient.
    assert more == pytest.approx({"ddp": 0.0, "pipeline": 0.0, "tensor": 10.0}, abs=0.01)
    assert [strategy.name for strategy in after["tensor"].strategies.values()] == ["column", "axis 1", "row"]
