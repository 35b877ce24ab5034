"""Which example of a data set a training failed on: looked for only once something is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from archipel.datasets.dataset import Arrays, Dataset, Stream, locate
from archipel.datasets.taking import take
from archipel.errors import TrainingError
from archipel.training.cloud.objective.objective import Objective, Outputs

_PIECE = 1024
_MOST = 4_000_000  # examples; a longer search would take longer than it helps


def find_not_finite(data: Dataset | Stream, fields: Sequence[str]) -> str | None:
    """Where the first NaN or infinite number is, such as "train.csv, line 18: field 'x' is nan"; None for none."""
    for start, piece in _pieces(data):
        for name in fields:
            values = piece[name]
            if values.dtype.kind != "f":
                continue
            good = np.isfinite(values).reshape(len(values), -1)
            if not good.all():
                row = int(np.argmin(good.all(axis=1)))
                value = values[row].reshape(-1)[int(np.argmin(good[row]))]
                return f"{locate(data, start + row)}: field {name!r} is {value}"
    return None


def check_labels(objective: Objective, outputs: Outputs, batch: Mapping[str, Any], data: Dataset | Stream) -> None:
    """Refuse labels that are no classes, before the loss, which on a GPU would end the process for one.

    Arguments:
        objective: its losses.
        outputs: of the model; they say how many classes there are.
        batch: arrays by field, as they were read.
        data: where they come from.

    Raises TrainingError that names the place.
    """
    for term in objective.terms:
        labels = batch.get(term.label)
        if not isinstance(labels, np.ndarray):
            continue
        output = objective.output(outputs, term)
        wrong = term.loss.wrong_label(output, labels)
        if wrong is not None:
            classes = term.loss.classes(output) or 0
            place = find_label(data, term.label, 0, classes, term.loss.ignored)
            raise TrainingError(
                f"{place or 'the data'}: field {term.label!r} has the label {wrong}, and the model has {classes} "
                f"classes, 0 to {classes - 1}; correct the label, give the model more classes, or set the loss's "
                "ignore_index"
            )


def find_label(data: Dataset | Stream, field: str, low: int, high: int, ignored: int | None) -> str | None:
    """Where the first label is that is not from `low` to below `high` and not `ignored`; None for none."""
    for start, piece in _pieces(data):
        values = piece[field].reshape(len(piece[field]), -1)
        wrong = (values < low) | (values >= high)
        if ignored is not None:
            wrong &= values != ignored
        if wrong.any():
            return locate(data, start + int(np.argmax(wrong.any(axis=1))))
    return None


def _pieces(data: Dataset | Stream) -> Iterator[tuple[int, Arrays]]:
    """(number of the first example, examples) in the data's own order."""
    if isinstance(data, Dataset):
        for start in range(0, min(len(data), _MOST), _PIECE):
            yield start, take(data, np.arange(start, min(start + _PIECE, len(data)), dtype=np.intp))
        return
    start = 0
    for piece in data.read():
        yield start, piece
        start += len(next(iter(piece.values())))
        if start >= _MOST:
            return
