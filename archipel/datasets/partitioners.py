"""Partitioners by name, as files of settings and command lines have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from archipel.datasets.label_partitions import split_labels, split_shards
from archipel.datasets.partitions import split_by, split_dirichlet, split_iid
from archipel.datasets.skewed_partitions import split_power_law, split_sizes, split_sorted
from archipel.errors import DatasetError

PARTITIONERS: Mapping[str, Callable[..., Sequence[NDArray[Any]]]] = {
    "iid": split_iid,
    "dirichlet": split_dirichlet,
    "by": split_by,
    "shards": split_shards,
    "labels": split_labels,
    "power_law": split_power_law,
    "sizes": split_sizes,
    "sorted": split_sorted,
}
"""The first argument's name says what a partitioner divides: `count`, `labels`, or else the values of a field."""
FIELD = "field"
"""The setting that names this field."""


def takes_field(how: str) -> bool:
    """Whether the partitioner called `how` divides by the values of a field."""
    return _divided(how) not in ("count", "labels")


def divide(
    how: str,
    devices: int | None,
    settings: Mapping[str, Any],
    *,
    count: int,
    labels: NDArray[Any] | None,
    fields: Mapping[str, NDArray[Any]],
    seed: int,
) -> Sequence[NDArray[Any]]:
    """The rows of each device.

    Arguments:
        how: one of PARTITIONERS.
        devices: the number of parts; None for "by": a part for each group.
        settings: arguments of the partitioner by name, and FIELD where it `takes_field`.
        count: the number of examples.
        labels: the examples' labels, None where they have none.
        fields: what else the examples have, by name.
        seed: where the settings have none.

    Raises DatasetError for examples that cannot be divided so, and for wrong settings.
    """
    given = {"seed": seed, **settings}
    what: Any = {"count": count, "labels": labels}.get(_divided(how))
    if takes_field(how):
        field = given.pop(FIELD)
        if field not in fields:
            has = ", ".join(sorted(fields)) or "none"
            raise DatasetError(f"no field {field!r}; beside inputs and labels the data have {has}")
        what = fields[field]
    if what is None:
        raise DatasetError(f"{how!r} divides by labels, and the data have none")
    try:
        return PARTITIONERS[how](what, devices, **given)
    except (TypeError, ValueError) as error:
        raise DatasetError(str(error)) from None


def _divided(how: str) -> str:
    return next(iter(inspect.signature(PARTITIONERS[how]).parameters))
