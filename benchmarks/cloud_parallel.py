"""Ways to train by several processes: the planner's predicted step beside the measured one, and the two orders.

The processes exchange by gloo, each on one thread; the cluster is measured first, by the same processes, with operators
of other shapes than these networks have. A row is one network and way: `ours` is the predicted time of a step, the peer
the measured one. Ways take turns, one step a turn; told is the median.

A line for each network says whether both orders are the same. A pair of ways counts if the measured medians differ by
more than noise: by 5 % of the shorter, and by half of the larger interquartile range. Both orders are the same if no
such pair is predicted the other way round; those that are predicted to be equal within 5 % are named.

    python benchmarks/cloud_parallel.py                     two processes
    python benchmarks/cloud_parallel.py --processes 4       hybrid too
    python benchmarks/cloud_parallel.py --quick             fewer steps: under a minute
    python benchmarks/cloud_parallel.py --processor-time    on a machine that others use as well
    python benchmarks/cloud_parallel.py --cluster c.toml    with what was measured before, or to be written there

With --processor-time the busiest process counts. In a pipeline of m microbatches it waits for the others' first and
last one, which takes no processor time: 1 / m of their time is added. Other waiting is not told.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from measure import Report, Row, arguments
from torch import nn
from torch.nn import functional

from archipel import Model
from archipel.training.cloud import TorchModule, parallel
from archipel.training.cloud.planner import plan, read_cluster, write_cluster
from archipel.training.cloud.planner.measure import measure_cluster
from archipel.training.cloud.planner.plan import MARGIN, are_about_equal

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


@dataclass(frozen=True)
class Found:
    """Seconds of a step of one network, trained one way: as predicted, and of each measured turn."""

    network: str
    way: str
    predicted: float
    turns: list[float]

    @property
    def measured(self) -> float:
        return statistics.median(self.turns)

    @property
    def spread(self) -> float:
        """The interquartile range of the measured turns."""
        low, _, high = statistics.quantiles(self.turns, n=4)
        return high - low


def measure(names: list[str], rounds: int, clock: Callable[[], float], file: Path | None) -> list[Found]:
    """What is found in one of the processes, which are all to call this."""
    found = list[Found]()
    cluster = read_cluster(file) if file and file.exists() else measure_cluster(torch.device("cpu"), clock)
    torch.distributed.barrier()
    if file and not file.exists() and torch.distributed.get_rank() == 0:
        write_cluster(cluster, file)
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
        for way, taken in times.items():
            # The slowest process counts.
            everybody: list[list[float]] = [[] for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(everybody, taken)
            steps_of_all = [max(turn) for turn in zip(*everybody)]
            if way == "pipeline" and clock is time.process_time:
                # Waiting takes no processor time: for the first microbatch to come, and for the last to come back.
                steps_of_all = [max(turn) + (sum(turn) - max(turn)) / MICROBATCHES for turn in zip(*everybody)]
            found.append(Found(name, way, predicted[way].seconds, steps_of_all))
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


def process(
    rank: int, count: int, port: int, names: list[str], rounds: int, of_processor: bool, file: Path | None, answers: Any
) -> None:
    set_by_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in set_by_torchrun.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of PyTorch about its own functions
    with parallel.processes(device="cpu"):
        found = measure(names, rounds, time.process_time if of_processor else time.perf_counter, file)
    if rank == 0:
        answers.put(found)


def judged(found: list[Found], name: str) -> str:
    """One line about a network: both orders, and whether they are the same."""
    rows = [row for row in found if row.network == name]
    predicted = " < ".join(row.way for row in sorted(rows, key=lambda row: row.predicted))
    measured = " < ".join(row.way for row in sorted(rows, key=lambda row: row.measured))
    apart, wrong, equal = 0, list[str](), list[str]()
    for one, other in combinations(sorted(rows, key=lambda row: row.measured), 2):
        noise = max(one.spread, other.spread) / 2
        if other.measured - one.measured <= max(noise, MARGIN * one.measured):
            continue
        apart += 1
        if are_about_equal(one.predicted, other.predicted):
            equal.append(f"{one.way} and {other.way}")
        elif one.predicted > other.predicted:
            wrong.append(f"{one.way} and {other.way}")
    line = f"{name}: predicted {predicted}; measured {measured}; of {apart} pairs that differ by more than noise "
    line += f"{apart - len(wrong) - len(equal)} are in order"
    if not apart:
        return line + ": nothing can be told on a machine this busy"
    line += f", {len(equal)} predicted about equal ({', '.join(equal)})" if equal else ""
    return line + (f", {len(wrong)} the other way round ({', '.join(wrong)})" if wrong else ": the same order")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, default=2, help="how many, on this machine")
    parser.add_argument("--only", help="one network: a part of its name")
    parser.add_argument("--processor-time", action="store_true", help="where others compute, too")
    parser.add_argument("--cluster", type=Path, help="a cluster file, which is written if it does not exist")
    options = parser.parse_args()
    report = Report(options.json, ("torch", "numpy", "scipy"))
    names = [name for name in NETWORKS if not options.only or options.only.lower() in name.lower()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    rounds = 9 if options.quick else 25
    torch.multiprocessing.spawn(
        process,
        (options.processes, port, names, rounds, options.processor_time, options.cluster, answers),
        nprocs=options.processes,
        join=True,
    )
    found = answers.get()
    report.add([
        Row("cloud_parallel", f"{row.network}, {row.way}", 1e3 * row.predicted, 1e3 * row.measured, "measured",
            row.predicted / row.measured, "ms")
        for row in found
    ])  # fmt: skip
    for name in names:
        print(judged(found, name), file=sys.stderr if options.json else sys.stdout)


if __name__ == "__main__":
    main()
