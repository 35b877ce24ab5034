"""[[preprocess]] of `archipel train`: transforms in front of the network, so that it learns from raw examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from archipel.datasets import Dataset, as_dataset
from archipel.datasets.dataset import LABEL, Field, Stream
from archipel.datasets.entry_names import LABELS
from archipel.errors import ArchipelError, CommandError

if TYPE_CHECKING:
    from archipel.graph import Model
    from archipel.preprocessing import Raw, Transform

_EXAMPLES = 2  # of which a network of PyTorch is exported


def prepared(model: Any, tables: list[dict[str, Any]], data: Any) -> Model:
    """The network with the transforms of [[preprocess]] in front, as a graph.

    Arguments:
        model: a Model, or a module of PyTorch, which is exported with prepared examples.
        tables: the file's; without a `raw` at their head the data say what is raw. A `normalize` without numbers is
            measured on the data.
        data: what is trained on.

    Raises CommandError for transforms that do not fit the data or the network, DatasetError.
    """
    from archipel.graph import Model  # first: its error names the extra that is missing
    from archipel.preprocessing import Raw, fitted, from_settings, put_before

    dataset = as_dataset(data)
    try:
        transforms = from_settings(tables)
        if not transforms or not isinstance(transforms[0], Raw):
            transforms.insert(0, _raw(dataset))
        if sum(isinstance(part, Raw) for part in transforms) == 1:
            transforms[0] = _named(transforms[0], dataset)
        transforms = fitted(transforms, dataset)
        if not isinstance(model, Model):
            model = _exported(model, transforms, dataset)
        return put_before(model, transforms)
    except ArchipelError as error:
        text = str(error)
        raise CommandError(text if text.startswith("[[preprocess]]") else f"[[preprocess]]: {text}") from None


def _input_field(dataset: Dataset | Stream) -> str:
    fields = [name for name in dataset.fields if name != LABEL and name not in LABELS]
    if len(fields) != 1:
        raise CommandError(
            f"[[preprocess]]: the data have the fields {', '.join(dataset.fields)}; begin the transforms of each input "
            'with kind = "raw" and the name of its field'
        )
    return fields[0]


def _raw(dataset: Dataset | Stream) -> Raw:
    from archipel.preprocessing import Raw

    field: Field = dataset.fields[_input_field(dataset)]
    sizes = (f"size_{axis}" if size is None else size for axis, size in enumerate(field.shape, start=1))
    return msgspec.convert({"kind": "raw", "dtype": field.dtype.name, "shape": ["batch", *sizes]}, Raw)


def _named(raw: Transform, dataset: Dataset | Stream) -> Transform:
    """A raw input is called like the field that it reads."""
    named = getattr(raw, "name", "") or getattr(raw, "input", "") in dataset.fields
    return raw if named else msgspec.structs.replace(raw, name=_input_field(dataset))


def _exported(module: Any, transforms: list[Transform], dataset: Dataset | Stream) -> Model:
    import onnxruntime
    import torch

    from archipel.graph import Model
    from archipel.preprocessing import Raw, chain

    head = transforms[0]
    if not isinstance(head, Raw) or any(isinstance(part, Raw) for part in transforms[1:]):
        raise CommandError('[[preprocess]]: of several inputs takes a graph: model = { onnx = "FILE" }')
    field = head.name or head.input
    if isinstance(dataset, Dataset):
        examples = dataset.take(np.arange(min(_EXAMPLES, len(dataset))))
    else:
        examples = {name: array[:_EXAMPLES] for name, array in next(iter(dataset.read()), {}).items()}
    if field not in examples or not len(examples[field]):
        raise CommandError(f"[[preprocess]]: the data have no examples of {field!r}")
    session = onnxruntime.InferenceSession(chain(transforms).to_bytes(), providers=["CPUExecutionProvider"])
    (prepared_examples,) = session.run(None, {field: examples[field]})
    return Model.from_torch(module.eval(), torch.from_numpy(prepared_examples))
