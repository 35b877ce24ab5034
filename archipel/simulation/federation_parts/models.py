"""Several models in a federation's file: which of its devices has which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from archipel.errors import ArchipelError, SimulationError
from archipel.models.source import ModelSource


class ModelOfSome(ModelSource, forbid_unknown_fields=True, kw_only=True):
    """One of [[models]]: a model, and the devices that have it. Where one says nothing of devices it has all that no
    other has; where none does, devices have the models in turn."""

    clients: tuple[Annotated[int, Meta(ge=0, le=1 << 53)], ...] | None = None


def check_models(models: Sequence[ModelOfSome]) -> None:
    """Raises SimulationError that names the key, for what can be seen before the data are read."""
    if len(models) == 1:
        raise SimulationError("models: there is one; write it as [model]")
    for number, each in enumerate(models):
        try:
            _ = each.source
        except ArchipelError as error:
            raise renamed(error, number) from None
    if any(each.clients is not None for each in models):
        _assigned(models)


def assign_models(models: Sequence[ModelOfSome], population: int) -> list[int] | None:
    """The number of each device's model; None: in turn. Raises SimulationError that names the key."""
    if all(each.clients is None for each in models):
        return None
    found, rest = _assigned(models)
    for device, number in found.items():
        if device >= population:
            raise SimulationError(f"models[{number}].clients: no device {device}; there are 0 to {population - 1}")
    without = [device for device in range(population) if device not in found]
    if rest is None and without:
        shown = ", ".join(map(str, without[:3])) + (" and others" if len(without) > 3 else "")
        raise SimulationError(f"models: none has device {shown}; leave `clients` out of the model that the rest have")
    return [found.get(device, rest or 0) for device in range(population)]


def renamed(error: ArchipelError, number: int) -> SimulationError:
    """The error of a `[model]`, as that of the model of this number."""
    text = str(error)
    named = text.startswith(("model:", "model."))
    return SimulationError(f"models[{number}]{text.removeprefix('model')}" if named else f"models[{number}]: {text}")


def _assigned(models: Sequence[ModelOfSome]) -> tuple[dict[int, int], int | None]:
    """device -> number of its model, of those that are named; the model that the others have."""
    found: dict[int, int] = {}
    rest: int | None = None
    for number, each in enumerate(models):
        if each.clients is None:
            if rest is not None:
                raise SimulationError(f"models[{number}].clients: is missing, as in models[{rest}]; one has the rest")
            rest = number
            continue
        for device in each.clients:
            if device in found:
                raise SimulationError(f"models[{number}].clients: device {device} has models[{found[device]}] already")
            found[device] = number
    return found, rest
