"""`fitted`: measures on data what transforms need of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import onnxruntime
from numpy.typing import NDArray

from archipel.datasets.dataset import INPUT, Dataset, Stream
from archipel.errors import PreprocessingError
from archipel.lite_runtime.engines.onnx_runtime import error_types
from archipel.preprocessing.assembling import chain
from archipel.preprocessing.numbers import Normalize
from archipel.preprocessing.raw import Raw
from archipel.preprocessing.transform import Transform

_ROWS = 64  # examples prepared at once


Examples = NDArray[Any] | Iterable[NDArray[Any]]
"""An array [examples, ...], or batches of such that can be read several times."""


def fitted(
    transforms: Sequence[Transform], data: Examples | Mapping[str, Examples] | Dataset | Stream
) -> list[Transform]:
    """The transforms with numbers for each `Normalize` that has none, measured on raw examples.

    Arguments:
        transforms: without a `Raw` at their head, the data say what is raw.
        data: the raw examples as an array [examples, ...], or batches [batch, ...], which are read once for each
            `Normalize` without numbers: a list, a memory map, anything that can be read again. Or these by name, or a
            data set (archipel.datasets): a `Raw` reads what it has the name of. One without a name reads the only
            field, or "input".

    Returns the same transforms, with the mean and the standard deviation (of the population) along each `axis`,
    computed in float64. A place whose numbers are all equal gets a deviation of 1.

    Raises PreprocessingError for data that do not fit, are empty or not finite.

    Example:
        transforms = preprocessing.fitted([Raw("uint8", ("batch", 32, 32, 3)), Scale(), Normalize()], images)
    """
    if isinstance(data, Dataset | Stream):
        data = {name: _Column(data, name) for name in data.fields}
    if isinstance(data, Mapping):
        return _fitted_by_name(transforms, data)
    batches = [data] if isinstance(data, np.ndarray) else data
    result = list(transforms)
    for index, part in enumerate(result):
        if isinstance(part, Normalize) and not part.mean:
            mean, std = _moments(result[:index], batches, part.axis)
            result[index] = msgspec.structs.replace(part, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    return result


class _Column:
    """The examples of one field of a data set, in batches."""

    def __init__(self, data: Dataset | Stream, name: str) -> None:
        self._data, self._name = data, name

    def __iter__(self) -> Iterator[NDArray[Any]]:
        if isinstance(self._data, Dataset):
            for start in range(0, len(self._data), _ROWS):
                yield self._data.take(np.arange(start, min(start + _ROWS, len(self._data))))[self._name]
        else:
            yield from (piece[self._name] for piece in self._data.read())


def _fitted_by_name(transforms: Sequence[Transform], data: Mapping[str, Examples]) -> list[Transform]:
    starts = [index for index, part in enumerate(transforms) if isinstance(part, Raw)] or [0]
    result: list[Transform] = list(transforms[: starts[0]])
    for start, end in zip(starts, [*starts[1:], len(transforms)]):
        parts, head = transforms[start:end], transforms[start] if transforms else None
        if not any(isinstance(part, Normalize) and not part.mean for part in parts):
            result.extend(parts)
            continue
        name = (head.name or head.input) if isinstance(head, Raw) else ""
        if not name:
            name = next(iter(data)) if len(data) == 1 else INPUT
        if name not in data:
            raise PreprocessingError(
                f"normalize: no data for the raw input {name!r}, only for {', '.join(map(repr, data)) or 'none'}; its "
                "Raw says its name"
            )
        result.extend(fitted(parts, data[name]))
    return result


def _moments(
    before: Sequence[Transform], batches: Iterable[NDArray[Any]], axis: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    session: onnxruntime.InferenceSession | None = None
    count, mean, squares = 0, np.zeros(1), np.zeros(1)
    for batch in batches:
        examples = np.asarray(batch)
        for start in range(0, len(examples), _ROWS):
            rows = examples[start : start + _ROWS]
            if session is None:
                session = _session(before, rows)
            prepared = _prepared(session, rows, start)
            if axis >= prepared.ndim or axis < -prepared.ndim or axis % prepared.ndim == 0:
                raise PreprocessingError(f"normalize: axis {axis} is none of {list(prepared.shape)} behind the batch")
            places = np.moveaxis(prepared, axis, -1).reshape(-1, prepared.shape[axis]).astype(np.float64)
            # Chan et al. (1983): sums of squares around each part's own mean, which do not cancel.
            part, shift = len(places), places.mean(axis=0) - mean
            total = count + part
            squares = squares + ((places - places.mean(axis=0)) ** 2).sum(axis=0) + shift**2 * count * part / total
            mean, count = mean + shift * part / total, total
    if not count:
        raise PreprocessingError("normalize: no examples to measure mean and std on")
    deviation = np.sqrt(squares / count)
    return mean, np.where(deviation > 0, deviation, 1.0)


def _session(before: Sequence[Transform], rows: np.ndarray) -> onnxruntime.InferenceSession:
    parts = list(before)
    if not parts or not isinstance(parts[0], Raw):
        parts.insert(0, Raw.of(rows))
    if any(isinstance(part, Raw) for part in parts[1:]):
        raise PreprocessingError("fitted: give the transforms of one input at a time")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(chain(parts).to_bytes(), options, providers=["CPUExecutionProvider"])


def _prepared(session: onnxruntime.InferenceSession, rows: np.ndarray, start: int) -> np.ndarray:
    place = f"examples {start} to {start + len(rows) - 1}"
    field = session.get_inputs()[0]
    try:
        (prepared,) = session.run(None, {field.name: rows})
    except error_types() as error:
        raise PreprocessingError(
            f"normalize: {place} are {rows.dtype}{list(rows.shape)}, expected {field.type} {field.shape}: {error}"
        ) from None
    if not np.isfinite(prepared).all():
        raise PreprocessingError(f"normalize: {place} have a number that is not finite; remove it from the data")
    return np.asarray(prepared)
