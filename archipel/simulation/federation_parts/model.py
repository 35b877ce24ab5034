"""The model of a federation's file: a network, a model file or a bundle, and which fields of the data it reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from archipel.bundle import Bundle, development_key, development_key_file, load_public_key, open_bundle
from archipel.bundle.roles import Example, Label
from archipel.datasets.dataset import LABEL
from archipel.datasets.entry_names import FieldNames, FieldType
from archipel.errors import SimulationError
from archipel.graph import Model
from archipel.lite_runtime.training.driver import data_ports
from archipel.models.source import ModelSource, make_network
from archipel.simulation.clients import two_of


def open_network(source: ModelSource, seed: int, folder: Path) -> Any:
    """What the table [model] names: a PyTorch module, a Model, or a Bundle. Raises ArchipelError."""
    kind, name = source.source
    if kind in ("zoo", "python"):
        if kind == "python":
            import torch

            torch.manual_seed(seed)
        return make_network(source, seed, folder)
    if source.arguments:
        raise SimulationError(f"model.arguments: are for zoo and python; {kind} has none")
    if kind == "bundle":
        return open_bundle(folder / name, _keys(source, folder, name), allow_development=True)
    from archipel.converter.opened import open_model

    return open_model(folder / name)


def as_model(network: Any, train: Mapping[str, NDArray[Any]], rows: NDArray[Any] | None = None) -> Model:
    """A PyTorch module as a Model, exported with two of the examples; `rows` are their numbers, for errors.

    Raises SimulationError, ModelImportError.
    """
    if isinstance(network, Model):
        return network
    if not callable(getattr(network, "forward", None)):
        raise SimulationError(
            f"model.python: expected a PyTorch module or an archipel.Model, got {type(network).__name__}; return one"
        )
    taken = [
        each.name for each in inspect.signature(network.forward).parameters.values()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]  # fmt: skip
    arrays = FieldNames(dict.fromkeys(taken, FieldType()), {}).take("data", train, rows)
    examples = [two_of(arrays[name]) for name in taken]
    return Model.from_torch(network, tuple(examples) if len(examples) > 1 else examples[0])


def field_names(network: Model | Bundle) -> FieldNames:
    """The fields that training reads."""
    if isinstance(network, Model):
        return FieldNames(
            {port.name: FieldType(port.dtype, port.shape) for port in network.inputs}, {LABEL: FieldType()}
        )
    ports = data_ports(network, network.manifest.schedule)
    found: list[dict[str, FieldType]] = [
        {port.name: FieldType(port.dtype, tuple(port.shape)) for port in ports if isinstance(port, role)}
        for role in (Example, Label)
    ]
    return FieldNames(*found)


def _keys(source: ModelSource, folder: Path, name: str) -> list[bytes]:
    if source.key:
        return [load_public_key(folder / key) for key in source.key]
    if not development_key_file().is_file():
        raise SimulationError(f'model.key: {name} is opened with its publisher\'s key; give key = ["FILE.pub"]')
    return [development_key()[0].public_key().public_bytes_raw()]
