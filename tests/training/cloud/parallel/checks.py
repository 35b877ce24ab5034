"""What the two processes of the quick tests do beside training in each way; ways.py runs these by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from archipel import Model
from archipel.training.cloud import TorchModule, parallel
from tests.training.cloud.parallel.networks import EXAMPLES, batch, network
from tests.training.cloud.parallel.trainings import Stop, facts, run


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
        placed = parallel.prepare(TorchModule(tied_model()).train(), "fsdp", segment_bytes=least)
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


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {"moved": moved, "in_segments": in_segments, "uneven": uneven}
