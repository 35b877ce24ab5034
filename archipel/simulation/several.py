"""Devices with different models in one federation: what they share has to be alike, whatever else each model has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.lite_runtime.training.driver import data_ports
from archipel.protocol.uploads import upload_layout
from archipel.simulation.work import Engine, Partial, Work


@dataclass(frozen=True)
class SeveralModels:
    """The models, and `of`: which of them each client has, by number.

    Raises SimulationError for models that cannot share a federation: another strategy, other shared parameters or their
    first values, other entries of an update, or other fields.
    """

    bundles: tuple[Bundle, ...]
    of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.of or min(self.of) < 0 or max(self.of) >= len(self.bundles):
            raise SimulationError(
                f"model_of: names models from 0 to {len(self.bundles) - 1}, the number of each client's"
            )
        first = self.bundles[0]
        for number, other in enumerate(self.bundles[1:], 1):
            if other.manifest.strategy != first.manifest.strategy:
                self._refuse(number, f"strategy {other.manifest.strategy!r} and not {first.manifest.strategy!r}")
            mine, theirs = first.parameters(), other.parameters()
            if list(mine) != list(theirs) or not all(np.array_equal(theirs[name], mine[name]) for name in mine):
                self._refuse(
                    number,
                    f"other parameters to share than the first ({', '.join(list(theirs)[:3])}); take a strategy whose "
                    "models stay on the devices, such as feddistill",
                )
            if upload_layout(other.manifest, "training") != upload_layout(first.manifest, "training"):
                self._refuse(number, "updates with other entries or ranges than the first")
            if _fields(other) != _fields(first):
                self._refuse(number, f"the fields {_fields(other)} and not {_fields(first)}")

    @property
    def digest(self) -> str:
        """That of all bundles together, and of who has which."""
        text = " ".join([*(bundle.digest for bundle in self.bundles), *map(str, self.of)])
        return hashlib.sha256(text.encode()).hexdigest()

    def _refuse(self, number: int, what: str) -> None:
        raise SimulationError(f"model: number {number} has {what}; devices of one federation have to agree there")


class EachModel:
    """Runs the local rounds of each client on its own model's engine."""

    def __init__(self, engines: Sequence[Engine], of: Sequence[int]) -> None:
        self._engines, self._of = engines, of

    def run(self, work: Work, clients: Sequence[int]) -> Partial:
        """The sum of these devices' updates, whatever their models."""
        partial = Partial(work.empty_sum())
        for number, engine in enumerate(self._engines):
            mine = [client for client in clients if self._of[client] == number]
            if mine:
                partial.merge(engine.run(work, mine))
        return partial

    def close(self) -> None:
        """End all engines."""
        for engine in self._engines:
            engine.close()


def _fields(bundle: Bundle) -> list[str]:
    return [port.name for port in data_ports(bundle, bundle.manifest.schedule)]
