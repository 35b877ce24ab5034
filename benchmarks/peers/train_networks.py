"""The networks of the step benchmarks (archipel.models), each written once for every framework that trains them.

A network is a function of `net`, a framework's layers (Layers), and a minibatch; it gives logits. Parameters have the
names and shapes that PyTorch's state_dict has, from which every framework begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class Layers(Protocol):
    """What a framework gives. Pictures are [batch, channels, height, width] or whatever order it likes better."""

    def pictures(self, x: Any) -> Any:
        """A minibatch [batch, channels, ...] in the framework's own order."""

    def conv(self, x: Any, name: str, stride: int = 1, padding: Sequence[int] = (0, 0), groups: int = 1) -> Any:
        """`name`.weight is [filters, channels / groups, ...]; `name`.bias may be missing. A window has one or two axes,
        of which `padding` has the last."""

    def norm(self, x: Any, name: str) -> Any:
        """Batch normalization by the minibatch's statistics, which update the running ones with momentum 0.1."""

    def max_pool(self, x: Any) -> Any:
        """By windows of two along every axis, side by side."""

    def mean(self, x: Any) -> Any:
        """Over all positions: [batch, channels]."""

    def flatten(self, x: Any) -> Any:
        """[batch, features], of pictures."""

    def dense(self, x: Any, name: str) -> Any:
        """`name`.weight is [outputs, inputs]."""

    def relu(self, x: Any) -> Any: ...

    def relu6(self, x: Any) -> Any: ...

    def gelu(self, x: Any) -> Any:
        """The exact one, by erf."""

    def add(self, x: Any, y: Any) -> Any: ...

    def embed(self, ids: Any, name: str) -> Any:
        """[batch, time] to [batch, time, width]."""

    def parameter(self, name: str) -> Any: ...

    def layer_norm(self, x: Any, name: str) -> Any:
        """Over the last axis, epsilon 1e-5."""

    def lstm(self, x: Any, name: str) -> Any:
        """Two layers from zero states, gates i, f, g, o: [batch, time, inputs] to [batch, time, hidden]."""

    def attention(self, x: Any, heads: int) -> Any:
        """Causal, of queries, keys and values side by side: [batch, time, 3 * width] to [batch, time, width]."""


def mlp(net: Layers, x: Any) -> Any:
    x = net.relu(net.dense(x, "hidden1"))
    return net.dense(net.relu(net.dense(x, "hidden2")), "output")


def lenet(net: Layers, x: Any) -> Any:
    x = net.max_pool(net.relu(net.conv(net.pictures(x), "conv1", padding=(2, 2))))
    x = net.flatten(net.max_pool(net.relu(net.conv(x, "conv2"))))
    x = net.relu(net.dense(x, "hidden1"))
    return net.dense(net.relu(net.dense(x, "hidden2")), "output")


def fedavg_cnn(net: Layers, x: Any) -> Any:
    x = net.max_pool(net.relu(net.conv(net.pictures(x), "conv1", padding=(2, 2))))
    x = net.flatten(net.max_pool(net.relu(net.conv(x, "conv2", padding=(2, 2)))))
    return net.dense(net.relu(net.dense(x, "hidden")), "output")


def cnn_1d(net: Layers, x: Any) -> Any:
    x = net.max_pool(net.relu(net.conv(net.pictures(x), "conv1", padding=(2,))))
    x = net.flatten(net.max_pool(net.relu(net.conv(x, "conv2", padding=(2,)))))
    return net.dense(net.relu(net.dense(x, "hidden")), "output")


def resnet8(net: Layers, x: Any) -> Any:
    x = net.relu(net.norm(net.conv(net.pictures(x), "conv", padding=(1, 1)), "norm"))
    for block, stride in (("block1", 1), ("block2", 2), ("block3", 2)):
        y = net.relu(net.norm(net.conv(x, f"{block}.conv1", stride, (1, 1)), f"{block}.norm1"))
        y = net.norm(net.conv(y, f"{block}.conv2", padding=(1, 1)), f"{block}.norm2")
        x = net.relu(net.add(y, x if stride == 1 else net.conv(x, f"{block}.shortcut", stride)))
    return net.dense(net.mean(x), "output")


