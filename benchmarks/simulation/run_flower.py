"""Flower's simulation with its engine of Ray, one processor a client."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flower_client import client
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from tasks import TASKS, Prepared, Task, serve, torch_accuracy, torch_network


def prepare(task: Task, rounds: int, folder: Path) -> Prepared:
    key = next(name for name, each in TASKS.items() if each is task)
    network = torch_network(task.name)
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=task.cohort / task.clients, fraction_evaluate=0.0)
        result = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(network.state_dict()), num_rounds=rounds,
            train_config=ConfigRecord({"task": key, "folder": str(folder)}),
        )  # fmt: skip
        network.load_state_dict(result.arrays.to_torch_state_dict())

    def run() -> Any:
        workers = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
        run_simulation(server, client, num_supernodes=task.clients, backend_config=workers)
        return network

    return run, lambda result: torch_accuracy(result, folder)


if __name__ == "__main__":
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    serve(prepare)
