from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import CheckpointError
from archipel.training.cloud import Epoch, FitResult, fit, fit_one_cycle

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 5)).astype(np.float32)
Y = (X[:, 0] + 0.3 * RNG.normal(size=90) > 0).astype(np.int64)
HELD = (X[60:], Y[60:])


def network(width: int = 8) -> nn.Module:
    """Normalisation has statistics, dropout its own random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 2)
        )


def noise(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return batch + 0.1 * torch.randn(batch.shape, generator=generator)


def plateau(**options: Any) -> FitResult:
    arguments = {"seed": 3, "batch_size": 16, "max_epochs": 7, "augment": noise} | options
    return fit(network(), X[:60], Y[:60], HELD, **arguments)


def cycle(**options: Any) -> FitResult:
    arguments = {"seed": 3, "batch_size": 16, "epochs": 7, "augment": noise} | options
    return fit_one_cycle(network(), X[:60], Y[:60], HELD, **arguments)


def stop_after(number: int) -> Callable[[Epoch], None]:
    def stop(epoch: Epoch) -> None:
        if epoch.number == number:
            raise KeyboardInterrupt

    return stop


def facts(result: FitResult) -> list[tuple[float, ...]]:
    """All of the history but what a clock says."""
    return [(e.number, e.train_loss, e.validation_loss, e.validation_accuracy, e.best) for e in result.history]


@pytest.mark.parametrize("run", [plateau, cycle])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_an_interrupted_fit_ends_as_if_it_had_not_been(
    run: Callable[..., FitResult], stop: int, tmp_path: Path
) -> None:
    torch.manual_seed(11)
    whole = run()
    torch.manual_seed(11)
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=tmp_path / "fit.pt", on_epoch=stop_after(stop))
    torch.manual_seed(12)  # what dropout draws is in the checkpoint
    seen: list[int] = []
    resumed = run(checkpoint=tmp_path / "fit.pt", on_epoch=lambda epoch: seen.append(epoch.number))
    assert seen == list(range(stop + 1, 8))
    assert facts(resumed) == facts(whole)
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], tensor), name


def test_a_killed_process_goes_on_from_its_last_epoch(tmp_path: Path) -> None:
    checkpoint = tmp_path / "deep" / "fit.pt"
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "import test_checkpoint as t; t.torch.set_num_threads(int(sys.argv[3])); t.torch.manual_seed(11)\n"
        "def told(epoch): print(epoch.number, flush=True); epoch.number == 3 and time.sleep(60)\n"
        "t.cycle(checkpoint=sys.argv[2], on_epoch=told)"
    )
    # Sums differ in their last bits between numbers of threads, and another test may have changed this process's.
    threads = str(torch.get_num_threads())
    arguments = [sys.executable, "-c", code, str(Path(__file__).parent), str(checkpoint), threads]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(3)] == ["1", "2", "3"]
        process.kill()
    torch.manual_seed(11)
    whole = cycle()
    assert facts(cycle(checkpoint=checkpoint)) == facts(whole)
    assert [path.name for path in checkpoint.parent.iterdir()] == ["fit.pt"]


def test_a_finished_fit_is_not_trained_again(tmp_path: Path) -> None:
    first = cycle(checkpoint=tmp_path / "fit.pt")
    started = time.perf_counter()
    again = cycle(checkpoint=tmp_path / "fit.pt", on_batch=lambda *at: pytest.fail(f"trained batch {at}"))
    assert time.perf_counter() - started < 5
    assert again.history == first.history
    assert plateau(checkpoint=tmp_path / "other.pt", patience=1).history  # stopped by its plateau, not by max_epochs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 8}, "batch_size was 16 there, is 8 here"),
        ({"seed": 4}, "seed was 3 there, is 4 here"),
        ({"epochs": 8}, "epochs was 7 there, is 8 here"),
        ({"weight_decay": 0.0}, "weight_decay was 0.0005 there, is 0.0 here"),
    ],
)
def test_a_checkpoint_of_another_fit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    cycle(checkpoint=tmp_path / "fit.pt")
    with pytest.raises(CheckpointError, match=rf"fit\.pt is of another fit: {message}; delete it to begin again"):
        cycle(checkpoint=tmp_path / "fit.pt", **change)


def test_other_data_networks_and_optimizers_are_other_fits(tmp_path: Path) -> None:
    path = tmp_path / "fit.pt"
    cycle(checkpoint=path)
    with pytest.raises(CheckpointError, match=r"network .* was"):
        fit_one_cycle(network(9), X[:60], Y[:60], HELD, seed=3, batch_size=16, epochs=7, checkpoint=path)
    with pytest.raises(CheckpointError, match="training targets"):
        fit_one_cycle(network(), X[:60], 1 - Y[:60], HELD, seed=3, batch_size=16, epochs=7, checkpoint=path)
    with pytest.raises(CheckpointError, match="another fit"):
        plateau(checkpoint=path)


class Harmful:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (open, ("/nonexistent/harmful", "w"))


def test_a_file_that_is_no_checkpoint_is_refused_and_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "fit.pt"
    cycle(checkpoint=path)
    sound = path.read_bytes()
    torch.save({"format": "another"}, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of a cloud fit"):
        cycle(checkpoint=path)
    torch.save({"format": Harmful()}, path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        cycle(checkpoint=path)
    for content in (b"", b"text", pickle.dumps([1]), sound[: len(sound) // 2]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"fit\.pt (cannot be read|is not a checkpoint)"):
            cycle(checkpoint=path)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fit.pt"
    cycle(checkpoint=path)
    content = torch.load(path, weights_only=True)
    del content["module"]["0.weight"]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="is damaged"):
        cycle(checkpoint=path)


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*; choose another folder"):
        cycle(checkpoint=tmp_path / "file" / "fit.pt")
