"""Finds the example whose class or token number the model does not have, after an engine has refused a batch.

Looking only then keeps every good batch as fast as it is. ONNX Runtime says which index it was and what would have been
in range, or for labels that one was wrong, as OpenVINO's sessions always do; the classes that there are follow from the
answers of `predict`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from archipel.bundle import Bundle
from archipel.bundle.roles import Dim, Example, Label, Port
from archipel.errors import IndexRangeError

_SHOWN = 3
# What Gather, GatherElements, GatherND and the Scatters say.
_INDEX = re.compile(
    "out of data bounds|Out of range value in index|invalid ind(ex|ice) found"
    # PyTorch's: of gather and scatter, of index_select, and of both on a GPU, whose process is of no use then.
    r"|is out of bounds for dimension \d+ with size|index out of range in self|device-side assert triggered"
)
_NUMBER = re.compile(r"(?:idx=|index = |indice = )(-?\d+)|index (-?\d+) is out of bounds for dimension")
_BOUNDS = re.compile(r"must be within the inclusive range \[(-?\d+),(-?\d+)\]")
_SIZE = re.compile(r"is out of bounds for dimension \d+ with size (\d+)")


def index_error(where: str, text: str) -> IndexRangeError | None:
    """The error for what an engine says in `text`, None if it is about something else than an index."""
    if not _INDEX.search(text):
        return None
    number, bounds, size = _NUMBER.search(text), _BOUNDS.search(text), _SIZE.search(text)
    index = None if number is None else int(number[1] or number[2])
    highest = int(bounds[2]) if bounds is not None else int(size[1]) - 1 if size is not None else None
    which = "an index" if index is None else f"the index {index}"
    known = "" if highest is None else f" (0 to {highest})"
    error = IndexRangeError(
        f"{where}: {which} that follows from the data is not one that the model has{known}; look for a label, class or "
        "token number that is too large, or below 0"
    )
    error.index, error.highest = index, highest
    return error


@contextmanager
def locating(bundle: Bundle, arrays: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Raise an IndexRangeError of the block again, naming the field and the rows of `arrays` that are at fault."""
    try:
        yield
    except IndexRangeError as error:
        if error.located:  # in the examples of a validation
            raise
        raise locate(error, bundle, arrays) from None


def locate(error: IndexRangeError, bundle: Bundle, arrays: Mapping[str, np.ndarray]) -> IndexRangeError:
    """The error that names what is at fault in these fields, or `error` itself where nothing is found.

    Arguments:
        error: from a session.
        bundle: whose program has failed.
        arrays: `[examples, ...]` by field name; rows are counted in these.
    """
    for port, highest in _numbered(bundle, error):
        array = arrays.get(port.name)
        if array is None or not array.ndim:
            continue
        wrong = (array == error.index) if highest is None else (array < 0) | (array > highest)
        if isinstance(port, Example) and highest is not None:
            # Negative ones count from the end, which ONNX allows.
            wrong = (array < -highest - 1) | (array > highest)
        if not wrong.any():
            continue
        rows = np.flatnonzero(wrong.reshape(len(array), -1).any(axis=1))
        shown = [f"row {row}: {array[row][wrong[row]].flat[0]}" for row in rows[:_SHOWN].tolist()]
        more = f" and {len(rows) - _SHOWN} more rows" if len(rows) > _SHOWN else ""
        known = "" if highest is None else f"; the model knows 0 to {highest}"
        what = "a class number" if isinstance(port, Label) else "a number"
        located = IndexRangeError(
            f"field {port.name!r} has {what} that the model does not have, in {', '.join(shown)}{more}{known}. Correct "
            "these examples or leave them out"
        )
        located.index, located.highest, located.located = error.index, error.highest, True
        return located
    return error


def _numbered(bundle: Bundle, error: IndexRangeError) -> Iterator[tuple[Port, int | None]]:
    """The fields of whole numbers that may be at fault, each with the highest number that it may have, if known."""
    # A program of several steps has an axis for them.
    programs = [program for program in bundle.manifest.programs.values() if program.steps == 1]
    ports = {port.name: port for program in programs for port in program.inputs if isinstance(port, Example | Label)}
    numbered = [port for port in ports.values() if np.dtype(port.dtype).kind in "iu"]
    if error.index is not None:
        for port in numbered:
            if isinstance(port, Example):
                yield port, error.highest
    answers = [port for program in programs if program.kind == "predict" for port in program.outputs]
    for port in numbered:
        if isinstance(port, Label):
            classes = next(filter(None, (_classes(answer.shape, port.shape) for answer in answers)), None)
            if classes is not None:
                yield port, classes - 1


def _classes(answer: tuple[Dim, ...], label: tuple[Dim, ...]) -> int | None:
    """The size of the axis that an answer has and its labels have not; None if these shapes do not belong together."""
    if len(answer) != len(label) + 1:
        return None
    # Behind the batch, as of pictures, or at the end, as of texts.
    for axis in dict.fromkeys((1, len(answer) - 1)):
        size, rest = answer[axis], (*answer[:axis], *answer[axis + 1 :])
        if isinstance(size, int) and all(a == b or not isinstance(a, int) for a, b in zip(rest, label)):
            return size
    return None