def ds_cnn(net: Layers, x: Any) -> Any:
    x = net.relu(net.norm(net.conv(net.pictures(x), "conv", 2, (5, 1)), "norm"))
    for block in ("block1", "block2", "block3", "block4"):
        x = net.conv(x, f"{block}.depthwise", padding=(1, 1), groups=64)
        x = net.conv(net.relu(net.norm(x, f"{block}.norm1")), f"{block}.pointwise")
        x = net.relu(net.norm(x, f"{block}.norm2"))
    return net.dense(net.mean(x), "output")


# (expansion, channels, blocks, stride of the first block): table 2 of Sandler et al. 2018
STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenet_v2(net: Layers, x: Any) -> Any:
    def layer(x: Any, name: str, at: int, stride: int = 1, padding: Sequence[int] = (0, 0), groups: int = 1) -> Any:
        return net.norm(net.conv(x, f"{name}.{at}", stride, padding, groups), f"{name}.{at + 1}")

    x = net.relu6(layer(net.pictures(x), "stem", 0, padding=(1, 1)))
    before, index = 32, 0
    for expansion, channels, repeats, first in STAGES:
        for stride in (first, *(1,) * (repeats - 1)):
            name, inner, at = f"blocks.{index}.layers", before * expansion, 0 if expansion == 1 else 3
            y = x if expansion == 1 else net.relu6(layer(x, name, 0))
            y = net.relu6(layer(y, name, at, stride, (1, 1), inner))
            y = layer(y, name, at + 3)
            x = net.add(x, y) if stride == 1 and before == channels else y
            before, index = channels, index + 1
    return net.dense(net.mean(net.relu6(layer(x, "head", 0))), "output")


def char_rnn(net: Layers, x: Any) -> Any:
    return net.dense(net.lstm(net.embed(x, "embedding"), "recurrent"), "decoder")


def transformer(net: Layers, x: Any) -> Any:
    x = net.add(net.embed(x, "tokens"), net.parameter("positions"))
    for name in ("layers.0", "layers.1"):
        y = net.attention(net.dense(net.layer_norm(x, f"{name}.norm1"), f"{name}.attention"), heads=4)
        x = net.add(x, net.dense(y, f"{name}.project"))
        y = net.gelu(net.dense(net.layer_norm(x, f"{name}.norm2"), f"{name}.widen"))
        x = net.add(x, net.dense(y, f"{name}.narrow"))
    return net.dense(net.layer_norm(x, "norm"), "decoder")


NETWORKS: dict[str, Callable[[Layers, Any], Any]] = {
    each.__name__: each  # type: ignore[attr-defined]
    for each in (mlp, lenet, fedavg_cnn, resnet8, ds_cnn, mobilenet_v2, cnn_1d, char_rnn, transformer)
}

FLATTENED = {"lenet": ("hidden1", (16, 5, 5)), "fedavg_cnn": ("hidden", (64, 7, 7)), "cnn_1d": ("hidden", (64, 32))}
"""The linear layer that reads flattened pictures, and one picture's shape, channels first."""


def channels_last(network: str, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """For frameworks with pictures [batch, height, width, channels]: filters [..., channels, filters], linear weights
    [inputs, outputs]."""
    ready = {}
    flat, shape = FLATTENED.get(network, ("", ()))
    for name, value in parameters.items():
        layer, _, kind = name.rpartition(".")
        if value.ndim > 2:
            value = np.moveaxis(value, (0, 1), (-1, -2))
        elif kind.startswith("weight") and value.ndim == 2 and layer not in ("embedding", "tokens"):
            if layer == flat:
                value = np.moveaxis(value.reshape(-1, *shape), 1, -1).reshape(len(value), -1)
            value = value.T
        ready[name] = np.ascontiguousarray(value)
    return ready
