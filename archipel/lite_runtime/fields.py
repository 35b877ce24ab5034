"""Checks the caller's arrays against the ports that will read them, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from archipel.bundle.roles import Example, ExampleWeight, Feature, Label, Port
from archipel.errors import RuntimeInputError, RuntimeProgramError

FIELD_ROLES = (Example, Label, ExampleWeight)
BATCH_ROLES = (*FIELD_ROLES, Feature)
"""The roles whose first axis is the batch; the runtime itself makes the values of `Feature`."""


class Source(Protocol):
    """Gives the rows of a batch; `shape` is [examples, ...]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def take(self, indices: np.ndarray, out: np.ndarray) -> None:
        """Write the rows `indices` into `out`, [len(indices), ...]."""


class ArraySource:
    """The rows of an array in memory."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape = array.shape

    def take(self, indices: np.ndarray, out: np.ndarray) -> None:
        # With mode="clip" NumPy writes straight into `out`; with "raise" it fills a buffer first. Indices are in range.
        np.take(self._array, indices, axis=0, out=out, mode="clip")


class Fields:
    """Local data: arrays by field name with the same number of examples, `count`, on their first axis.

    `sources` has a Source for each field; FeatureCache adds those of features.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], count: int) -> None:
        self.arrays = dict(arrays)
        self.count = count
        self.sources: dict[str, Source] = {name: ArraySource(array) for name, array in arrays.items()}


def collect(
    where: str,
    ports: Iterable[Port],
    x: np.ndarray | Mapping[str, np.ndarray],
    y: np.ndarray | None = None,
) -> Fields:
    """Give the arrays their field names and check each against its port.

    `x` is a mapping from field name to array, or the array of the only example field; `y` is the array of the only
    label field. Fields that no port reads are ignored. Raises RuntimeInputError.
    """
    ports = list(ports)
    given = _name_arrays(where, ports, x, y)
    dims: dict[str, tuple[int, str]] = {}
    count: int | None = None
    arrays: dict[str, np.ndarray] = {}
    for port in ports:
        array = given.get(port.name)
        if array is None:
            # The runtime fills in weights of 1.
            if isinstance(port, ExampleWeight):
                continue
            names = ", ".join(sorted(given)) or "nothing"
            raise RuntimeInputError(f"{where}: field {port.name!r} ({describe(port)}) is missing; given: {names}")
        # The data have any number of examples, whatever batch size the graph is made for.
        check_array(where, port, array, dims, free_batch=True)
        if not port.shape:
            raise RuntimeInputError(f"{where}: field {port.name!r} has no batch axis in the manifest")
        if count is None:
            count = array.shape[0]
        elif array.shape[0] != count:
            raise RuntimeInputError(
                f"{where}: field {port.name!r} has {array.shape[0]} examples, the fields before it have {count}"
            )
        arrays[port.name] = array
    if count == 0:
        raise RuntimeInputError(f"{where}: no examples; give at least one")
    return Fields(arrays, count or 0)


def check_array(
    where: str,
    port: Port,
    array: object,
    dims: dict[str, tuple[int, str]] | None = None,
    free_batch: bool = False,
) -> None:
    """Raises RuntimeInputError unless `array` has the port's dtype and shape.

    `dims` collects the sizes of symbolic dimensions over several calls, so that equal symbols must have equal sizes;
    `free_batch` skips the first axis.
    """
    if not isinstance(array, np.ndarray):
        raise RuntimeInputError(
            f"{where}: {port.name!r} must be a numpy array ({describe(port)}), got {type(array).__name__}"
        )
    if array.dtype.name != port.dtype or not array.dtype.isnative:
        one_hot = port.dtype.startswith("int") and array.dtype.kind == "f" and array.ndim == len(port.shape) + 1
        hint = (
            "give the number of the class, .argmax(axis=-1)" if one_hot else f"convert it with .astype({port.dtype!r})"
        )
        raise _mismatch(where, port, array, f"; {hint}")
    if array.ndim != len(port.shape):
        raise _mismatch(where, port, array, shape_hint(port, array.shape) if free_batch else "")
    for axis, (expected, size) in enumerate(zip(port.shape, array.shape)):
        if free_batch and axis == 0:
            continue
        if isinstance(expected, int):
            if size != expected:
                hint = shape_hint(port, array.shape) if free_batch else ""
                raise _mismatch(where, port, array, f" (axis {axis} differs){hint}")
        elif dims is not None:
            before, owner = dims.setdefault(expected, (size, port.name))
            if size != before:
                raise _mismatch(where, port, array, f" ({expected} = {before} in {owner!r})")


def shape_hint(port: Port, shape: tuple[int, ...]) -> str:
    """What makes an array of this shape one that the port takes, with "; " before it; empty: nothing simple does.

    It knows one example without the axis of examples, a missing axis of length 1, and channels that come last.
    """
    if _fits(port, (1, *shape)):
        return "; add the batch axis with x[None]"
    for axis in range(1, len(shape) + 1):
        if _fits(port, (*shape[:axis], 1, *shape[axis:])):
            return f"; add the missing axis with numpy.expand_dims(x, {axis})"
    if len(shape) > 2 and _fits(port, (shape[0], shape[-1], *shape[1:-1])):
        return "; put the last axis, the channels, behind the first with numpy.moveaxis(x, -1, 1)"
    return ""


def _fits(port: Port, shape: tuple[int, ...]) -> bool:
    pairs = zip(port.shape[1:], shape[1:])
    return len(shape) == len(port.shape) and all(not isinstance(dim, int) or dim == size for dim, size in pairs)


def fixed_rows(ports: Iterable[Port]) -> int | None:
    """The fixed number of rows of a graph with these fields, None if it takes any number.

    Raises RuntimeProgramError if two fields differ.
    """
    sizes = sorted({port.shape[0] for port in ports if port.shape and isinstance(port.shape[0], int)})
    if len(sizes) > 1:
        raise RuntimeProgramError(f"fields of one program have batch axes of different sizes: {sizes}")
    return sizes[0] if sizes else None


def describe(port: Port) -> str:
    """The port's dtype and shape, such as float32[batch, 1, 28, 28]."""
    return f"{port.dtype}[{', '.join(str(dim) for dim in port.shape)}]"


def _mismatch(where: str, port: Port, array: np.ndarray, hint: str) -> RuntimeInputError:
    got = f"{array.dtype.name}{list(array.shape)}"
    return RuntimeInputError(f"{where}: {port.name!r} must be {describe(port)}, got {got}{hint}")


def _name_arrays(
    where: str,
    ports: list[Port],
    x: np.ndarray | Mapping[str, np.ndarray],
    y: np.ndarray | None,
) -> dict[str, np.ndarray]:
    given: dict[str, np.ndarray] = {}
    if isinstance(x, Mapping):
        given.update(x)
    else:
        given[_only_field(where, ports, Example, "x")] = x
    if y is not None:
        given[_only_field(where, ports, Label, "y")] = y
    return given


def _only_field(where: str, ports: list[Port], role: type[Port], argument: str) -> str:
    names = [port.name for port in ports if isinstance(port, role)]
    if len(names) != 1:
        raise RuntimeInputError(
            f"{where}: an array as {argument} needs exactly one field of that role, the program has {names or 'none'}; "
            "give a mapping from field name to array as x"
        )
    return names[0]
