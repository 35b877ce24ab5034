"""What the two processes of the quick tests do beside training in each way; ways.py runs these by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from archipel import Model
from archipel.training.cloud import Callback, TorchModule, Trainer, parallel
from tests.training.cloud.parallel.divisions import divisions
from tests.training.cloud.parallel.networks import EXAMPLES, batch, network
from tests.training.cloud.parallel.trainings import RESTS, Stop, facts, run, run_rest


def moved(folder: str) -> dict[str, Any]:
    """Go on from what one process wrote, and stop for one process to go on."""
    resumed = run("fsdp", "fsdp", checkpoint=f"{folder}/one", decay="matrices", accumulate=4)
    run("fsdp", "fsdp", checkpoint=f"{folder}/two", callbacks=[Stop(8)], decay="matrices", accumulate=4)
    return facts(resumed)


class Tied(nn.Module):
    """A transformer whose head is its table of tokens, which the first and the last segment read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network("transformer")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner.embedding(tokens)
        for layer in self.inner.layers:
            hidden = layer(hidden)
        return hidden.mean(1) @ self.inner.embedding.weight.T


def tied_model() -> Model:
    return Model.from_torch(Tied().eval(), batch("transformer")[0])


def losses_of(
    module: nn.Module, step: Callable[..., torch.Tensor], clip: Callable[[], Any], rows: slice
) -> list[float]:
    """Of five steps with Adam."""
    inputs, labels = batch("transformer")
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(float(step((inputs[rows],), labels[rows])))
        clip()
        optimizer.step()
    return losses


def gathered(segments: nn.Module) -> int:
    """Elements of the parameters that are whole in this process."""
    return sum(p.numel() for p in set(segments.parameters()) if not hasattr(p, "placements"))


def in_segments(folder: str) -> dict[str, Any]:
    """FSDP of a graph, in segments and as one block: losses, and the most elements gathered at once."""
    answers = {}
    for name, least in (("segments", 1), ("block", 1 << 30)):
        placed = parallel.prepare(
            TorchModule(Model.from_onnx(f"{folder}/tied.onnx")).train(), "fsdp", segment_bytes=least
        )
        most = [0]
        whole: Any = placed._run  # type: ignore[attr-defined]
        parts = list(getattr(whole, "segments", [whole]))
        for part in parts:

            def look(*_: Any, whole: nn.Module = whole, most: list[int] = most) -> None:
                most[0] = max(most[0], gathered(whole))

            part.register_forward_pre_hook(look)
            part.register_forward_hook(
                lambda _, __, out, look=look: (
                    (out if isinstance(out, torch.Tensor) else out[0]).register_hook(look) and None
                )
            )
        size = EXAMPLES // placed.data_world
        rows = slice(placed.data_rank * size, (placed.data_rank + 1) * size)
        losses = losses_of(
            placed.module, lambda x, y, placed=placed: placed.step(x, y, functional.cross_entropy),
            lambda placed=placed: placed.clip(0.5), rows,
        )  # fmt: skip
        answers[name] = {"losses": losses, "most": most[0], "parts": len(parts), "names": sorted(placed.state_dict())}
    return answers


def uneven(folder: str) -> dict[str, Any]:
    """A pipeline's losses of batches that 4 microbatches do not divide; what "auto" takes for a module."""
    placed = parallel.prepare(network("mlp"), "pipeline", microbatches=4)
    inputs, labels = batch("mlp")
    losses = []
    for rows in (10, 6):
        losses.append(float(placed.step((inputs[:rows],), labels[:rows], functional.cross_entropy)))
    told: list[str] = []
    chosen = parallel.prepare(network("mlp"), "auto", report=told.append)
    gradients = {name: parameter.grad[0].tolist() for name, parameter in placed.named_parameters().items()}  # type: ignore[union-attr]
    return {"losses": losses, "gradients": gradients, "auto": chosen.name, "told": told}


class Interrupt(Callback):
    """Sends Ctrl-C to the second process alone, after its fifth batch."""

    def __init__(self) -> None:
        self.seen = 0

    def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
        self.seen = trainer.minibatches
        if trainer.minibatches == 5 and trainer.execution.number == 1:
            os.kill(os.getpid(), signal.SIGINT)


def interrupted(folder: str) -> dict[str, Any]:
    """Where a training ends that one process is to stop, and how it goes on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell of the tests has set
    counted, ended = Interrupt(), ""
    try:
        run("ddp", "ddp", checkpoint=f"{folder}/interrupted", callbacks=[counted])
    except KeyboardInterrupt as error:
        ended = type(error).__name__
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = run("ddp", "ddp", checkpoint=f"{folder}/interrupted")
    return {
        "ended": ended, "seen": counted.seen, "usual": usual, "resumed": facts(resumed),
        "files": sorted(path.name for path in Path(folder, "interrupted").iterdir()),
    }  # fmt: skip


def normalized_network() -> nn.Sequential:
    """Two kinds of batch normalization, of inputs far from 0, where naive sums of squares lose digits."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(1),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 8),
        nn.BatchNorm1d(8, momentum=None, affine=False),
        nn.Linear(8, 4),
    )


def normalized_model() -> Model:
    """The network as a graph, which has no batch normalization without a momentum."""
    module = normalized_network()
    module[6] = nn.BatchNorm1d(8)
    return Model.from_torch(module.eval(), normalized_batch()[0])


def normalized_batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = batch("cnn")
    return inputs * torch.linspace(0.5, 2.0, EXAMPLES).reshape(-1, 1, 1, 1) + 50.0, labels


def normalized_losses(
    module: nn.Module, step: Callable[..., torch.Tensor], rows: slice = slice(None)
) -> dict[str, Any]:
    """Of four steps with SGD, and the buffers afterwards."""
    inputs, labels = normalized_batch()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(float(step((inputs[rows],), labels[rows])))
        optimizer.step()
    return {"losses": losses, "buffers": {name: tensor.tolist() for name, tensor in module.named_buffers()}}


def normalized(folder: str) -> dict[str, Any]:
    """Statistics over both processes, of which one has 10 of 16 examples."""
    answers = {}
    for way, of_graph in (("ddp", False), ("fsdp", True)):
        module: nn.Module = normalized_network()
        if of_graph:
            module = TorchModule(Model.from_onnx(f"{folder}/normalized.onnx"))
        placed = parallel.prepare(module.train(), way, sync_batch_norm=True)
        rows = (slice(10), slice(10, None))[placed.data_rank]
        share = (10 / 16, 6 / 16)[placed.data_rank]
        answers[way] = normalized_losses(
            placed.module,
            lambda x, y, placed=placed, share=share: placed.step(x, y, functional.cross_entropy, share=share),
            rows,
        )
    return answers


def rests(folder: str) -> dict[str, Any]:
    return {kind: facts(run_rest(kind)) for kind in RESTS}


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "moved": moved,
    "in_segments": in_segments,
    "uneven": uneven,
    "interrupted": interrupted,
    "normalized": normalized,
    "rests": rests,
    "divisions": divisions,
    "all_divisions": partial(divisions, names=("transformer", "sequence", "picture")),
}
