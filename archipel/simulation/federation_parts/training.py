"""[training] and [strategy] of a federation's file, as what the converter takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from archipel.errors import SimulationError
from archipel.protocol import written
from archipel.protocol.mistakes import Mistakes
from archipel.simulation.federation_parts.settings import TrainingPart
from archipel.strategies.device import describe
from archipel.strategies.registry import STRATEGIES

if TYPE_CHECKING:
    from archipel.converter import Training


def make_training(part: TrainingPart, strategy: str | Mapping[str, Any] | None) -> Training:
    """What a device does in a round.

    Arguments:
        part: [training].
        strategy: the name of a strategy, or a table of its name and options; None: fedavg.

    Raises the ArchipelError that names the key; where several things are wrong, a SimulationError that tells them all.
    """
    from archipel.converter import Training
    from archipel.training.by_name import make_loss, make_optimizer

    mistakes = Mistakes()
    with mistakes.collected():
        loss = make_loss(part.loss, "training.loss")
    with mistakes.collected():
        optimizer = make_optimizer(part.optimizer, None, None, "training.optimizer")
    with mistakes.collected():
        name, options = _named_table("fedavg" if strategy is None else strategy)
        if name not in STRATEGIES:
            raise SimulationError(f"strategy: no strategy {name!r}; {written.suggest(name, sorted(STRATEGIES))}")
        describe(name, STRATEGIES[name].device, options)
    mistakes.tell(SimulationError)
    return Training(
        loss, optimizer,
        trainable=part.trainable, epochs=part.epochs, batch_size=part.batch_size, loss_output=part.loss_output,
        step_options=part.step_options,  # type: ignore[arg-type]
        strategy=name, strategy_options=options,
    )  # fmt: skip


def _named_table(value: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    table = {"name": value} if isinstance(value, str) else dict(value)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise SimulationError('strategy.name: is missing; write strategy = "fedavg", or a table with a name')
    return name, table
