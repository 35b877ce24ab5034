"""Which entry of a file is for which field of a model: by its name, or as `x` and `y`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

INPUT = "x"
LABELS = ("y", "label", "labels", "target")
"""What entries with labels are called, the most usual first."""

Array = TypeVar("Array")


def name_entries(arrays: Mapping[str, Array], inputs: Sequence[str], labels: Sequence[str]) -> dict[str, Array]:
    """The arrays by the names of the fields that they are for.

    An entry has the name of its field. Where none has, `x` is the only input, and `y`, `label`, `labels` or `target`
    the only field of labels. All others keep their names.

    Arguments:
        arrays: the entries of a file by name.
        inputs: the names of the fields that the model reads.
        labels: the names of the fields that losses compare with.
    """
    taken, named = {*inputs, *labels}, dict(arrays)
    for fields, usual in ((inputs, (INPUT,)), (labels, LABELS)):
        if len(fields) != 1 or fields[0] in arrays:
            continue
        found = next((name for name in usual if name in arrays and name not in taken), None)
        if found is not None:
            named[fields[0]] = named.pop(found)
    return named
