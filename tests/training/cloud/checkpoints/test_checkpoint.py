"""A training that is interrupted, at whatever point, ends as if it had not been."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import CheckpointError, NonFiniteLossError
from archipel.training import optimizers
from archipel.training.cloud import Callback, Epoch, TrainConfig, Trainer, TrainResult, train

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 5)).astype(np.float32)
Y = (X[:, 0] + 0.3 * RNG.normal(size=90) > 0).astype(np.int64)
BATCHES = 4  # of an epoch


class Noise(nn.Module):
    """Draws from NumPy's and Python's generators, as the code of a user may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import random

        return x * (1 + 0.1 * np.random.rand() + 0.1 * random.random()) if self.training else x


def network(width: int = 8) -> nn.Module:
    """Normalisation has statistics, dropout its own random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), Noise(), nn.Linear(width, 2)
        )


SETTINGS: dict[str, Any] = {"seed": 3, "batch_size": 16, "epochs": 4, "threads": 1}
KINDS: dict[str, dict[str, Any]] = {
    "adam": {},
    "momentum": {"optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.05}, "schedule": "cosine", "ema": 0.9},
    "fp16": {"precision": "fp16", "accumulate": 3, "clip": 1.0, "augment": {"name": "random_scale", "most": 0.1}},
}


def run(module: nn.Module | None = None, callbacks: Any = (), data: Any = None, **changes: Any) -> TrainResult:
    config = TrainConfig(**{**SETTINGS, **changes})
    return train(
        module or network(), data or (X[:60], Y[:60]), config, validation=(X[60:], Y[60:]), callbacks=callbacks
    )


def facts(result: TrainResult) -> list[tuple[Any, ...]]:
    """All of the history but what a clock says."""
    return [(e.number, e.updates, e.train_loss, dict(e.metrics), e.best, e.rate) for e in result.history]


class StopAfter(Callback):
    def __init__(self, minibatches: int) -> None:
        self.minibatches = minibatches

    def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
        trainer.stop = trainer.minibatches == self.minibatches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [2, BATCHES, 2 * BATCHES + 1])
@pytest.mark.sampled(every=6)
def test_a_stopped_training_ends_as_if_it_had_not_been(kind: str, stop: int, tmp_path: Path) -> None:
    whole = run(**KINDS[kind])
    stopped = run(**KINDS[kind], checkpoint=str(tmp_path), callbacks=[StopAfter(stop)])
    assert not stopped.finished
    assert len(stopped.history) == (stop - 1) // BATCHES
    resumed = run(**KINDS[kind], checkpoint=str(tmp_path))
    assert resumed.finished
    assert facts(resumed) == facts(whole)
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], tensor), name


KILLED = """
import sys
sys.path[:0] = [sys.argv[1]]
import test_checkpoint as t
class Tell(t.Callback):
    def after_batch(self, trainer, loss):
        print(trainer.minibatches, flush=True)
        if trainer.minibatches == 7:
            import time
            time.sleep(60)
