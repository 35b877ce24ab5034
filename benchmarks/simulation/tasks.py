"""What all sides of benchmarks/simulate.py share: the tasks, the data, and how a side is started and asked.

It needs NumPy alone, for it is imported in the environments of all sides.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Task:
    """Federated averaging with SGD, one local epoch a round, batches of `batch`; `clients` have as many examples."""

    name: str
    clients: int
    rounds: int
    rate: float
    workers: int
    cohort: int = 10
    batch: int = 10


TASKS = {
    "lr": Task("LR-MNIST", clients=1000, rounds=100, rate=0.1, workers=1),
    "cnn": Task("FedAvg CNN", clients=100, rounds=10, rate=0.05, workers=2),
}


def load(folder: Path, *, mapped: bool = False) -> tuple[Any, Any]:
    """The pictures float32 [n, 1, 28, 28] and the labels int64 [n]."""
    mode: Any = "r" if mapped else None
    return np.load(folder / "x.npy", mmap_mode=mode), np.load(folder / "y.npy")


def parts(count: int, task: Task) -> list[np.ndarray]:
    """The rows of each client, the same for all sides."""
    return [np.sort(each) for each in np.array_split(np.random.default_rng(0).permutation(count), task.clients)]


def cohorts(task: Task, rounds: int) -> list[np.ndarray]:
    """Clients of each round, for the loops."""
    rng = np.random.default_rng(1)
    return [rng.choice(task.clients, task.cohort, replace=False) for _ in range(rounds)]


Prepared = tuple[Callable[[], Any], Callable[[Any], float]]
"""What runs the rounds, and what measures the accuracy of its result."""


def serve(prepare: Callable[[Task, int, Path], Prepared]) -> None:
    """A side's life: load, say "ready", wait for a line, run, say how long it took and how accurate the model is."""
    name, rounds, folder, descriptor = sys.argv[1:5]
    run, measure = prepare(TASKS[name], int(rounds), Path(folder))
    with os.fdopen(int(descriptor), "w") as answers:
        print("ready", file=answers, flush=True)
        sys.stdin.readline()
        started, worked = time.perf_counter(), _processor_seconds()
        result = run()
        seconds, worked = time.perf_counter() - started, _processor_seconds() - worked
        print("done", file=answers, flush=True)
        told = {"seconds": seconds, "processor": worked, "accuracy": measure(result)}
        print(json.dumps(told), file=answers, flush=True)


def _processor_seconds() -> float:
    """Of this process and of those that it started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def linear_accuracy(weight: Any, bias: Any, folder: Path) -> float:
    """Of logits x @ weight + bias, with weight [784, 10]."""
    x, y = np.load(folder / "tx.npy"), np.load(folder / "ty.npy")
    return float((np.argmax(x.reshape(len(x), -1) @ weight + bias, axis=1) == y).mean())


def torch_network(name: str) -> Any:
    """Both networks in PyTorch: logistic regression, and the CNN of McMahan et al. 2017."""
    from collections import OrderedDict

    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == TASKS["lr"].name:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 32, kernel_size=5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, kernel_size=5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * 7 * 7, 512),
            relu3=nn.ReLU(),
            output=nn.Linear(512, 10),
        )
    )


def torch_accuracy(network: Any, folder: Path) -> float:
    import torch

    x, y = np.load(folder / "tx.npy"), np.load(folder / "ty.npy")
    with torch.inference_mode():
        return float((network.eval()(torch.from_numpy(x)).argmax(1).numpy() == y).mean())
