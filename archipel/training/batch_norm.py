"""BatchNormalization in training and evaluation: running statistics as state, as constants, or folded away."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from archipel.autodiff.rules.normalization import EPSILON, Statistics, normalize_batch, standardize
from archipel.errors import TrainingError
from archipel.graph.model import Model
from archipel.graph.parameters import statistics
from archipel.graph.shapes import dims, dtype_of, static_size
from archipel.graph.walk import inner_nodes
from archipel.training.assembly import Assembly
from archipel.training.dropout import is_dropout
from archipel.training.folding import fold_batch_norm, is_batch_norm

BatchNorm = Literal["train", "frozen", "folded"]

_MOMENTUM = 0.9  # the default of BatchNormalization-15
Average = tuple[ir.Value, ir.Value]
"""A running statistic before the step (an input), and after it."""


def prepared(model: Model, batch_norm: BatchNorm) -> Model:
    """A copy in inference mode: Dropout drops nothing, BatchNormalization uses the model's own statistics.

    "folded" puts BatchNormalization into the layer before it, where there is one (`fold_batch_norm`).
    """
    check_batch_norm(batch_norm)
    result = model.copy()
    for node in result.ir.graph.all_nodes():
        if is_batch_norm(node):
            _use_running(node)
        elif is_dropout(node):
            node.resize_inputs(min(len(node.inputs), 2))  # the third says whether it drops
    if batch_norm == "folded":
        fold_batch_norm(result.ir)
    return result


def check_batch_norm(batch_norm: object) -> None:
    """Refuse a value that is no BatchNorm. Raises TrainingError."""
    if batch_norm not in get_args(BatchNorm):
        raise TrainingError(f"batch_norm must be 'train', 'frozen' or 'folded', is {batch_norm!r}")


def track(work: Assembly) -> list[Average]:
    """Let every BatchNormalization normalize with the batch's statistics and keep running ones as state.

    running' = momentum running + (1 - momentum) batch. The variance is PyTorch's estimate, which divides by N - 1 for
    the N elements of a channel, where BatchNormalization-15 divides by N. Where N is 1, as for one example that is left
    at the end of a pass (PyTorch refuses it), the batch has no statistics: the layer normalizes with the running ones,
    which stay. Returns each running statistic before and after. Raises TrainingError where statistics are not
    initializers of their own, and for a layer inside a loop or branch.
    """
    op = work.op
    # The newest value of each statistic: a layer that is used twice moves them twice, one after the other.
    now: dict[ir.Value, ir.Value] = {}
    for node, source, averages in _layers(work):
        scale, bias = node.inputs[1:3]
        if scale is None or bias is None:
            raise TrainingError(f"BatchNormalization {node.name!r} has no scale or bias")
        momentum = node.attributes.get_float("momentum", _MOMENTUM)
        epsilon = node.attributes.get_float("epsilon", EPSILON)
        before = [now.get(average, average) for average in averages]
        with op.after(node), op.scope(str(node.name)):
            y, batch = normalize_batch(op, source, scale, bias, epsilon)
            count = _elements(work, source, dtype_of(batch.var))
            # Max keeps the division finite where N is 1.
            unbiased = op.Mul(batch.var, op.Div(count, op.Max(op.Sub(count, 1.0), 1.0)))
            after = [
                op.Add(op.Mul(old, momentum), op.Mul(new, 1.0 - momentum))
                for old, new in zip(before, (batch.mean, unbiased))
            ]
            if _may_be_one(source):
                several = op.Greater(count, 1.0)
                y = op.Where(
                    several, y, standardize(op, source, Statistics(before[0], before[1], epsilon), scale, bias)
                )
                after = [op.Where(several, new, old) for old, new in zip(before, after)]
            now.update(zip(averages, after))
        work.replace(node.outputs[0], y)
    return list(now.items())


def remember(work: Assembly) -> None:
    """Let every BatchNormalization normalize with the running statistics that training keeps: state inputs."""
    _layers(work)


def statistics_of_layers(model: Model) -> list[tuple[ir.Node, str, str]]:
    """Every BatchNormalization outside of loops and branches, with the names of its running mean and variance."""
    nodes = [node for node in model.ir.graph if is_batch_norm(node)]
    return [
        (node, str(mean.name), str(variance.name))
        for node in nodes
        for mean, variance in [node.inputs[3:5]]
        if mean is not None and variance is not None
    ]


def _layers(work: Assembly) -> list[tuple[ir.Node, ir.Value, tuple[ir.Value, ir.Value]]]:
    """Each BatchNormalization with its input, and its running mean and variance made state."""
    known = set(statistics(work.model.ir))
    layers = []
    for node in filter(is_batch_norm, inner_nodes(work.graph)):
        raise TrainingError(
            f"BatchNormalization {node.name!r} is inside a loop or branch, where its statistics cannot become state; "
            "move it outside, or use batch_norm='frozen'"
        )
    for node in work.graph:
        if not is_batch_norm(node):
            continue
        source, *_, mean, variance = node.inputs
        if source is None or mean is None or variance is None or not {mean.name, variance.name} <= known:
            raise TrainingError(
                f"BatchNormalization {node.name!r}: its running mean and variance are not initializers of its own, so "
                "they cannot become state; use batch_norm='frozen'"
            )
        layers.append((node, source, (mean, variance)))
    # Each once: two layers may share their statistics.
    for average in dict.fromkeys(value for *_, averages in layers for value in averages):
        work.make_state(average)
    return layers


def _may_be_one(source: ir.Value) -> bool:
    """Whether a channel may have only one element."""
    batch, *rest = dims(source)
    return not any(isinstance(size, int) and size > 1 for size in (batch, *rest[1:]))


def _elements(work: Assembly, source: ir.Value, dtype: ir.DataType) -> ir.Value:
    """How many elements of `source` a channel has."""
    op, (batch, *rest) = work.op, dims(source)  # [batch, channels, *spatial]: the batch size times the spatial sizes
    spatial = static_size(rest[1:])
    if isinstance(batch, int) and spatial is not None:
        return op.constant(np.array(batch * spatial, dtype.numpy()))
    field = next((value for value in work.fields if dims(value)[:1] == (batch,)), None)
    if field is None or spatial is None:
        counted = op.Div(
            op.Size(source), rest[0] if rest and isinstance(rest[0], int) else op.Shape(source, start=1, end=2)
        )
    else:
        # From the example and not from `source`: equal for all layers of one resolution, and so computed once.
        counted = op.Mul(op.Shape(field, start=0, end=1), spatial)
    return op.Cast(counted, to=int(dtype))


def _use_running(node: ir.Node) -> None:
    if any(list(value.uses()) or value.is_graph_output() for value in node.outputs[1:]):
        raise TrainingError(
            f"BatchNormalization {node.name!r}: the model reads its running statistics as results; export the model "
            "for inference (training_mode=0)"
        )
    node.attributes.pop("training_mode", None)
    node.resize_outputs(1)
