"""What a training's checkpoint holds, and how a training goes on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.errors import CheckpointError, one_line
from archipel.training.cloud.checkpoints.checkpoint import damaged, read_checkpoint, write_checkpoint
from archipel.training.cloud.checkpoints.generators import generator_states, seed_generators, set_generator_states
from archipel.training.cloud.execution import SHARDS
from archipel.training.cloud.result import Epoch

if TYPE_CHECKING:
    from archipel.training.cloud.trainer import Trainer


def save(trainer: Trainer, path: Path, pending: bool) -> None:
    """Write the checkpoint; `pending`: gradients wait for more minibatches. All processes call it together."""
    # Another folder each time: the one that the file points to must stay whole.
    name = f"{SHARDS}{trainer.minibatches}-{len(trainer.history)}"
    execution = trainer.execution
    gradients = {str(i): p.grad for i, p in enumerate(trainer.parameters) if pending and p.grad is not None}
    content = {
        **execution.state(trainer.optimizer, path.parent, name),
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
        execution.restore(content, trainer.optimizer, path.parent)
        trainer.autocast.scaler.load_state_dict(content["scaler"])
        for index, gradient in content["pending"].items():
            trainer.parameters[int(index)].grad = gradient.to(trainer.device)
        _restore_callbacks(trainer, content["callbacks"], path)
        trainer.batches.restore(json.loads(content["batches"]))
        trainer.epoch, trainer.minibatches, trainer.updates = content["place"]
        trainer.loss_sum, trainer.loss_weight = (each.to(trainer.device) for each in content["sums"])
        trainer.history = [Epoch(**facts) for facts in content["history"]]
        trainer.best_weights = {name: tensor.to(trainer.device) for name, tensor in content["best"].items()}
        # Last: building other parts above may draw numbers.
        _continue_drawing(trainer, content)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise damaged(path, one_line(error)) from error


def _restore_callbacks(trainer: Trainer, states: list[list[dict[str, Any]]], path: Path) -> None:
    if len(states) != trainer.execution.processes:
        if any(state for each in states for state in each):
            raise CheckpointError(
                f"{path}: {len(states)} processes wrote it, each with its part of the averages; start as many again"
            )
        return
    for callback, state in zip(trainer.callbacks, states[trainer.execution.number], strict=False):
        callback.restore(state)


def _continue_drawing(trainer: Trainer, content: dict[str, Any]) -> None:
    """Each process with its own generators; another number of processes begins new ones."""
    number, everyone = trainer.execution.number, trainer.execution.processes
    if len(content["generators"]) != everyone:
        seed_generators(trainer.config.seed + trainer.minibatches * everyone + number)
        return
    trainer.generator.set_state(content["augment"][number])
    set_generator_states(content["generators"][number])
