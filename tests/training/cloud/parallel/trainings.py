"""One of several processes: `train` in each of the given ways; prints what came out, as JSON.

Run by test_trainings.py: trainings.py FOLDER WAY WAY ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from archipel import Model
from archipel.training import losses, optimizers
from archipel.training.cloud import Callback, TrainConfig, Trainer, TrainResult, parallel, train

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 6)).astype(np.float32)
Y = RNG.integers(0, 4, 96)
Y[::5] = 3  # does not count
HELD = 22  # examples of validation, which two and four processes cannot divide evenly

SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"ema": 0.9, "clip": 0.5},
    "fsdp": {"ema": 0.9, "clip": 0.5, "optimizer": optimizers.adamw(lr=0.01)},
    "tensor": {"accumulate": 2},
    "pipeline": {},
}
# Of a graph, by the planner; exchanges cost nothing there, and so it divides what it can.
CLUSTER = """
devices = 2
memory_bytes = 1_000_000_000
flops_per_second = { float32 = 1e9 }
memory_bytes_per_second = 1e9
link_bytes_per_second = 1e12
latency_seconds = 1e-9
exchange_seconds = 1e-9
launch_seconds = 1e-9
"""


class Stop(Callback):
    def __init__(self, minibatches: int = 6) -> None:
        self.minibatches = minibatches

    def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
        trainer.stop = trainer.minibatches == self.minibatches


class Die(Callback):
    """Ends the second process without a word."""

    def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if trainer.minibatches == 7 and trainer.execution.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def run(way: str, parallel_way: str, **changes: Any) -> TrainResult:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    callbacks = changes.pop("callbacks", ())
    settings = {
        "optimizer": optimizers.sgd(momentum=0.9, lr=0.1), "loss": losses.cross_entropy(ignore_index=3),
        "batch_size": 24, "epochs": 3, "device": "cpu", **SETTINGS[way], **changes,
    }  # fmt: skip
    config = TrainConfig(parallel=parallel_way, **settings)  # type: ignore[arg-type]
    return train(module, (X, Y), config, validation=(X[:HELD], Y[:HELD]), callbacks=callbacks)


def run_graph(folder: str, way: str) -> TrainResult:
    """The graph FOLDER/model.onnx, by a plan for FOLDER/cluster.toml."""
    config = TrainConfig(
        loss="cross_entropy", optimizer={"name": "adamw", "lr": 0.01}, batch_size=24, epochs=2, device="cpu",
        parallel=way, cluster=None if way == "none" else f"{folder}/cluster.toml",
    )  # fmt: skip
    return train(Model.from_onnx(f"{folder}/model.onnx"), (X, Y), config, validation=(X[:HELD], Y[:HELD]))


# What is left of 91 examples: one for two processes, or three.
RESTS: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 10, "parallel": "ddp"},
    "weighted": {"batch_size": 8, "parallel": "fsdp", "loss": losses.cross_entropy(ignore_index=3)},
    "normalized": {"batch_size": 10, "parallel": "ddp", "sync_batch_norm": True},
}


def run_rest(kind: str, **changes: Any) -> TrainResult:
    """An epoch whose last batch the processes cannot divide."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16) if kind == "normalized" else nn.Identity()
    module = nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Linear(16, 4))
    settings = {"epochs": 2, "device": "cpu", "optimizer": optimizers.sgd(lr=0.1), **RESTS[kind], **changes}
    config = TrainConfig(**settings)
    model = Model.from_torch(module.eval(), torch.zeros(2, 6)) if kind == "normalized" else module
    return train(model, (X[:91], Y[:91]), config, validation=(X[:HELD], Y[:HELD]))


def facts(result: TrainResult) -> dict[str, Any]:
    return {
        "losses": [epoch.train_loss for epoch in result.history],
        "validation": [dict(epoch.metrics) for epoch in result.history],
        "weights": {name: tensor.tolist() for name, tensor in result.module.state_dict().items()},
    }


def main() -> None:
    folder, *ways = sys.argv[1:]
    if ways[0] == "die":
        run("ddp", "ddp", checkpoint=folder, checkpoint_every=2, callbacks=[Die()])
    if ways[0] == "resume":
        print(json.dumps(facts(run("ddp", "ddp", checkpoint=folder, checkpoint_every=2))))
        return
    if ways[0] == "graph":
        with parallel.processes(device="cpu"):
            print(json.dumps({way: facts(run_graph(folder, way)) for way in ways[1:]}))
        return
    if ways[0] == "stop":
        with parallel.processes(device="cpu"):
            for pair in ways[2:]:
                way, _, parallel_way = pair.partition(":")
                run(way, parallel_way, checkpoint=f"{folder}/{way}", callbacks=[Stop(int(ways[1]))])
        print("null")
        return
    answers = {}
    with parallel.processes(device="cpu"):
        for way in ways:
            whole = facts(run(way, way))
            place = f"{folder}/{way}"
            stopped = run(way, way, checkpoint=place, callbacks=[Stop()])
            resumed = run(way, way, checkpoint=place)
            answers[way] = {"whole": whole, "stopped": len(stopped.history), "resumed": facts(resumed)}
    print(json.dumps(answers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
