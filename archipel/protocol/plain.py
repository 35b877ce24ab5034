"""Updates of rounds with privacy "plain": safetensors with the arrays of each update output, checked before they count.

The checks are of the bounds that the bundle's signed manifest states, from which both sides derive them: names, dtypes,
shapes, finite numbers, each entry within its range, norms within clip times weight (protocol.bounds).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle import read_weights, write_weights
from archipel.bundle.roles import CHANGES, Update
from archipel.errors import BoundError, BundleError, MessageError
from archipel.protocol.bounds import SLACK, check_update, clamp
from archipel.protocol.plain_entries import from_wire, to_wire, wire_specs
from archipel.protocol.vector import DecodedSum, Layout

Arrays = dict[str, NDArray[Any]]


def encode_plain(layout: Layout, arrays: Mapping[str, NDArray[Any]], scale: float = 1.0) -> bytes:
    """The update's bytes: the arrays (by output name) with every entry clamped to its range, changes times `scale`.

    Raises ProtocolError for a missing, unknown or misshapen array, and for NaN or infinity; BoundError where the arrays
    exceed the norms that the manifest states.
    """
    checked = layout.to_send(arrays)
    limits = clamp(layout.updates, checked)
    sent: Arrays = {}
    for port in layout.updates:
        factor, limit = scale if port.kind in CHANGES else 1.0, limits[port.name]
        sent |= to_wire(port, np.clip(checked[port.name] * factor, -limit, limit).astype(port.dtype))
    return write_weights(sent)


def plain_size(layout: Layout) -> int:
    """The number of bytes of every plain update of this layout."""
    # Safetensors has one encoding of given names, dtypes and shapes, whatever the values are.
    specs = {name: spec for port in layout.updates for name, spec in wire_specs(port).items()}
    return len(write_weights({name: np.zeros(shape, dtype) for name, (dtype, shape) in specs.items()}))


def decode_plain(source: bytes | Path, layout: Layout) -> Arrays:
    """The arrays by output name, checked. Raises MessageError that names the entry and what is wrong with it."""
    try:
        sent = read_weights(source)
    except BundleError as error:
        where, _, what = str(error).rpartition(": ")
        raise MessageError(f"update: {what or where}") from None
    specs = {name: spec for port in layout.updates for name, spec in wire_specs(port).items()}
    if sent.keys() != specs.keys():
        raise MessageError(f"update: has the arrays {sorted(sent)[:16]}, expected {sorted(specs)[:16]}")
    for name, (dtype, shape) in specs.items():
        if sent[name].dtype.name != dtype or sent[name].shape != shape:
            got = f"{sent[name].dtype}{list(sent[name].shape)}"
            raise MessageError(f"update {name!r}: expected {dtype}{list(shape)}, got {got}")
    ports = {port.name: port for port in layout.updates}
    arrays = {port.name: from_wire(port, sent) for port in layout.updates}
    # First finite numbers, which `check_update` relies on.
    for name, array in arrays.items():
        _check_array(ports[name], array, ports[name].range)
    try:
        check_update(layout.updates, arrays)
        layout.check_counts(arrays)
    except BoundError as error:
        raise MessageError(str(error)) from None
    # The weight is checked by now, so it can bound the values that were multiplied with it.
    for name, limit in clamp(layout.updates, arrays).items():
        _check_array(ports[name], arrays[name], limit)
    return arrays


def _check_array(port: Update, array: NDArray[Any], limit: float) -> None:
    if array.size:
        largest = float(np.abs(array).max())
        # Negated, because no comparison with a NaN is true.
        if not largest <= limit * (1 + SLACK) + 1e-12:
            raise MessageError(f"update {port.name!r}: an entry of {largest} is not a number up to {limit}")


@dataclass
class PlainSum:
    """The running sum of updates, float64 by output name."""

    layout: Layout
    arrays: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for port in self.layout.updates:
            self.arrays.setdefault(port.name, np.zeros(tuple(map(int, port.shape)), np.float64))

    def add(self, update: Mapping[str, NDArray[Any]], scale: float = 1.0) -> None:
        """Add one decoded update, its changes times `scale`: a stale update counts less."""
        for port in self.layout.updates:
            part = update[port.name]
            if port.kind in CHANGES and scale != 1.0:
                # Not a Python float, with which NumPy would compute the product in float32.
                part = part * np.float64(scale)
            self.arrays[port.name] += part

    def decoded(self) -> DecodedSum:
        """The sums by tensor name, as strategies take them."""
        return DecodedSum.of({port: self.arrays[port.name] for port in self.layout.updates})

    def encode(self) -> bytes:
        return write_weights(self.arrays)

    @classmethod
    def decode(cls, data: bytes, layout: Layout) -> PlainSum:
        """The inverse of `encode`. Raises MessageError."""
        try:
            arrays = {name: np.array(array, np.float64) for name, array in read_weights(data).items()}
        except BundleError as error:
            raise MessageError(f"sum: {error}") from None
        shapes = {port.name: tuple(map(int, port.shape)) for port in layout.updates}
        if {name: array.shape for name, array in arrays.items()} != shapes:
            raise MessageError("sum: its arrays are not those of this round's updates")
        return cls(layout, arrays)
