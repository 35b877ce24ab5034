"""Both halves of a Flower app: federated averaging of a network, or of an array that nothing is done to.

Runs where flwr and PyTorch are. The run's configuration says which: `entries` float32 are sent to and fro, or with
`network` the 1D-CNN or LeNet of archipel/models is trained for an epoch on `data`, an .npz with x and y.
The server writes a line to `marks` whenever a round is over, the client one for each training: its own CPU seconds.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()
RATE, MOMENTUM, BATCH = 0.01, 0.9, 32


@client.train()
def train(message: Message, context: Context) -> Message:
    settings, arrays = context.run_config, message.content["arrays"]
    if settings["network"]:
        arrays, examples, cpu = epoch(str(settings["network"]), str(settings["data"]), arrays)
    else:
        examples, cpu = 1, 0.0
        arrays = ArrayRecord([array + np.float32(1) for array in arrays.to_numpy_ndarrays()])
    mark(context, {"trained": time.time(), "cpu": cpu})
    metrics = MetricRecord({"num-examples": examples})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def epoch(name: str, data: str, arrays: ArrayRecord) -> tuple[ArrayRecord, int, float]:
    """The new parameters, the examples, and CPU seconds of the epoch alone, without what is read and imported."""
    import torch

    torch.set_num_threads(1)
    net = network(name)
    net.load_state_dict(arrays.to_torch_state_dict())
    with np.load(data) as file:
        x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    started = time.process_time()
    net.train()
    for chosen in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return ArrayRecord(net.state_dict()), len(x), time.process_time() - started


def network(name: str) -> Any:
    from torch import nn

    layers = {
        "cnn_1d": OrderedDict(
            conv1=nn.Conv1d(6, 64, kernel_size=5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool1d(2),
            conv2=nn.Conv1d(64, 64, kernel_size=5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool1d(2),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * 32, 64),
            relu3=nn.ReLU(),
            output=nn.Linear(64, 6),
        ),
        "mlp": OrderedDict(
            hidden1=nn.Linear(784, 200),
            relu1=nn.ReLU(),
            hidden2=nn.Linear(200, 200),
            relu2=nn.ReLU(),
            output=nn.Linear(200, 10),
        ),
    }
    return nn.Sequential(layers[name])


class Marked(FedAvg):
    """Federated averaging with one client, that tells when a round is over."""

    def __init__(self, context: Context) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        self._context = context

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        result = super().aggregate_train(server_round, replies)
        mark(self._context, {"round": server_round, "time": time.time()})
        return result


@server.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    if settings["network"]:
        arrays = ArrayRecord(network(str(settings["network"])).state_dict())
    else:
        arrays = ArrayRecord([np.zeros(int(settings["entries"]), np.float32)])
    Marked(context).start(grid=grid, initial_arrays=arrays, num_rounds=int(settings["rounds"]))
    mark(context, {"ended": time.time()})


def mark(context: Context, what: dict[str, float]) -> None:
    with Path(str(context.run_config["marks"])).open("a") as file:
        file.write(json.dumps(what) + "\n")
