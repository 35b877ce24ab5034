"""The data of a federation's file: reads the examples, names them as the model does, and divides them over devices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from archipel import datasets
from archipel.datasets import (
    Dataset,
    as_dataset,
    open_file,
    split_by,
    split_dirichlet,
    split_iid,
    split_labels,
    split_power_law,
    split_shards,
    split_sizes,
    split_sorted,
)
from archipel.datasets.dataset import INPUT
from archipel.datasets.entry_names import INPUT as SHORT_INPUT
from archipel.datasets.entry_names import name_entries
from archipel.datasets.taking import take
from archipel.errors import DatasetError, SimulationError
from archipel.simulation.clients import Clients, ListedClients, SplitClients
from archipel.user_functions import check_arguments, load_function

Arrays = dict[str, NDArray[Any]]

PARTITIONS: Mapping[str, Callable[..., Sequence[NDArray[Any]]]] = {
    "iid": split_iid,
    "dirichlet": split_dirichlet,
    "by": split_by,
    "shards": split_shards,
    "labels": split_labels,
    "power_law": split_power_law,
    "sizes": split_sizes,
    "sorted": split_sorted,
}
"""Partitioners by name. The first argument's name says what it divides: `count`, `labels`, or else a field."""
_FIELD = "field"


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
    """[partition]: `how` names one of PARTITIONS; every other entry is an argument of it."""

    how: str
    clients: int
    options: dict[str, Any] = {}


def read_partition(table: Mapping[str, Any]) -> Partition:
    """The table, checked against the partitioner's own arguments. Raises SimulationError that names the field."""
    options = dict(table)
    how, clients = options.pop("how", "iid"), options.pop("clients", None)
    if not isinstance(how, str) or how not in PARTITIONS:
        raise SimulationError(f"partition.how: no {how!r}; there are {', '.join(PARTITIONS)}")
    if isinstance(clients, bool) or not isinstance(clients, int) or clients < 1:
        raise SimulationError(f"partition.clients: expected how many devices there are, 1 or more, got {clients!r}")
    known = _options(how)
    for name, value in options.items():
        if name not in known:
            raise SimulationError(f"partition.{name}: {how!r} has no such setting; it has {', '.join(known) or 'none'}")
        if isinstance(value, dict | list):
            raise SimulationError(f"partition.{name}: expected a number or a text, got {value!r}")
    for name, needed in known.items():
        if needed and name not in options:
            raise SimulationError(f"partition.{name}: is missing; {how!r} needs it")
    return Partition(how=how, clients=clients, options=options)


def _options(how: str) -> dict[str, bool]:
    """The settings of a partitioner, and whether each is needed."""
    first, _, *rest = inspect.signature(PARTITIONS[how]).parameters.values()
    found = {each.name: each.default is each.empty for each in rest}
    return {_FIELD: True, **found} if first.name not in ("count", "labels") else found


class Examples(msgspec.Struct, frozen=True):
    """What was read: the training data, or the devices where these are divided already; the test data."""

    train: Arrays | Clients
    test: Arrays | None


def read_examples(source: DataSource, folder: Path, seed: int) -> Examples:
    """The data, with the names that they have in files. Raises DatasetError, SimulationError that names the key."""
    found: list[Any] = [None, None]
    if source.python is not None:
        load = load_function(source.python, "data.python", folder)
        check_arguments(load, source.python, source.arguments, "data.arguments")
        found = _parts(load(**source.arguments))
    for number, (name, file) in enumerate((("train", source.train), ("test", source.test))):
        if file is not None:
            found[number] = open_file(folder / file, **source.options)
            if not isinstance(found[number], Dataset):
                raise SimulationError(
                    f"data.{name}: {file}: nobody knows how many examples it has; convert it first: archipel data "
                    "convert"
                )
    train, test = found
    if isinstance(train, Clients) and not isinstance(train, Dataset | Sequence | Mapping):
        clients: Clients = train
    elif _is_divided(train):
        clients = ListedClients([{name: np.asarray(each[name]) for name in each} for each in train])
    else:
        whole = as_dataset(train)
        if test is not None and source.hold_out is not None:
            raise SimulationError("data.hold_out: there are test data as well; leave it out")
        if source.hold_out is not None:
            whole, test = datasets.hold_out(whole, source.hold_out, seed=seed)
        return Examples(_arrays("data.train", whole), None if test is None else _arrays("data.test", test))
    if source.hold_out is not None:
        raise SimulationError("data.hold_out: the devices are divided already; return test data beside them")
    return Examples(clients, None if test is None else _arrays("data.test", test))


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


