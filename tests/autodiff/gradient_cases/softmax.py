from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gradient_cases.case import Array, Case, Draw, free_axes, normal, positive, shapes
from hypothesis import strategies as st


@st.composite
def softmax(draw: Draw, op_type: str, function: object) -> Case:
    shape = draw(shapes(1, 3, 4))
    axis = draw(st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1)))
    return Case(
        op_type,
        [normal(draw, *shape)],
        {} if axis is None else {"axis": axis},
        free={0: free_axes(draw, shape)},
        torch=lambda x: function(x, -1 if axis is None else axis),
    )


@st.composite
def label_loss(draw: Draw, op_type: str) -> Case:
    """NegativeLogLikelihoodLoss, and SoftmaxCrossEntropyLoss with either or both of its outputs."""
    batch, classes, spatial = draw(st.integers(1, 4)), draw(st.integers(2, 4)), draw(shapes(0, 2, 2))
    scores = normal(draw, batch, classes, *spatial)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    labels = rng.integers(0, classes, [batch, *spatial])
    given: dict[str, Any] = {}
    ignored = draw(st.sampled_from([None, None, 0, 1, -1, 255]))
    if ignored is not None:
        given["ignore_index"] = ignored
        labels[rng.random(labels.shape) < 0.3] = ignored
        # A mean over no label at all is not a number.
        labels.flat[0] = next(c for c in range(classes) if c != ignored)
    reduction = draw(st.sampled_from([None, "mean", "sum", "none"]))
    if reduction is not None:
        given["reduction"] = reduction
    inputs: list[Array | None] = [scores, labels.astype(draw(st.sampled_from([np.int64, np.int32])))]
    constants: frozenset[int] = frozenset()
    if draw(st.booleans()):
        inputs.append(positive(draw, classes))
        constants = frozenset({2}) if draw(st.booleans()) else frozenset()
    softmax = op_type == "SoftmaxCrossEntropyLoss"
    of = draw(st.sampled_from([(0,), (0, 1), (1,)])) if softmax else (0,)
    if of == (1,):
        constants |= {2} & set(range(len(inputs)))  # which reads no weights

    def function(
        scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        logs = torch.log_softmax(scores, 1) if softmax else scores
        kept = labels != (-999 if ignored is None else ignored)
        index = torch.where(kept, labels, 0).long()
        # Written out, as PyTorch's own has no gradient for the weights.
        each = kept if weights is None else kept * weights[index]
        losses = -logs.gather(1, index.unsqueeze(1)).squeeze(1) * each
        if reduction == "sum":
            losses = losses.sum()
        elif reduction != "none":
            losses = losses.sum() / each.sum()
        return tuple((losses, logs)[i] for i in of)

    return Case(
        op_type,
        inputs,
        given,
        constants=constants,
        free={0: free_axes(draw, scores.shape), 1: free_axes(draw, labels.shape)},
        torch=function,
        outputs=2 if 1 in of or (softmax and draw(st.booleans())) else 1,
        of=of,
    )


CASES = {
    ("", "Softmax"): softmax("Softmax", torch.softmax),
    ("", "LogSoftmax"): softmax("LogSoftmax", torch.log_softmax),
    ("", "SoftmaxCrossEntropyLoss"): label_loss("SoftmaxCrossEntropyLoss"),
    ("", "NegativeLogLikelihoodLoss"): label_loss("NegativeLogLikelihoodLoss"),
}
