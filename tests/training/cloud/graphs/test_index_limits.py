"""Indices among a graph's inputs are found, with the size of their tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, models
from archipel.training import losses, optimizers, step_graph
from archipel.training.cloud.graphs.index_limits import check_indices, find_index_limits


@pytest.mark.sampled(every=4)
def test_tokens_and_classes() -> None:
    model = Model.from_torch(models.transformer(0), torch.zeros(2, 16, dtype=torch.int64))
    [table] = [m.num_embeddings for m in models.transformer(0).modules() if isinstance(m, nn.Embedding)][:1]
    assert find_index_limits(model) == {model.inputs[0].name: range(-table, table)}
    classifier = Model.from_torch(nn.Linear(5, 3), torch.zeros(2, 5))
    assert find_index_limits(classifier) == {}
    step = step_graph(classifier, losses.cross_entropy(), optimizers.sgd(lr=0.1))
    assert find_index_limits(step) == {"label": range(3)}
    some = step_graph(classifier, losses.cross_entropy(ignore_index=-1), optimizers.sgd(lr=0.1))
    assert find_index_limits(some) == {}


@pytest.mark.sampled(every=4)
def test_the_smaller_of_two_tables_counts() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(9, 2), nn.Embedding(7, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x.reshape(-1)).reshape(*x.shape, 2)

    model = Model.from_torch(Both(), torch.zeros(2, 3, dtype=torch.int64))
    assert find_index_limits(model) == {"x": range(-7, 7)}


@pytest.mark.parametrize("values", [np.array([[1, 4], [-5, 0]]), torch.tensor([4, -5]), np.zeros((0, 3), np.int64)])
def test_indices_of_the_table(values: np.ndarray | torch.Tensor) -> None:
    check_indices("x", values, range(-5, 5))


@pytest.mark.parametrize("wrong", [5, -6])
def test_an_index_beyond_it(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"x: index {wrong} is out of bounds for dimension 0 with size 5"):
        check_indices("x", np.array([0, wrong, 1]), range(-5, 5))
