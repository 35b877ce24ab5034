"""Where a pipeline is cut: what several operators read stays in one stage, and the stages have the graph's state."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from archipel import Model
from archipel.errors import TrainingError
from archipel.training.cloud import TorchModule
from archipel.training.cloud.parallel.cuts import cut
from archipel.training.cloud.parallel.placing import even_starts, node_starts, traced
from archipel.training.cloud.planner import Cluster, plan
from archipel.training.cloud.planner.division import divide, keep_together
from tests.training.cloud.parallel.checks import tied_model
from tests.training.cloud.parallel.networks import batch, network

CLUSTER = Cluster(
    devices=2, memory_bytes=2**30, flops_per_second={"float32": 1e10}, memory_bytes_per_second=1e10,
    link_bytes_per_second=1e12, latency_seconds=1e-9, exchange_seconds=1e-9, launch_seconds=1e-9,
)  # fmt: skip


class Repeated(nn.Module):
    """Without ties the cut that divides parameters most evenly would lie between the calls of `shared`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        for _ in range(3):
            hidden = torch.tanh(self.shared(hidden))
        return self.last(hidden)


def composed(stages: list[Any], x: torch.Tensor) -> torch.Tensor:
    values: Any = (x,)
    for stage in stages:
        values = stage(*values)
        values = values if isinstance(values, tuple) else (values,)
    return values[0]  # type: ignore[no-any-return]


def test_a_repeated_layer_lies_in_one_stage_of_a_module_and_of_a_graph() -> None:
    module, x = Repeated(), torch.randn(4, 8)
    graph = traced(module)
    stages = cut(graph, even_starts(graph, 2))
    torch.testing.assert_close(composed(stages, x), module(x))
    users = [part for part in stages if any(name.startswith("shared") for name, _ in part.named_parameters())]
    assert len(users) == 1

    lowered = TorchModule(Model.from_torch(module.eval(), x))
    found = plan(lowered.source, CLUSTER, 16)["pipeline"]
    assert not found.refused
    torch.testing.assert_close(composed(cut(lowered, node_starts(lowered, found.starts)), x), module(x))


@pytest.mark.sampled(every=4)
def test_ties_that_leave_one_stage_are_refused_and_say_why() -> None:
    found = plan(tied_model(), CLUSTER, 16)["pipeline"]
    assert "'inner.embedding.weight' is read by several, which must lie in one stage with all between" in found.refused
    module = Repeated()
    module.last = module.first  # type: ignore[assignment]
    with pytest.raises(TrainingError, match="what several read, such as tied embeddings, must lie in one stage"):
        even_starts(traced(module), 2)


def test_items_that_read_the_same_are_kept_together() -> None:
    assert keep_together([1, 2, 3, 4], [["a"], [], ["a"], ["b"]]) == [6, 0, 0, 4]
    # Groups that overlap are one, and an item that reads nothing between two groups is its own.
    assert keep_together([1, 1, 1, 1, 1, 1], [["a"], ["b"], ["a"], ["b"], [], ["c"]]) == [4, 0, 0, 0, 1, 1]
    assert divide(keep_together([1, 5, 5, 1], [["a"], ["b"], ["b"], ["c"]]), 3) == [1, 3]


@pytest.mark.sampled(every=4)
def test_the_stages_have_the_state_of_the_graph() -> None:
    convolutions = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    for module, x in ((convolutions, torch.zeros(2, 1, 8, 8)), (network("picture"), batch("picture")[0])):
        lowered = TorchModule(Model.from_torch(module.eval(), x))
        starts = node_starts(lowered, plan(lowered.source, CLUSTER, 16)["pipeline"].starts)
        stages = cut(lowered, starts)
        names = sorted(chain.from_iterable(part.state_dict() for part in stages))
        assert names == sorted(module.state_dict())


def test_the_table_names_what_each_device_computes_whole() -> None:
    model = Model.from_torch(network("picture").eval(), batch("picture")[0])
    lines = plan(model, CLUSTER, 16).table().splitlines()
    (line,) = [line for line in lines if line.startswith("tensor: each device computes all of ")]
    for kind in ("Resize (", "ConvTranspose (", "Split (", "Slice ("):
        assert kind in line
    assert "Conv (" not in line
