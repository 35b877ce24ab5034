"""What a training's checkpoint holds, and how a training goes on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.library_errors import one_line
from archipel.training.cloud.checkpoints.checkpoint import damaged, read_checkpoint, write_checkpoint
from archipel.training.cloud.checkpoints.generators import generator_states, seed_generators, set_generator_states
from archipel.training.cloud.execution import SHARDS
from archipel.training.cloud.result import Epoch

if TYPE_CHECKING:
    import torch

    from archipel.training.cloud.trainer import Trainer


def save(trainer: Trainer, path: Path, pending: bool) -> None:
    """Write the checkpoint; `pending`: gradients wait for more minibatches. All processes call it together."""
    # Another folder each time: the one that the file points to must stay whole.
    name = f"{SHARDS}{trainer.minibatches}-{len(trainer.history)}"
    execution = trainer.execution
    own = execution.named_parameters().items()
    gradients = {name: p.grad for name, p in own if pending and p.grad is not None}
    content = {
        **execution.state(trainer.optimizer, path.parent, name, _averages(trainer)),
        "scaler": trainer.autocast.scaler.state_dict(),
        "pending": gradients,
        "callbacks": execution.gather([callback.state() for callback in trainer.callbacks]),
        "generators": execution.gather(generator_states()),
        "augment": execution.gather(trainer.generator.get_state()),
        "batches": json.dumps(trainer.batches.state()),
        "place": [trainer.epoch, trainer.minibatches, trainer.updates],
        "sums": [trainer.loss_sum, trainer.loss_weight],
        "history": [{**vars(epoch), "metrics": dict(epoch.metrics)} for epoch in trainer.history],
        "best": trainer.best_weights,
    }
    if execution.first:
        write_checkpoint(path, trainer.made_with(), content)
    execution.gather(None)  # nobody goes on before the file is there
    execution.tidy(path.parent, name)


def load(trainer: Trainer, path: Path) -> None:
    """Continue from what `save` wrote. Raises CheckpointError."""
    content = read_checkpoint(path, trainer.made_with())
    execution = trainer.execution
    try:
        execution.restore(content, trainer.optimizer, path.parent, _averages(trainer))
        trainer.autocast.scaler.load_state_dict(content["scaler"])
        execution.set_gradients(content["pending"])
        _restore_callbacks(trainer, content["callbacks"])
        trainer.batches.restore(json.loads(content["batches"]))
        trainer.epoch, trainer.minibatches, trainer.updates = content["place"]
        trainer.loss_sum, trainer.loss_weight = (each.to(trainer.device) for each in content["sums"])
        trainer.history = [Epoch(**facts) for facts in content["history"]]
        trainer.best_weights = {name: tensor.to(trainer.device) for name, tensor in content["best"].items()}
        # Last: building other parts above may draw numbers.
        _continue_drawing(trainer, content)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise damaged(path, one_line(error)) from error


def _averages(trainer: Trainer) -> list[torch.Tensor]:
    return [] if trainer.ema is None else trainer.ema.averages


def _restore_callbacks(trainer: Trainer, states: list[list[dict[str, Any]]]) -> None:
    """Each process its own; where there were as many as now. Others take what the first one had."""
    alike = len(states) == trainer.execution.processes
    # The first process has loggers as well, before the callbacks of the caller.
    given = states[trainer.execution.number if alike else 0][::-1]
    for callback, state in zip(reversed(trainer.callbacks), given, strict=False):
        callback.restore(state)


def _continue_drawing(trainer: Trainer, content: dict[str, Any]) -> None:
    """Each process with its own generators; another number of processes begins new ones."""
    number, execution = trainer.execution.number, trainer.execution
    if len(content["generators"]) != execution.processes:
        # By the part of the data: processes that compute the same examples draw alike.
        seed = trainer.config.seed + trainer.minibatches * execution.world + execution.rank
        seed_generators(seed)
        trainer.generator.manual_seed(seed)
        return
    trainer.generator.set_state(content["augment"][number])
    set_generator_states(content["generators"][number])
