"""What the tests of pruning share: running a model, and zeroing what makes a unit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from archipel import Model
from archipel.compression.prune import ChannelGroup


def run(model: Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.to_bytes(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def zeroed(model: Model, groups: list[ChannelGroup], drop: Mapping[str, np.ndarray]) -> Model:
    """A copy in which the producers of these units are zero: weights, biases, and scale and shift of normalizations.

    A constant that several nodes read stays: zeros in it would reach units that are to be kept.
    """
    result = model.copy()
    for group in groups:
        for member in group.members:
            value = result.ir.graph.initializers.get(member.tensor)
            if not member.produces or value is None or group.name not in drop:
                continue
            if member.tensor in model.parameter_names or len(list(value.uses())) == 1:
                content = value.const_value.numpy().copy()
                np.moveaxis(content, member.axis, 0)[member.indices[drop[group.name]].reshape(-1)] = 0
                value.const_value = ir.tensor(content, name=value.name)
    return result


def half(groups: list[ChannelGroup], seed: int = 0) -> dict[str, np.ndarray]:
    """Half of the units of each group, chosen at random; one at least, where there are two."""
    rng = np.random.default_rng(seed)
    return {g.name: np.sort(rng.permutation(g.size)[: max(g.size // 2, 1)]) for g in groups if g.size > 1}
