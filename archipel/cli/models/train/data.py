"""The data of `archipel train`: files, or what a function returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from archipel.cli.models.train.job import Job
from archipel.datasets import open_file
from archipel.datasets.checks import check_same_classes
from archipel.user_functions import call_function, check_arguments, load_function

PARTS = ("train", "validation", "test")


class Data(NamedTuple):
    """What to train on, what chooses the best epoch, and what the result is measured on; the last two may be None."""

    train: Any
    validation: Any = None
    test: Any = None


def read_data(job: Job) -> Data:
    """The data that the job names. Raises an ArchipelError that names the key, also for what a function of the
    user's raises."""
    part = job.data
    paths = {name: path for name in PARTS if (path := getattr(part, name)) is not None}
    files = {name: open_file(path, **part.options) for name, path in paths.items()}
    check_same_classes(files, paths)
    if part.python is None:
        return Data(**files)
    load = load_function(part.python, "data.python")
    check_arguments(load, part.python, part.arguments, "data.arguments")
    found = _parts(call_function(load, part.python, part.arguments, "data.python"))
    return Data(**{**found._asdict(), **files})


def _parts(found: Any) -> Data:
    if all(hasattr(found, name) for name in PARTS):
        return Data(*(getattr(found, name) for name in PARTS))
    # Two or three data sets, and not one pair of arrays, which is training data alone.
    if isinstance(found, tuple) and len(found) in (2, 3) and not hasattr(found[0], "dtype"):
        return Data(*found)
    return Data(found)
