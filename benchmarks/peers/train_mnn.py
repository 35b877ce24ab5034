"""A training step in MNN: expressions from its Python API, made anew in every step as its own examples do.

Networks of pictures alone: products of matrices, sigmoid, tanh and means cast their inputs, and a cast has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import MNN.expr as F
import MNN.nn as nn
import MNN.optim as optim
import numpy as np
from train_networks import NETWORKS
from train_steps import Arrays, Job, Step, serve


class Network(nn.Module):
    """Its trainable values and its batch normalizations by name, which MNN finds as this object's attributes."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.network, self.shapes = NETWORKS[job.network], {}
        weights = job.weights
        norms = {name.removesuffix(".running_mean") for name in weights if name.endswith(".running_mean")}
        dense = {name.removesuffix(".weight") for name, value in weights.items() if value.ndim == 2}
        for name in dense:
            outputs, inputs = weights[f"{name}.weight"].shape
            layer = nn.linear(inputs, outputs)
            layer.load_parameters([_trainable(weights[f"{name}.bias"][None]), _trainable(weights[f"{name}.weight"])])
            setattr(self, f"own.{name}", layer)
        for name, value in weights.items():
            layer = name.rpartition(".")[0]
            if layer not in norms | dense:
                if value.ndim == 3:
                    value = value[:, :, None]
                self.shapes[name] = value.shape
                setattr(self, f"own.{name}", _trainable(value))
        for name in norms:
            # It begins as PyTorch's: scales of one and shifts of zero.
            setattr(self, f"own.{name}", nn.batch_norm(len(weights[f"{name}.weight"]), 4, 0.9, 1e-5))

    def forward(self, x: Any) -> Any:
        return self.network(self, x)

    def pictures(self, x: Any) -> Any:
        return F.convert(F.unsqueeze(x, [2]) if len(x.shape) == 3 else x, F.NC4HW4)

    def conv(self, x: Any, name: str, stride: int = 1, padding: Sequence[int] = (0, 0), groups: int = 1) -> Any:
        weight = getattr(self, f"own.{name}.weight")
        bias = getattr(self, f"own.{name}.bias", None)
        if bias is None:
            bias = F.const(np.zeros(self.shapes[f"{name}.weight"][0], np.float32), [self.shapes[f"{name}.weight"][0]])
        padding = (0, *padding) if len(padding) == 1 else tuple(padding)
        return F.conv2d(x, weight, bias, (stride, stride), padding[::-1], (1, 1), groups, F.CAFFE)

    def norm(self, x: Any, name: str) -> Any:
        return getattr(self, f"own.{name}").forward(x)

    def max_pool(self, x: Any) -> Any:
        window = [2, 1 if x.shape[2] == 1 else 2]
        return F.max_pool(x, window, window)

    def mean(self, x: Any) -> Any:
        window = list(x.shape[2:])
        return self.flatten(F.avg_pool(x, window[::-1], [1, 1]))

    def flatten(self, x: Any) -> Any:
        x = F.convert(x, F.NCHW)
        return F.reshape(x, [x.shape[0], -1])

    def dense(self, x: Any, name: str) -> Any:
        return getattr(self, f"own.{name}").forward(x)

    def relu(self, x: Any) -> Any:
        return F.relu(x)

    def relu6(self, x: Any) -> Any:
        return F.relu6(x)

    def add(self, x: Any, y: Any) -> Any:
        return x + y


def _trainable(value: np.ndarray) -> Any:
    variable = F.const(np.ascontiguousarray(value), value.shape, F.NCHW)
    variable.fix_as_trainable()
    return variable


def mnn(job: Job, threads: int) -> Step:
    F.set_thread_number(threads)
    F.lazy_eval(True)
    network = Network(job)
    network.train(True)
    optimizer = optim.SGD(network, job.rate, job.momentum, 0.0)
    classes = int(job.classes)

    def step(feed: Arrays) -> float:
        x, y = (np.ascontiguousarray(each) for each in feed.values())
        if x.dtype == np.int64:
            x = x.astype(np.int32)
        inputs = F.const(x, x.shape, F.NCHW, F.int if x.dtype == np.int32 else F.float)
        labels = F.const(y.astype(np.int32).ravel(), [y.size], F.NCHW, F.int)
        targets = F.one_hot(labels, classes)
        predicted = F.softmax(F.reshape(network.forward(inputs), [y.size, classes]), 1)
        loss = nn.loss.cross_entropy(predicted, targets)
        value = float(loss.read())
        optimizer.step(loss)
        return value

    return step


if __name__ == "__main__":
    serve({"mnn": mnn})
