"""The data of `archipel train`: files, or what a function returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from archipel.cli.models.train.job import DataPart, Job
from archipel.datasets import Dataset, Stream, open_file
from archipel.errors import CommandError
from archipel.user_functions import check_arguments, load_function

PARTS = ("train", "validation", "test")


class Data(NamedTuple):
    """What to train on, what chooses the best epoch, and what the result is measured on; the last two may be None."""

    train: Any
    validation: Any = None
    test: Any = None


def read_data(job: Job) -> Data:
    """The data that the job names. Raises CommandError that names the key, and what a function of the user's raises."""
    part = job.data
    files = {name: open_file(path, **part.options) for name in PARTS if (path := getattr(part, name)) is not None}
    _check_classes(part, files)
    if part.python is None:
        return Data(**files)
    load = load_function(part.python, "data.python")
    check_arguments(load, part.python, part.arguments, "data.arguments")
    found = _parts(load(**part.arguments))
    return Data(**{**found._asdict(), **files})


def _check_classes(part: DataPart, files: Mapping[str, Dataset | Stream]) -> None:
    """Labels must mean the same in all files: the numbers of texts and folders are by the names that a file has."""
    first = next(iter(files), "")
    for name, data in files.items():
        for field, own in data.fields.items():
            expected = files[first].fields.get(field, own)
            if own.classes != expected.classes:
                differs = sorted(set(own.classes) ^ set(expected.classes))[:3]
                raise CommandError(
                    f"data.{name}: {getattr(part, name)}: field {field!r} has other classes than "
                    f"{getattr(part, first)} ({', '.join(differs) or 'another order'}); name them in data.options, or "
                    "give each file all of them"
                )


def _parts(found: Any) -> Data:
    if all(hasattr(found, name) for name in PARTS):
        return Data(*(getattr(found, name) for name in PARTS))
    # Two or three data sets, and not one pair of arrays, which is training data alone.
    if isinstance(found, tuple) and len(found) in (2, 3) and not hasattr(found[0], "dtype"):
        return Data(*found)
    return Data(found)
