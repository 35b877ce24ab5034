"""A training step in MNN: expressions from its Python API, made anew in every step as its own examples do."""

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
        for name in dense - {"embedding", "tokens"}:
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

    def gelu(self, x: Any) -> Any:
        return x * F.scalar(0.5) * (F.scalar(1.0) + F.erf(x * F.scalar(0.5**0.5)))

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def embed(self, ids: Any, name: str) -> Any:
        return F.gather(getattr(self, f"own.{name}.weight"), ids)

    def parameter(self, name: str) -> Any:
        return getattr(self, f"own.{name}")

    def layer_norm(self, x: Any, name: str) -> Any:
        centred = x - F.reduce_mean(x, [-1], True)
        scale = F.rsqrt(F.reduce_mean(centred * centred, [-1], True) + F.scalar(1e-5))
        return centred * scale * getattr(self, f"own.{name}.weight") + getattr(self, f"own.{name}.bias")

    def lstm(self, x: Any, name: str) -> Any:
        for layer in range(2):
            own = [
                getattr(self, f"own.{name}.{key}_l{layer}") for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            batch, time, _ = x.shape
            hidden = self.shapes[f"{name}.weight_hh_l{layer}"][1]
            rows = F.matmul(x, own[0], False, True) + own[2] + own[3]
            h = c = F.const(np.zeros((batch, hidden), np.float32), [batch, hidden])
            states = []
            for row in F.unstack(rows, 1) if time > 1 else [rows]:
                i, f, g, o = F.split(row + F.matmul(h, own[1], False, True), [hidden] * 4, 1)
                c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
                h = F.sigmoid(o) * F.tanh(c)
                states.append(h)
            x = F.stack(states, 1)
        return x

    def attention(self, x: Any, heads: int) -> Any:
        batch, time, width = x.shape
        width //= 3
        parts = F.split(x, [width] * 3, 2)
        q, k, v = (F.transpose(F.reshape(p, [batch, time, heads, width // heads]), [0, 2, 1, 3]) for p in parts)
        later = np.triu(np.full((time, time), -1e9, np.float32), 1)
        scores = F.matmul(q, k, False, True) * F.scalar((width // heads) ** -0.5) + F.const(later, later.shape)
        mixed = F.matmul(F.softmax(scores, -1), v)
        return F.reshape(F.transpose(mixed, [0, 2, 1, 3]), [batch, time, width])


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
