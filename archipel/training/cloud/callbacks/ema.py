"""A moving average of the parameters, with which a training validates and ends (Polyak and Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from archipel.training.cloud.callbacks.callback import Callback
from archipel.training.cloud.execution import local_part

if TYPE_CHECKING:
    from torch import nn

    from archipel.training.cloud.trainer import Trainer


class MovingAverage(Callback):
    """Averages the parameters after every update: a' = decay a + (1 - decay) p, from the first parameters on.

    Attributes:
        averages: of each parameter, in their order; in a process that has a part of it, of that part.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        # Several processes have parts of parameters (DTensor): each averages its own.
        self._parameters = [local_part(p.detach()) for p in parameters]
        self.averages = [p.clone() for p in self._parameters]
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if trainer.updated:
            self._average(self.averages, self._parameters, trainer.updates)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A context in which the module has the averages."""
        kept = [p.clone() for p in self._parameters]
        with torch.no_grad():
            for parameter, average in zip(self._parameters, self.averages):
                parameter.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self._parameters, kept):
                    parameter.copy_(value)

    def take_over(self) -> None:
        """Give the module the averages for good."""
        with torch.no_grad():
            for parameter, average in zip(self._parameters, self.averages):
                parameter.copy_(average)
