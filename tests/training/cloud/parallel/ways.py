"""One of several processes: trains the three networks in each of the given ways and prints what came out, as JSON.

Run by test_ways.py: ways.py FOLDER CASE CASE ...; a case is NETWORK-WAY for the nn.Module, NETWORK-WAY-graph for the
TorchModule of FOLDER/NETWORK.onnx, or the name of one of checks.py.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, __file__.rpartition("/")[0])
from networks import EXAMPLES, batch, network

from archipel import Model
from archipel.training.cloud import TorchModule, parallel
from archipel.training.cloud.planner import Cluster

STEPS, SAVED = 10, 6


def train(placed: parallel.Placed, optimizer: torch.optim.Optimizer, name: str, steps: int) -> list[float]:
    inputs, labels = batch(name)
    size = EXAMPLES // placed.data_world
    rows = slice(placed.data_rank * size, (placed.data_rank + 1) * size)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(float(placed.step((inputs[rows],), labels[rows], functional.cross_entropy)))
        placed.clip(0.5)
        optimizer.step()
    return losses


def prepare(folder: str, name: str, way: str, of_graph: bool) -> parallel.Placed:
    if not of_graph:
        return parallel.prepare(network(name), way, microbatches=4)
    # Exchanges cost nothing, and so the planner divides what it can.
    cluster = Cluster(
        devices=torch.distributed.get_world_size(),
        memory_bytes=2**30,
        flops_per_second={"float32": 1e10},
        memory_bytes_per_second=1e10,
        link_bytes_per_second=1e12,
        latency_seconds=1e-9,
        exchange_seconds=1e-9,
        launch_seconds=1e-9,
    )
    module = TorchModule(Model.from_onnx(f"{folder}/{name}.onnx"))
    return parallel.prepare(module, way, batch_size=EXAMPLES, cluster=cluster, microbatches=4)


def run(folder: str, name: str, way: str, kind: str = "module") -> dict[str, Any]:
    placed = prepare(folder, name, way, kind == "graph")
    optimizer = torch.optim.Adam(placed.parameters(), lr=1e-2)
    losses = train(placed, optimizer, name, SAVED)
    placed.save(f"{folder}/{name}-{way}-{kind}", optimizer)
    losses += train(placed, optimizer, name, STEPS - SAVED)
    weights = placed.state_dict()

    again = prepare(folder, name, way, kind == "graph")
    optimizer = torch.optim.Adam(again.parameters(), lr=1e-2)
    again.load(f"{folder}/{name}-{way}-{kind}", optimizer)
    resumed = train(again, optimizer, name, STEPS - SAVED)

    loaded = prepare(folder, name, way, kind == "graph")
    whole: list[Any] = [weights]
    torch.distributed.broadcast_object_list(whole)
    loaded.load_state_dict(whole[0])
    inputs, _ = batch(name)
    size = EXAMPLES // loaded.data_world
    outputs = loaded.forward((inputs[loaded.data_rank * size : (loaded.data_rank + 1) * size],))
    return {
        "losses": losses,
        "resumed": resumed,
        "names": list(weights),
        "outputs": outputs.tolist(),
        "data": [loaded.data_rank, loaded.data_world],
        "placed": type(placed).__name__,
    }


def answer(folder: str, case: str) -> dict[str, Any]:
    if "-" in case:
        return run(folder, *case.split("-"))
    from tests.training.cloud.parallel.checks import CHECKS

    return CHECKS[case](folder)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of PyTorch about its own functions
    folder, *cases = sys.argv[1:]
    with parallel.processes(timeout_seconds=60):
        print(json.dumps({case: answer(folder, case) for case in cases}))


main()
