"""The program that adds up a model's loss and trains nothing, against PyTorch."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from archipel.graph import Model
from archipel.training import losses
from archipel.training.evaluation import measure_graph


@pytest.mark.sampled(every=3)
def test_sums_over_batches_are_of_the_model_as_it_predicts() -> None:
    """Without dropout, with the running statistics, and weighted as the loss is."""
    torch.manual_seed(0)
    module = nn.Sequential(
        OrderedDict(body=nn.Linear(6, 5), norm=nn.BatchNorm1d(5), drop=nn.Dropout(0.5), head=nn.Linear(5, 3))
    )
    module.norm.running_mean.copy_(torch.randn(5))
    module.norm.running_var.copy_(torch.rand(5) + 0.5)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((11, 6)).astype(np.float32), rng.integers(0, 3, 11)
    model = Model.from_torch(module, torch.zeros(2, 6))
    program = measure_graph(model, losses.cross_entropy(), "*", ("sum", "labels"))
    session = ort.InferenceSession(program.to_bytes(), providers=["CPUExecutionProvider"])
    state = {name: np.zeros((), np.float32) for name in ("sum", "labels")}
    field = model.inputs[0].name
    for rows in (slice(0, 4), slice(4, 8), slice(8, 11)):
        feeds = {**program.initial, **state, field: x[rows], "label": y[rows]}
        found = session.run(["sum.next", "labels.next"], feeds)
        state = dict(zip(state, found, strict=True))
    module.double().eval()
    expected = nn.functional.cross_entropy(module(torch.tensor(x).double()), torch.tensor(y), reduction="sum")
    assert state["labels"] == 11
    np.testing.assert_allclose(state["sum"], float(expected.detach()), rtol=1e-6)
