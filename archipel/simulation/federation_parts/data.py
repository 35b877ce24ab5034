"""The data of a federation's file: reads the examples, names them as the model does, and divides them over devices."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from archipel import datasets
from archipel.datasets import Dataset, as_dataset, open_file, partitioners
from archipel.datasets.checks import check_same_classes
from archipel.datasets.entry_names import FieldNames
from archipel.datasets.partitioners import FIELD, PARTITIONERS, takes_field
from archipel.datasets.taking import take
from archipel.errors import DatasetError, SimulationError
from archipel.protocol.mistakes import tell
from archipel.simulation.clients import Clients, ListedClients, SplitClients
from archipel.user_functions import call_function, check_arguments, load_function

Arrays = dict[str, NDArray[Any]]


class DataSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[data]: files, read with the reader's `options`, or a function of `arguments`.

    The function returns the training data, or (training data, test data), each a mapping from field to array, a pair
    (inputs, labels), or whatever `archipel.datasets.as_dataset` takes; or it returns the devices themselves: a list
    with the mapping of each, or `Clients`. `hold_out` is the share of the training data to test with.
    """

    train: str | None = None
    test: str | None = None
    options: dict[str, Any] = {}
    python: str | None = None
    arguments: dict[str, Any] = {}
    hold_out: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """[partition]: `how` names one of PARTITIONERS; every other entry is an argument of it.

    `clients` None: "by" makes a device of each group.
    """

    how: str
    clients: int | None
    options: dict[str, Any] = {}


def read_partition(table: Mapping[str, Any]) -> Partition:
    """The table, checked against the partitioner's own arguments. Raises SimulationError that names the field."""
    options = dict(table)
    how, clients = options.pop("how", "iid"), options.pop("clients", None)
    mistakes = list(_mistakes_of_partition(how, clients, options))
    if mistakes:
        raise SimulationError(tell([f"partition.{text}" for text in mistakes]))
    return Partition(how=how, clients=clients, options=options)


def _mistakes_of_partition(how: object, clients: object, options: Mapping[str, Any]) -> Iterator[str]:
    if clients is None:
        if how != "by":
            yield 'clients: is missing: how many devices there are; how = "by" alone makes a device of each group'
    elif isinstance(clients, bool) or not isinstance(clients, int) or clients < 1:
        yield f"clients: expected how many devices there are, 1 or more, got {clients!r}"
    if not isinstance(how, str) or how not in PARTITIONERS:
        yield f"how: no {how!r}; there are {', '.join(PARTITIONERS)}"
        return
    known = _options(how)
    for name, value in options.items():
        if name not in known:
            yield f"{name}: {how!r} has no such setting; it has {', '.join(known) or 'none'}"
        elif isinstance(value, dict | list):
            yield f"{name}: expected a number or a text, got {value!r}"
    for name, needed in known.items():
        if needed and name not in options:
            yield f"{name}: is missing; {how!r} needs it"


def _options(how: str) -> dict[str, bool]:
    """The settings of a partitioner, and whether each is needed."""
    _, _, *rest = inspect.signature(PARTITIONERS[how]).parameters.values()
    found = {each.name: each.default is each.empty for each in rest}
    return {FIELD: True, **found} if takes_field(how) else found


class Examples(msgspec.Struct, frozen=True):
    """What was read: the training data, or the devices where these are divided already; the test data.

    `rows` are the numbers that the rows of `train` have in the data, where some of these are kept out (None: all are
    there).
    """

    train: Arrays | Clients
    test: Arrays | None
    rows: NDArray[Any] | None = None


def read_examples(source: DataSource, folder: Path, seed: int) -> Examples:
    """The data, with the names that they have in files. Raises DatasetError, SimulationError that names the key."""
    found: list[Any] = [None, None]
    if source.python is not None:
        load = load_function(source.python, "data.python", folder)
        check_arguments(load, source.python, source.arguments, "data.arguments")
        found = _parts(call_function(load, source.python, source.arguments, "data.python"))
    paths = {name: file for name in ("train", "test") if (file := getattr(source, name)) is not None}
    files = {name: open_file(folder / file, **source.options) for name, file in paths.items()}
    for name, file in files.items():
        if not isinstance(file, Dataset):
            raise SimulationError(
                f"data.{name}: {paths[name]}: nobody knows how many examples it has; convert it first: archipel data "
                "convert"
            )
    check_same_classes(files, paths)
    train, test = files.get("train", found[0]), files.get("test", found[1])
    if isinstance(train, Clients) and not isinstance(train, Dataset | Sequence | Mapping):
        clients: Clients = train
    elif _is_divided(train):
        clients = ListedClients([{name: np.asarray(each[name]) for name in each} for each in train])
    else:
        whole, rows = as_dataset(train), None
        if test is not None and source.hold_out is not None:
            raise SimulationError("data.hold_out: there are test data as well; leave it out")
        if source.hold_out is not None:
            whole, test = datasets.hold_out(whole, source.hold_out, seed=seed)
            rows = whole.rows
        return Examples(arrays_of("data.train", whole), None if test is None else arrays_of("data.test", test), rows)
    if source.hold_out is not None:
        raise SimulationError("data.hold_out: the devices are divided already; return test data beside them")
    return Examples(clients, None if test is None else arrays_of("data.test", test))


def _is_divided(train: Any) -> bool:
    return (
        isinstance(train, list)
        and bool(train)
        and all(isinstance(each, Mapping) and all(np.ndim(array) > 0 for array in each.values()) for each in train)
    )


def _parts(found: Any) -> list[Any]:
    if hasattr(found, "train") and hasattr(found, "test"):
        return [found.train, found.test]
    # Training and test data, and not one pair of arrays, which is training data alone.
    if isinstance(found, tuple) and len(found) == 2 and not hasattr(found[0], "dtype"):
        return list(found)
    return [found, None]


def arrays_of(key: str, data: Any) -> Arrays:
    """The examples as arrays by field. Raises SimulationError that names the key, for a stream."""
    opened = as_dataset(data)
    if not isinstance(opened, Dataset):
        raise SimulationError(f"{key}: a stream of examples has no parts; read it into arrays first")
    return dict(take(opened, np.arange(len(opened))))


def read_fields(examples: Mapping[str, Any], what: str, names: FieldNames) -> Arrays:
    """What the model reads of them, under its names. Raises DatasetError that names `what` and the field."""
    found = names.take(what, examples)
    return {name: found[name] for name in (*names.inputs, *names.labels)}


def divide(arrays: Arrays, names: FieldNames, partition: Partition, seed: int) -> SplitClients:
    """The devices: each has the rows that the partitioner gives it. Raises SimulationError that names the table."""
    read = (*names.inputs, *names.labels)
    try:
        parts = partitioners.divide(
            partition.how, partition.clients, partition.options,
            count=len(arrays[next(iter(names.inputs))]),
            labels=next((arrays[name] for name in names.labels), None),
            fields={name: array for name, array in arrays.items() if name not in read},
            seed=seed,
        )  # fmt: skip
    except DatasetError as error:
        raise SimulationError(f"partition: {error}") from None
    # The rest, such as whose an example is, is nothing that devices read.
    return SplitClients({name: arrays[name] for name in read}, parts)
