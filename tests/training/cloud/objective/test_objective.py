"""The losses of archipel.training on tensors, against torch.nn.functional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from archipel.errors import TrainingError
from archipel.training import losses
from archipel.training.cloud import TrainConfig
from archipel.training.cloud.objective.graph_loss import GraphLoss
from archipel.training.cloud.objective.objective import Objective
from archipel.training.losses import Loss

G = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 4, 3, generator=G, dtype=torch.float64)
CLASSES = torch.randint(0, 4, (6, 3), generator=G)
IGNORING = torch.where(CLASSES == 2, -100, CLASSES)
WEIGHTS = (1.0, 0.5, 0.0, 2.0)
OTHER = torch.rand(6, 4, 3, generator=G, dtype=torch.float64)

CASES: list[tuple[Loss, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]] = [
    (losses.cross_entropy(), LOGITS, CLASSES, F.cross_entropy),
    (losses.cross_entropy(0.1, ignore_index=-100), LOGITS, IGNORING,
     lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)),
    (losses.cross_entropy(class_weights=WEIGHTS), LOGITS, CLASSES,
     lambda x, y: F.cross_entropy(x, y, weight=torch.tensor(WEIGHTS, dtype=x.dtype))),
    (losses.cross_entropy(axis=-1), LOGITS.movedim(1, -1), CLASSES,
     lambda x, y: F.cross_entropy(x.movedim(-1, 1), y)),
    (losses.binary_cross_entropy(), LOGITS, OTHER, F.binary_cross_entropy_with_logits),
    (losses.binary_cross_entropy([1.0, 2.0, 3.0]), LOGITS, OTHER,
     lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype))),
    (losses.mse(), LOGITS, OTHER, F.mse_loss),
    (losses.l1(), LOGITS, OTHER, F.l1_loss),
    (losses.huber(0.5), LOGITS, OTHER, lambda x, y: F.huber_loss(x, y, delta=0.5)),
    (losses.kl_divergence(), LOGITS, OTHER.softmax(1),
     lambda x, y: F.kl_div(x.log_softmax(1), y, reduction="sum") / 18),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("loss", "output", "label", "expected"), CASES, ids=[str(case[0])[:60] for case in CASES])
def test_values_and_gradients_are_those_of_pytorch(
    loss: Loss, output: torch.Tensor, label: torch.Tensor, expected: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    x = output.to(dtype).requires_grad_()
    y = label.to(dtype) if label.is_floating_point() else label
    lowered = GraphLoss(loss, "output")
    # Two sizes of the batch: the graph is lowered once, with the first.
    for rows in (6, 4):
        value, _ = lowered.mean(x[:rows], y[:rows])
        if "kl" in type(loss).__name__.lower():
            wanted = expected(x[:rows], y[:rows]) * (18 / (rows * 3))
        else:
            wanted = expected(x[:rows], y[:rows])
        torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)
        (ours,), (theirs,) = (torch.autograd.grad(each, x) for each in (value, wanted))
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        sums = lowered.sums(x[:rows], y[:rows])
        torch.testing.assert_close(sums.total / sums.weight, wanted.detach(), rtol=tolerance, atol=tolerance)


def test_labels_that_do_not_count_are_not_right() -> None:
    loss = GraphLoss(losses.cross_entropy(ignore_index=-100), "output")
    sums = loss.sums(LOGITS, IGNORING)
    counts = IGNORING != -100
    assert int(sums.counted) == int(counts.sum()) < counts.numel()
    assert sums.right is not None
    assert int(sums.right) == int(((LOGITS.argmax(1) == IGNORING) & counts).sum())


def objective(loss: object, fields: str = "x label", **settings: Any) -> Objective:
    return Objective(TrainConfig(loss=loss, **settings), fields.split())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("cross_entrpy", "loss: no 'cross_entrpy'; there are .*; did you mean 'cross_entropy'"),
        ({"name": "huber", "deltas": 1}, "loss.deltas: huber has no such argument; it has delta"),
        ({"name": "huber", "delta": -1}, "loss: huber: delta must be above 0, is -1"),
        (losses.mse, r"expected one of training.losses.* call it: mse\(\)"),
        ({}, "an empty table"),
        ({"a": "mse"}, "loss.a.label: the data have no field 'a' for the labels; they have x, label"),
        ({"label": {"name": "mse", "weight": -1}}, "weight must be at least 0"),
    ],
)
def test_what_is_no_loss_is_named(loss: object, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        objective(loss)


def test_a_missing_label_names_the_fields() -> None:
    with pytest.raises(TrainingError, match="label: the data have no field 'label' for the labels; they have x, z"):
        objective("mse", "x z")
    assert objective("mse", "x z", label="z").labels == ("z",)
    assert objective("mse", "x y").labels == ("y",)
    assert objective("mse", "x y label").labels == ("label",)


def test_outputs_by_position_name_and_mapping() -> None:
    made = objective({"a": {"name": "mse", "weight": 0.5}, "b": "l1"}, "x a b")
    batch = {"a": torch.zeros(3, 1), "b": torch.zeros(3, 1)}
    one, two = torch.full((3, 1), 2.0), torch.full((3, 1), 3.0)
    for outputs in ((one, two), {"b": two, "a": one}):
        assert float(made.loss(outputs, batch)[0]) == 0.5 * 4.0 + 3.0
    with pytest.raises(TrainingError, match="no output 'b'; it has a, c"):
        made.loss({"a": one, "c": two}, batch)


@pytest.mark.parametrize(
    ("result", "message"), [(torch.zeros(2), r"shape \[2\]; take its mean"), (1.0, "returned float")]
)
def test_a_function_returns_a_scalar(result: object, message: str) -> None:
    made = objective(lambda outputs, batch: result)
    with pytest.raises(TrainingError, match=message):
        made.loss(torch.zeros(2), {"x": torch.zeros(2)})


def test_class_numbers_must_be_whole() -> None:
    made = objective("cross_entropy")
    with pytest.raises(TrainingError, match=r"labels as whole numbers, the field 'label' has torch\.float32"):
        made.loss(torch.zeros(2, 3), {"label": torch.zeros(2)})
