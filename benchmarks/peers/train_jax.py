"""A training step in JAX on the processor: one jitted function that reuses the buffers of what it replaces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from train_networks import NETWORKS, channels_last
from train_steps import Arrays, Job, Step, serve

CHANNELS_LAST = os.environ.get("LAYOUT") != "first"


class Layers:
    """Pictures are channels last, which XLA's convolutions on a processor like better."""

    def __init__(self, parameters: dict[str, Any], running: dict[str, Any]) -> None:
        self.parameters, self.running, self.updated = parameters, running, dict(running)

    def pictures(self, x: Any) -> Any:
        return jnp.moveaxis(x, 1, -1) if CHANNELS_LAST else x

    def conv(self, x: Any, name: str, stride: int = 1, padding: Sequence[int] = (0, 0), groups: int = 1) -> Any:
        weight, axes = self.parameters[f"{name}.weight"], x.ndim - 2
        order = ("NWC", "WIO") if axes == 1 else ("NHWC", "HWIO")
        if not CHANNELS_LAST:
            order = ("NCW", "OIW") if axes == 1 else ("NCHW", "OIHW")
        y = jax.lax.conv_general_dilated(
            x, weight, (stride,) * axes, [(each, each) for each in padding[:axes]],
            dimension_numbers=(*order, order[0]), feature_group_count=groups,
        )  # fmt: skip
        bias = self.parameters.get(f"{name}.bias")
        return y if bias is None else y + self._channels(bias, x)

    def _channels(self, value: Any, x: Any) -> Any:
        return value if CHANNELS_LAST else value.reshape(-1, *(1,) * (x.ndim - 2))

    def norm(self, x: Any, name: str) -> Any:
        axes = tuple(range(x.ndim - 1)) if CHANNELS_LAST else (0, *range(2, x.ndim))
        mean, variance = x.mean(axes), x.var(axes)
        count = x.size / mean.size
        for key, value in (("mean", mean), ("var", variance * (count / (count - 1)))):
            key = f"{name}.running_{key}"
            self.updated[key] = 0.9 * self.running[key] + 0.1 * jax.lax.stop_gradient(value)
        scale = jax.lax.rsqrt(variance + 1e-5) * self.parameters[f"{name}.weight"]
        shift = self.parameters[f"{name}.bias"] - mean * scale
        return x * self._channels(scale, x) + self._channels(shift, x)

    def max_pool(self, x: Any) -> Any:
        window = (1, *(2,) * (x.ndim - 2), 1) if CHANNELS_LAST else (1, 1, *(2,) * (x.ndim - 2))
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")

    def mean(self, x: Any) -> Any:
        return x.mean(tuple(range(1, x.ndim - 1)) if CHANNELS_LAST else tuple(range(2, x.ndim)))

    def flatten(self, x: Any) -> Any:
        return x.reshape(x.shape[0], -1)

    def dense(self, x: Any, name: str) -> Any:
        return x @ self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def relu(self, x: Any) -> Any:
        return jax.nn.relu(x)

    def relu6(self, x: Any) -> Any:
        return jax.nn.relu6(x)

    def gelu(self, x: Any) -> Any:
        return jax.nn.gelu(x, approximate=False)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def embed(self, ids: Any, name: str) -> Any:
        return self.parameters[f"{name}.weight"][ids]

    def parameter(self, name: str) -> Any:
        return self.parameters[name]

    def layer_norm(self, x: Any, name: str) -> Any:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        normal = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
        return normal * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def lstm(self, x: Any, name: str) -> Any:
        for layer in range(2):
            own = {
                key: self.parameters[f"{name}.{key}_l{layer}"]
                for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            }
            # The products with the inputs of all time steps at once.
            inputs = jnp.swapaxes(x @ own["weight_ih"] + own["bias_ih"] + own["bias_hh"], 0, 1)
            zeros = jnp.zeros((x.shape[0], own["weight_hh"].shape[0]), x.dtype)

            def cell(state: Any, row: Any, recurrent: Any = own["weight_hh"]) -> Any:
                h, c = state
                i, f, g, o = jnp.split(row + h @ recurrent, 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            x = jnp.swapaxes(jax.lax.scan(cell, (zeros, zeros), inputs)[1], 0, 1)
        return x

    def attention(self, x: Any, heads: int) -> Any:
        batch, time, width = x.shape
        q, k, v = (part.reshape(batch, time, heads, -1) for part in jnp.split(x, 3, -1))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, time, width // 3)


def train(job: Job, threads: int) -> Step:
    """XLA takes its number of threads from the variable NPROC."""
    given = channels_last(job.network, job.weights)
    running = {name: jnp.asarray(value) for name, value in given.items() if ".running_" in name}
    parameters = {name: jnp.asarray(value) for name, value in given.items() if name not in running}
    momenta = {name: jnp.zeros_like(value) for name, value in parameters.items()}
    forward = NETWORKS[job.network]

    def loss_of(parameters: Any, running: Any, x: Any, y: Any) -> Any:
        net = Layers(parameters, running)
        scores = jax.nn.log_softmax(forward(net, x))
        return -jnp.take_along_axis(scores, y[..., None], -1).mean(), net.updated

    def step(parameters: Any, momenta: Any, running: Any, x: Any, y: Any) -> Any:
        (loss, running), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters, running, x, y)
        momenta = jax.tree.map(lambda v, g: job.momentum * v + g, momenta, gradients)
        return loss, jax.tree.map(lambda w, v: w - job.rate * v, parameters, momenta), momenta, running

    compiled = jax.jit(step, donate_argnums=(0, 1, 2))
    state = (parameters, momenta, running)

    def run(feed: Arrays) -> float:
        nonlocal state
        loss, *state = compiled(*state, *feed.values())
        return float(loss)

    return run


if __name__ == "__main__":
    serve({"jax": train})
