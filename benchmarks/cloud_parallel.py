"""Ways to train by several processes: the planner's predicted step beside the measured one, and the two orders.

The processes exchange by gloo, each on one thread; the cluster is measured first, by the same processes. A row is one
network and way: `ours` is the predicted time of a step, the peer the measured one. Ways take turns, one step a turn;
told is the median. A line for each network says whether both orders of the ways are the same.

    python benchmarks/cloud_parallel.py                     two processes
    python benchmarks/cloud_parallel.py --processes 4       hybrid too
    python benchmarks/cloud_parallel.py --quick             fewer steps: under a minute
    python benchmarks/cloud_parallel.py --processor-time    on a machine that others use as well

With --processor-time the busiest process counts. A pipeline of n stages and m microbatches waits, which takes no
processor time: told is 1 + (n - 1) / m times what it took.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measure import Report, Row, arguments
from torch import nn
from torch.nn import functional

from archipel import Model
from archipel.training.cloud import TorchModule, parallel
from archipel.training.cloud.planner import plan
from archipel.training.cloud.planner.measure import measure_cluster

WAYS = ("ddp", "fsdp", "tensor", "pipeline", "hybrid")
MICROBATCHES = 4


class Block(nn.Module):
    """Attention and a feed-forward part, normalized before each (pre-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        layers = (self.query, self.key, self.value)
        parts = (layer(y).view(batch, length, self.heads, -1).transpose(1, 2) for layer in layers)
        attended = functional.scaled_dot_product_attention(*parts)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    """Token ids [batch, 64] -> logits of one class [batch, 10]."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(4)))
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)).mean(1))


def wide_mlp() -> nn.Module:
    wide = 3072
    return nn.Sequential(nn.Linear(1024, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 10))


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor], int]] = {
    # name: (network, inputs of a batch, batch size)
    "wide MLP": (wide_mlp, lambda n: torch.randn(n, 1024), 32),
    "transformer": (Transformer, lambda n: torch.randint(0, 1000, (n, 64)), 32),
    "CNN": (cnn, lambda n: torch.randn(n, 3, 32, 32), 128),
}


def measure(names: list[str], rounds: int, clock: Callable[[], float]) -> list[tuple[str, str, float, float]]:
    """(network, way, predicted seconds, measured seconds), in one of the processes."""
    found = list[tuple[str, str, float, float]]()
    cluster = measure_cluster(torch.device("cpu"), clock)
    if torch.distributed.get_rank() == 0:
        print(cluster, file=sys.stderr)
    for name in names:
        make, inputs_of, batch_size = NETWORKS[name]
        torch.manual_seed(0)
        inputs, labels = inputs_of(batch_size), torch.randint(0, 10, (batch_size,))
        model = Model.from_torch(make().eval(), inputs[:2])
        predicted = plan(model, cluster, batch_size, microbatches=MICROBATCHES)
        steps: dict[str, Callable[[], None]] = {}
        for way in WAYS:
            if not predicted[way].refused:
                module = TorchModule(model).train()
                placed = parallel.prepare(
                    module, way, batch_size=batch_size, cluster=cluster, microbatches=MICROBATCHES
                )
                steps[way] = step_of(placed, inputs, labels)
        times: dict[str, list[float]] = {way: [] for way in steps}
        for turn in range(rounds + 2):
            for way, step in steps.items():
                torch.distributed.barrier()
                start = clock()
                step()
                torch.distributed.barrier()
                if turn >= 2:
                    times[way].append(clock() - start)
        # The slowest process counts. Waiting takes no processor time, so the idle part of the schedule is added.
        idle = 1 + (torch.distributed.get_world_size() - 1) / MICROBATCHES if clock is time.process_time else 1.0
        for way, taken in times.items():
            slowest = torch.tensor(statistics.median(taken), dtype=torch.float64)
            torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
            found.append((name, way, predicted[way].seconds, slowest.item() * (idle if way == "pipeline" else 1.0)))
    return found


def step_of(placed: parallel.Placed, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(placed.parameters(), lr=1e-4)
    size = len(labels) // placed.data_world
    rows = slice(placed.data_rank * size, (placed.data_rank + 1) * size)

    def step() -> None:
        optimizer.zero_grad()
        placed.step((inputs[rows],), labels[rows], functional.cross_entropy)
        optimizer.step()

    return step


def process(rank: int, count: int, port: int, names: list[str], rounds: int, of_processor: bool, answers: Any) -> None:
    set_by_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in set_by_torchrun.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of PyTorch about its own functions
    with parallel.processes(device="cpu"):
        found = measure(names, rounds, time.process_time if of_processor else time.perf_counter)
    if rank == 0:
        answers.put(found)


def orders(found: list[tuple[str, str, float, float]], name: str) -> tuple[list[str], list[str]]:
    """The ways of one network, fastest first: as predicted, and as measured."""
    rows = [row for row in found if row[0] == name]
    return [w for _, w, _, _ in sorted(rows, key=lambda r: r[2])], [
        w for _, w, _, _ in sorted(rows, key=lambda r: r[3])
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, default=2, help="how many, on this machine")
    parser.add_argument("--only", help="one network: a part of its name")
    parser.add_argument("--processor-time", action="store_true", help="where others compute, too")
    options = parser.parse_args()
    report = Report(options.json, ("torch", "numpy", "scipy"))
    names = [name for name in NETWORKS if not options.only or options.only.lower() in name.lower()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    rounds = 5 if options.quick else 20
    torch.multiprocessing.spawn(
        process,
        (options.processes, port, names, rounds, options.processor_time, answers),
        nprocs=options.processes,
        join=True,
    )
    found = answers.get()
    rows = [
        Row("cloud_parallel", f"{name}, {way}", 1e3 * guess, 1e3 * taken, "measured", guess / taken, "ms")
        for name, way, guess, taken in found
    ]
    report.add(rows)
    for name in names:
        predicted, measured = orders(found, name)
        same = "the same order" if predicted == measured else "another order"
        line = f"{name}: predicted {' < '.join(predicted)}; measured {' < '.join(measured)}: {same}"
        print(line, file=sys.stderr if options.json else sys.stdout)


if __name__ == "__main__":
    main()
