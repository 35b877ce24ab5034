"""One of several processes: trains the three networks in each of the given ways and prints what came out, as JSON.

Run by test_ways.py: ways.py FOLDER NETWORK-WAY NETWORK-WAY ...
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

from archipel.training.cloud import parallel

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


def run(folder: str, name: str, way: str) -> dict[str, Any]:
    placed = parallel.prepare(network(name), way, microbatches=4)
    optimizer = torch.optim.Adam(placed.parameters(), lr=1e-2)
    losses = train(placed, optimizer, name, SAVED)
    placed.save(f"{folder}/{name}-{way}", optimizer)
    losses += train(placed, optimizer, name, STEPS - SAVED)
    weights = placed.state_dict()

    again = parallel.prepare(network(name), way, microbatches=4)
    optimizer = torch.optim.Adam(again.parameters(), lr=1e-2)
    again.load(f"{folder}/{name}-{way}", optimizer)
    resumed = train(again, optimizer, name, STEPS - SAVED)

    loaded = parallel.prepare(network(name), way, microbatches=4)
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
    }


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of PyTorch about its own functions
    folder, *cases = sys.argv[1:]
    with parallel.processes(timeout_seconds=60):
        print(json.dumps({case: run(folder, *case.split("-")) for case in cases}))


main()
