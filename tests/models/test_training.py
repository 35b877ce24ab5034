"""Every network of the zoo: fifty training steps as a graph and in PyTorch give the same losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from archipel import Model, models, training
from tests.support.zoo_tasks import LONG, STEPS, TASKS, torch_losses


def test_every_network_has_a_task() -> None:
    assert set(models.__all__) == {
        *("mlp", "lenet", "fedavg_cnn", "digits_cnn", "resnet8", "ds_cnn", "mobilenet_v2", "cnn_1d"),
        *("char_rnn", "transformer", "autoencoder", "unet"),
        *("resnet18", "resnet50", "bc_resnet", "deep_conv_lstm", "gpt", "bert"),
    }


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in TASKS])
def test_fifty_steps(name: str) -> None:
    task = TASKS[name]
    batches = [task.batch(i) for i in range(STEPS)]
    module = task.network().train()
    model = Model.from_torch(module, tuple(map(torch.from_numpy, batches[0][:-1])))
    optimizer = training.optimizers.sgd(momentum=0.9)
    step = training.step_graph(model, task.loss(), optimizer, batch_norm=task.batch_norm)
    found = training.run_steps(step, batches, {"lr": task.lr}, seed=0)
    expected = torch_losses(module, task, batches)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert np.mean(expected[-8:]) < 0.98 * np.mean(expected[:8])
