"""Flower's client, in a module of its own that its workers import."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tasks import TASKS, load, parts, torch_network

client = ClientApp()


@functools.cache
def data(name: str, folder: str) -> tuple[Any, Any, list[Any], Any]:
    """A worker's own: the data, mapped, whose rows it reads when it trains their client, and a network."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, y = map(torch.from_numpy, load(Path(folder), mapped=True))
    return x, y, [torch.from_numpy(each) for each in parts(len(x), TASKS[name])], torch_network(TASKS[name].name)


@client.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    task = TASKS[str(config["task"])]
    x, y, devices, network = data(str(config["task"]), str(config["folder"]))
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rows = devices[int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(network.parameters(), lr=task.rate)
    for chosen in rows[torch.randperm(len(rows))].split(task.batch):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x[chosen]), y[chosen]).backward()
        optimizer.step()
    arrays = ArrayRecord(network.state_dict())
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(rows)})}), reply_to=message
    )
