"""How much each unit of a group matters: by the size of its weights, or by their effect on the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from archipel.autodiff import differentiate
from archipel.compression.examples import Examples, fixed_batch
from archipel.compression.prune.dependency import ChannelGroup, Member
from archipel.compression.score import open_session
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.graph.functions import inline_functions
from archipel.graph.parameters import statistics
from archipel.graph.passes import optimize
from archipel.graph.shapes import constant_array, dtype_of, is_float
from archipel.training.assembly import Assembly
from archipel.training.batch_norm import prepared
from archipel.training.dropout import deactivate
from archipel.training.losses import Loss, objective

Criterion = Literal["taylor", "l1", "l2"]
BATCH = 32


def magnitudes(model: Model, groups: Sequence[ChannelGroup], criterion: Literal["l1", "l2"]) -> dict[str, np.ndarray]:
    """For each group the importance of its units, float64 [units]: the mean absolute value (L1) or the root mean square
    (L2) of the unit's weights in every layer that makes it, over the layer's mean, so that layers can be compared."""
    importance = {}
    for group in groups:
        total = np.zeros(group.size)
        for member in _members(model, group, ("weight",)):
            weights = _slices(_content(model, member), member)
            norms = np.abs(weights).mean(1) if criterion == "l1" else np.sqrt(np.square(weights).mean(1))
            total += norms / max(float(norms.mean()), np.finfo(np.float64).tiny)
        importance[group.name] = total
    return importance


def taylor(
    model: Model,
    groups: Sequence[ChannelGroup],
    loss: Loss,
    examples: Examples,
) -> dict[str, np.ndarray]:
    """For each group the importance of its units, float64 [units]: (sum of w dL/dw over what produces the unit)^2.

    To first order, the square of the change of the loss when the unit's weights, biases and scales become zero
    (Molchanov et al. 2019, section 3.1): averaged over batches of the labelled `examples`, with BatchNormalization and
    Dropout as in inference. Raises CompressionError where there are no labels.
    """
    if examples.labels is None:
        raise CompressionError("Taylor importance needs labelled examples")
    # Running statistics are not trained.
    weights, averages = model.parameters, set(statistics(model.ir))
    members = {
        group.name: [
            m for m in _members(model, group, ("weight", "affine")) if m.tensor in weights and m.tensor not in averages
        ]
        for group in groups
    }
    names = sorted({member.tensor for producers in members.values() for member in producers})
    size = fixed_batch(model) or BATCH
    # A smaller last batch would count as much as the others.
    batches = [batch.feed for batch in examples.batches(size) if len(batch) == size or len(examples) < size]
    total = {group.name: np.zeros(group.size) for group in groups}
    for gradients in _gradients(model, loss, names, batches):
        products = {name: gradient.astype(np.float64) * weights[name] for name, gradient in gradients.items()}
        for name, producers in members.items():
            # Summed over the unit before it is squared: what one weight adds another may take away.
            change = sum(_slices(products[member.tensor], member).sum(1) for member in producers)
            total[name] += np.square(change) / len(batches)
    return total


def _gradients(
    model: Model, loss: Loss, names: Sequence[str], batches: Iterable[Mapping[str, np.ndarray]]
) -> Iterable[dict[str, np.ndarray]]:
    """dL/dw of each batch, by name: one graph that ONNX Runtime opens once."""
    work = Assembly(prepared(model, "frozen"), loss, list(names))
    deactivate(work)
    op = work.op
    value = objective(op, loss, work.output, work.label)
    # The cotangent of the loss.
    seed = op.constant(np.ones((), dtype_of(value).numpy()))
    for place, gradient in enumerate(differentiate(op, {value: seed}, work.parameters)):
        op.name_output(gradient, op.unique(f"gradient_{place}"))
    order = [str(parameter.name) for parameter in work.parameters]
    inline_functions(work.model.ir)
    optimize(work.model.ir)
    run = open_session(Model(work.model.ir))
    for batch in batches:
        yield dict(zip(order, run({**batch, **work.initial})))


def _members(model: Model, group: ChannelGroup, roles: tuple[str, ...]) -> list[Member]:
    weights = model.ir.graph.initializers
    return [m for m in group.members if m.role in roles and m.tensor in weights and is_float(weights[m.tensor])]


def _slices(content: np.ndarray, member: Member) -> np.ndarray:
    """[units, elements of the unit], float64."""
    rows = np.moveaxis(content, member.axis, 0)[member.indices.reshape(-1)]
    elements: np.ndarray = rows.reshape(len(member.indices), -1).astype(np.float64)
    return elements


def _content(model: Model, member: Member) -> np.ndarray:
    content = constant_array(model.ir.graph.initializers[member.tensor])
    if content is None:
        raise CompressionError(f"tensor {member.tensor!r} has no value")
    return content
