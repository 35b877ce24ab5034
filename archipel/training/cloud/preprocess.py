"""Transforms in front of a network that is to be trained, fitted to its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import onnxruntime

from archipel.datasets import Dataset, as_dataset
from archipel.datasets.dataset import INPUT, Field, Stream
from archipel.datasets.entry_names import LABELS
from archipel.errors import PreprocessingError
from archipel.graph import Model
from archipel.preprocessing import Raw, Transform, chain, fitted, put_before

if TYPE_CHECKING:
    from torch import nn

_EXAMPLES = 2  # of which a network of PyTorch is exported


def with_preprocessing(network: Model | nn.Module, transforms: Sequence[Transform], data: object) -> Model:
    """A network with transforms in front, as a graph that learns from raw examples.

    Arguments:
        network: a Model, or a module of PyTorch, which is exported with prepared examples of the data.
        transforms: without a `Raw` at their head the data say what is raw. A `Normalize` without numbers is measured on
            the data. The only raw input is called as the field that it reads.
        data: what is trained on, anything that `archipel.datasets.as_dataset` takes.

    Raises PreprocessingError for transforms that do not fit the data or the network, ModelImportError for a module that
    cannot be exported, DatasetError.

    Example:
        result = archipel.train(with_preprocessing(network, [Scale(), Layout("NHWC", "NCHW")], data), data)
    """
    dataset, parts = as_dataset(data), list(transforms)
    if not parts or not isinstance(parts[0], Raw):
        parts.insert(0, _raw(dataset))
    if sum(isinstance(part, Raw) for part in parts) == 1:
        parts[0] = _named(parts[0], dataset)
    parts = fitted(parts, dataset)
    return put_before(network if isinstance(network, Model) else _exported(network, parts, dataset), parts)


def _input_field(dataset: Dataset | Stream) -> str:
    if INPUT in dataset.fields:
        return INPUT
    fields = [name for name in dataset.fields if name not in LABELS]
    if len(fields) != 1:
        raise PreprocessingError(
            f"the data have the fields {', '.join(dataset.fields)}; begin the transforms of each input "
            "with a Raw of its field's name"
        )
    return fields[0]


def _raw(dataset: Dataset | Stream) -> Raw:
    field: Field = dataset.fields[_input_field(dataset)]
    sizes = (f"size_{axis}" if size is None else size for axis, size in enumerate(field.shape, start=1))
    return msgspec.convert({"kind": "raw", "dtype": field.dtype.name, "shape": ["batch", *sizes]}, Raw)


def _named(raw: Transform, dataset: Dataset | Stream) -> Transform:
    """A raw input is called like the field that it reads."""
    named = getattr(raw, "name", "") or getattr(raw, "input", "") in dataset.fields
    return raw if named else msgspec.structs.replace(raw, name=_input_field(dataset))


def _exported(module: nn.Module, transforms: list[Transform], dataset: Dataset | Stream) -> Model:
    import torch

    head = transforms[0]
    if not isinstance(head, Raw) or any(isinstance(part, Raw) for part in transforms[1:]):
        raise PreprocessingError("transforms of several inputs go in front of a graph; give the network as a Model")
    field = head.name or head.input
    if isinstance(dataset, Dataset):
        examples = dataset.take(np.arange(min(_EXAMPLES, len(dataset))))
    else:
        examples = {name: array[:_EXAMPLES] for name, array in next(iter(dataset.read()), {}).items()}
    if field not in examples or not len(examples[field]):
        raise PreprocessingError(f"the data have no examples of {field!r}")
    session = onnxruntime.InferenceSession(chain(transforms).to_bytes(), providers=["CPUExecutionProvider"])
    (prepared_examples,) = session.run(None, {field: examples[field]})
    return Model.from_torch(module.eval(), torch.from_numpy(prepared_examples))