def _arrays(key: str, data: Any) -> Arrays:
    opened = as_dataset(data)
    if not isinstance(opened, Dataset):
        raise SimulationError(f"{key}: a stream of examples has no parts; read it into arrays first")
    return dict(take(opened, np.arange(len(opened))))


class FieldType(msgspec.Struct, frozen=True):
    """Type and shape of a field `[examples, ...]`, where they are known."""

    dtype: str = ""
    shape: tuple[int | str | None, ...] | None = None


class FieldNames(msgspec.Struct, frozen=True):
    """What the model reads: each input by name, and each label."""

    inputs: dict[str, FieldType]
    labels: dict[str, FieldType]

    def take(self, where: str, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """The arrays under the model's names and with its dtypes, and all others as they are.

        Raises SimulationError that names `where`, the field and the remedy.
        """
        given = dict(arrays)
        if INPUT in given and SHORT_INPUT not in given and INPUT not in self.labels:
            given[SHORT_INPUT] = given.pop(INPUT) if INPUT not in self.inputs else given[INPUT]
        named = name_entries(given, list(self.inputs), list(self.labels))
        if SHORT_INPUT not in {*arrays, *self.inputs}:
            named.pop(SHORT_INPUT, None)
        for kind, fields in (("examples for the model's input", self.inputs), ("labels", self.labels)):
            for name, expected in fields.items():
                if name not in named:
                    short = "x" if kind != "labels" else "y"
                    also = f", or `{short}`" if len(fields) == 1 else ""
                    raise SimulationError(
                        f"{where}: no {kind} {name!r}; name them `{name}`{also} (it has {', '.join(sorted(arrays))})"
                    )
                named[name] = _cast(f"{where}: {name}", np.asarray(named[name]), expected)
        counts = {name: len(named[name]) for name in (*self.inputs, *self.labels)}
        if len(set(counts.values())) != 1 or not min(counts.values()):
            sizes = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise SimulationError(
                f"{where}: the fields have {sizes} examples; they need as many each, and at least one"
            )
        return named


def _cast(where: str, array: NDArray[Any], expected: FieldType) -> NDArray[Any]:
    shape = expected.shape
    if shape is not None and (
        array.ndim != len(shape)
        or any(isinstance(dim, int) and dim != size for dim, size in zip(shape[1:], array.shape[1:]))
    ):
        text = ", ".join("any" if dim is None else str(dim) for dim in shape)
        raise SimulationError(f"{where}: has the shape {list(array.shape)}, the model takes [{text}]; reshape it")
    wanted = np.dtype(expected.dtype or ("int64" if array.dtype.kind in "iub" else "float32"))
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and wanted.kind in "iu"):
        raise SimulationError(f"{where}: is {array.dtype}, the model takes {wanted.name}; convert it first")
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(array, wanted)
    if made.dtype.kind == "f" and not np.isfinite(made).all():
        row = int(np.argwhere(~np.isfinite(made.reshape(len(made), -1)).all(axis=1))[0, 0])
        raise SimulationError(f"{where}: is not finite in row {row}; mend or leave out such examples")
    return made


def divide(arrays: Arrays, names: FieldNames, partition: Partition, seed: int) -> SplitClients:
    """The devices: each has the rows that the partitioner gives it. Raises SimulationError that names the field."""
    split = PARTITIONS[partition.how]
    options = {"seed": seed, **partition.options}
    first = next(iter(inspect.signature(split).parameters))
    what: Any
    if first == "count":
        what = len(arrays[next(iter(names.inputs))])
    elif first == "labels":
        what = arrays[next(iter(names.labels))]
    else:
        field = options.pop(_FIELD)
        if field not in arrays:
            others = sorted(set(arrays) - {*names.inputs, *names.labels})
            raise SimulationError(
                f"partition.field: no field {field!r}; beside inputs and labels the data have "
                f"{', '.join(others) or 'none'}"
            )
        what = arrays[field]
    try:
        parts = split(what, partition.clients, **options)
    except (DatasetError, TypeError, ValueError) as error:
        raise SimulationError(f"partition: {error}") from None
    # The rest, such as whose an example is, is nothing that devices read.
    return SplitClients({name: arrays[name] for name in (*names.inputs, *names.labels)}, parts)
