"""`archipel.train` on a GPU: precisions, resuming, memory that ends, compiled, node by node, below torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import archipel
from archipel import models
from archipel.errors import NotANumberError, TrainingError
from archipel.mode import in_mode
from archipel.training.cloud import Epoch, TorchModule, TrainConfig, TrainResult
from tests.gpu.ranks import DEVICE, X, Y, run
from tests.support.ranks import PYTHONPATH, run_ranks

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_precisions(precision: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 20), np.float32)
    y = (x @ rng.standard_normal((20, 3))).argmax(1)
    network = models.mlp(0, features=20, classes=3)
    config = TrainConfig(epochs=4, precision=precision, device=DEVICE, optimizer={"name": "adam", "lr": 3e-3})
    result = archipel.train(network, (x, y), config, validation=(x, y))
    assert result.best.metrics["accuracy"] > 0.85
    assert next(result.module.parameters()).device.type == "cpu"


def test_it_learns_what_the_cpu_learns() -> None:
    """With accumulation, clipping and an average of the parameters, with PyTorch's fused Adam on the GPU."""
    changes: dict[str, Any] = {"accumulate": 2, "clip": 0.5, "ema": 0.9, "optimizer": {"name": "adamw", "lr": 0.01}}
    equal(run(**changes), run(device="cpu", **changes), 1e-4)


@pytest.mark.filterwarnings("ignore")
def test_compiled() -> None:
    equal(run(compile=True), run(device="cpu"), 1e-3)


def test_the_numbers_of_a_seed_are_the_same_again() -> None:
    first, again = (run(dropout=0.5) for _ in range(2))
    assert losses(first) == losses(again)


def test_resume_continues_the_generators_of_the_gpu(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(epoch: Epoch) -> None:
        if epoch.number == 2:
            raise Stop

    whole = run(dropout=0.5)
    with pytest.raises(Stop):
        run(dropout=0.5, checkpoint=str(tmp_path / "kept"), on_epoch=stop)
    assert losses(run(dropout=0.5, checkpoint=str(tmp_path / "kept"))) == losses(whole)


def test_after_a_kill_it_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    arguments = [sys.executable, str(HERE / "ranks.py"), str(tmp_path / "deep"), "killed"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": PYTHONPATH}
    ) as run_:
        assert run_.stdout is not None
        assert run_.stdout.readline() == "7\n"
        run_.send_signal(signal.SIGKILL)
    assert losses(run(dropout=0.5, checkpoint=str(tmp_path / "deep"), checkpoint_every=2)) == losses(run(dropout=0.5))


def test_one_process_of_torchrun_gives_the_losses_of_one_alone(tmp_path: Path) -> None:
    """Over NCCL, which one process uses, too: its exchanges, FSDP's shards and DTensor's layouts are on the GPU."""
    [answers] = run_ranks(HERE / "ranks.py", 1, str(tmp_path), "ddp", "fsdp", "tensor", "auto")
    expected = losses(run(device="cpu"))
    for way, found in answers.items():
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=way)


def test_too_little_memory_says_what_to_lower() -> None:
    class Hungry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            free = torch.empty(2**45, dtype=torch.uint8, device=x.device)
            return self.linear(x) + free[0]

    with pytest.raises(TrainingError, match=r"out of memory on cuda.* with a batch of 24; set batch_size=12 with"):
        archipel.train(Hungry(), (X, Y), TrainConfig(batch_size=24, epochs=1, device=DEVICE))


def test_a_token_beyond_the_vocabulary_is_refused_before_it_ends_the_device() -> None:
    tokens = np.full((8, 4), 9)
    model = archipel.Model.from_torch(nn.Embedding(5, 5), torch.zeros(2, 4, dtype=torch.int64))
    config = TrainConfig(loss={"name": "cross_entropy", "axis": -1}, epochs=1, device=DEVICE)
    with pytest.raises(TrainingError, match=r"index 9 is out of bounds .* a token beyond the vocabulary"):
        archipel.train(model, (tokens, tokens % 5), config)
    assert float(torch.ones(3, device=DEVICE).sum()) == 3


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(TrainingError, match="there is no cuda:63; this machine has cuda:0 to cuda:"):
        archipel.train(nn.Linear(6, 4), (X, Y), TrainConfig(epochs=1, device="cuda:63"))


def test_the_first_nan_names_its_node() -> None:
    module = TorchModule(archipel.Model.from_torch(nn.Linear(6, 4), torch.zeros(2, 6))).to(DEVICE)
    told = r"^Gemm 'node_linear' has computed NaN in 'output', in 4 of 8"
    with in_mode("eager"), pytest.raises(NotANumberError, match=told):
        module(torch.tensor([[float("nan")] * 6, [0.0] * 6]).to(DEVICE))


def losses(result: TrainResult) -> list[float]:
    return [epoch.train_loss for epoch in result.history]


def equal(found: TrainResult, expected: TrainResult, tolerance: float) -> None:
    np.testing.assert_allclose(losses(found), losses(expected), atol=tolerance)
    values = found.module.state_dict()
    for name, value in expected.module.state_dict().items():
        torch.testing.assert_close(values[name].cpu(), value, rtol=0, atol=10 * tolerance, msg=name)
