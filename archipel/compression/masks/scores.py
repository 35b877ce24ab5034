"""The importance of single weights: the magnitude, or how much the loss would change without the weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from archipel.autodiff import gradient
from archipel.compression.compressed import CompressedModel
from archipel.compression.examples import LABEL, Examples, fixed_batch
from archipel.compression.layer_weights import LayerWeight
from archipel.compression.score import open_session
from archipel.compression.work import Work
from archipel.graph import Builder, Model
from archipel.training.batch_norm import prepared
from archipel.training.losses import Loss, objective

Criterion = Literal["l1", "taylor"]

TAYLOR_EXAMPLES = 512
"""Training examples, drawn by the seed, over which gradients are averaged."""
_BATCH = 64
_LOSS = "archipel/loss"


def scores(
    criterion: Criterion, model: CompressedModel, weights: Sequence[LayerWeight], work: Work, part: object
) -> dict[str, np.ndarray]:
    """For each weight an array of its shape, float64: small where it can go, -1 where a mask has it already.

    "l1" is |w|; "taylor" the mean over batches of |w dL/dw|, the first-order change of the loss without w (Molchanov
    et al. 2019, for single weights), with BatchNormalization in inference mode.
    """
    if criterion == "taylor":
        importance = taylor(model, work.loss, [w.name for w in weights], _sample(work.need_data(part), work.seed))
    else:
        importance = {w.name: np.abs(w.content.astype(np.float64)) for w in weights}
    return {w.name: np.where(w.kept, importance[w.name], -1.0) for w in weights}


def taylor(model: Model, loss: Loss, names: Sequence[str], examples: Examples) -> dict[str, np.ndarray]:
    """The mean over batches of |w dL/dw| for parameters by name, float64 in their shapes."""
    work = prepared(model, "frozen")
    graph = work.ir.graph
    op = Builder(graph)
    output = graph.outputs[0]
    op.free_name(LABEL)
    label = op.input(LABEL, *loss.label(output))
    op.name_output(objective(op, loss, output, label), _LOSS)
    # dL/dw without an optimizer, for all weights in one graph.
    program = gradient(work, of=_LOSS, wrt=list(names))
    run = open_session(program, outputs=[f"{name}.grad" for name in names])
    contents = model.parameters
    totals = {name: np.zeros(contents[name].shape) for name in names}
    size, count = fixed_batch(model) or min(_BATCH, len(examples)), 0
    for batch in examples.batches(size):
        if len(batch) == size:  # all batches count the same
            count += 1
            for name, grad in zip(names, run(batch.feed)):
                totals[name] += np.abs(contents[name] * grad.astype(np.float64))
    return {name: total / max(count, 1) for name, total in totals.items()}


def _sample(data: Examples, seed: int) -> Examples:
    rows = np.random.default_rng(seed).permutation(len(data))[:TAYLOR_EXAMPLES]
    return data.take(np.sort(rows))