t.run(checkpoint=sys.argv[2], checkpoint_every=2, callbacks=[Tell()])
"""


@pytest.mark.sampled(every=8)
def test_a_training_killed_in_the_middle_of_an_epoch_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path / "deep")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [int(process.stdout.readline()) for _ in range(7)] == list(range(1, 8))
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    seen: list[int] = []

    class Note(Callback):
        def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
            seen.append(trainer.minibatches)

    resumed = run(checkpoint=str(tmp_path / "deep"), checkpoint_every=2, callbacks=[Note()])
    assert seen[0] == 7  # the last checkpoint was after update 6, in the middle of the second epoch
    assert facts(resumed) == facts(run())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["last.pt"]


@pytest.mark.sampled(every=4)
def test_an_exception_loses_no_epoch(tmp_path: Path) -> None:
    def stop(epoch: Epoch) -> None:
        if epoch.number == 2:
            raise KeyboardInterrupt

    config = TrainConfig(**SETTINGS, checkpoint=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        train(network(), (X[:60], Y[:60]), config, validation=(X[60:], Y[60:]), on_epoch=stop)
    seen: list[int] = []
    resumed = train(
        network(), (X[:60], Y[:60]), config, validation=(X[60:], Y[60:]), on_epoch=lambda e: seen.append(e.number)
    )
    assert seen == [3, 4]
    assert facts(resumed) == facts(run())


@pytest.mark.sampled(every=4)
def test_a_finished_training_is_not_trained_again_but_may_be_longer(tmp_path: Path) -> None:
    first = run(checkpoint=str(tmp_path))

    class Fail(Callback):
        def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
            pytest.fail("trained again")

    again = run(checkpoint=str(tmp_path), callbacks=[Fail()])
    assert facts(again) == facts(first)
    assert facts(run(checkpoint=str(tmp_path), epochs=6)) == facts(run(epochs=6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 8}, "batch_size was 16 there, is 8 here"),
        ({"seed": 4}, "seed was 3 there, is 4 here"),
        ({"optimizer": optimizers.adam(lr=0.5)}, r"optimizer was Adam\(lr=0.001.* is Adam\(lr=0.5"),
        ({"loss": {"name": "cross_entropy", "label_smoothing": 0.1}}, "loss was 'cross_entropy' there"),
        ({"module": network(9)}, r"network \(CRC-32\) was"),
        ({"data": (X[:60], 1 - Y[:60])}, r"examples \(CRC-32\) was"),
        ({"data": (X[:59], Y[:59])}, "examples was 60 there, is 59 here"),
    ],
)
@pytest.mark.sampled(every=8)
def test_a_checkpoint_of_another_training_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    run(epochs=1, checkpoint=str(tmp_path))
    module = change.pop("module", None) or network(8)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"last\.pt is of another training: {message}.*; delete it to begin"):
        run(module, epochs=1, checkpoint=str(tmp_path), **change)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_a_checkpoint_is_continued_only_if_wanted(tmp_path: Path) -> None:
    run(epochs=1, checkpoint=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"last\.pt is the checkpoint of an earlier training; set resume"):
        run(epochs=1, checkpoint=str(tmp_path), resume=False)


class Harmful:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (open, ("/nonexistent/harmful", "w"))


def test_a_file_that_is_no_checkpoint_is_refused_and_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    run(epochs=1, checkpoint=str(tmp_path))
    sound = path.read_bytes()
    torch.save({"format": "another"}, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of a training"):
        run(epochs=1, checkpoint=str(tmp_path))
    torch.save({"format": Harmful()}, path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        run(epochs=1, checkpoint=str(tmp_path))
    for content in (b"", b"text", pickle.dumps([1]), sound[: len(sound) // 2]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"last\.pt (cannot be read|is not a checkpoint)"):
            run(epochs=1, checkpoint=str(tmp_path))
    path.write_bytes(sound)
    for missing in ("module", "generators", "place", "made_with"):
        content = torch.load(path, weights_only=True)
        del content[missing]
        torch.save(content, path)
        with pytest.raises(CheckpointError, match="is damaged"):
            run(epochs=1, checkpoint=str(tmp_path))
        path.write_bytes(sound)


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*; choose another folder"):
        run(checkpoint=str(tmp_path / "file" / "folder"))


def test_a_diverged_training_leaves_the_last_checkpoint_as_it_was(tmp_path: Path) -> None:
    sound: list[bytes] = []

    class Break(Callback):
        def before_batch(self, trainer: Trainer, batch: Any) -> None:
            if trainer.epoch == 3:
                sound.append((tmp_path / "last.pt").read_bytes())
                with torch.no_grad():
                    next(trainer.module.parameters()).fill_(torch.nan)

    with pytest.raises(NonFiniteLossError, match="the loss is no longer finite in epoch 3"):
        run(checkpoint=str(tmp_path), checkpoint_every=1, callbacks=[Break()])
    assert (tmp_path / "last.pt").read_bytes() == sound[0]
