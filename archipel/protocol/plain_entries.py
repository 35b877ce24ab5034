"""How the update entries of a plain round lie in its safetensors file.

| entry | arrays |
|---|---|
| an ordinary one | itself |
| a rotation | NAME, uint8: its whole numbers of steps, in `bits` bits each (two's complement, protocol.bits) |
| the largest elements | NAME/places, uint32 `[most]`, which grow; NAME/values, float32 `[most]` |

A rotation's elements are whole steps already, so nothing is lost. The names, dtypes and shapes follow from the manifest
alone: every update of a layout has one size, and what a device sends decides no allocation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle.roles import Largest, Rotation, Update
from archipel.errors import MessageError, ProtocolError
from archipel.protocol.bits import pack_bits, packed_size, unpack_bits
from archipel.protocol.bounds import entries, largest, step

Arrays = Mapping[str, NDArray[Any]]
Spec = tuple[str, tuple[int, ...]]


def wire_specs(port: Update) -> dict[str, Spec]:
    """The dtype and shape of each array of an entry, by its name."""
    match port.carries:
        case Rotation():
            return {port.name: ("uint8", (packed_size(entries(port), port.bits),))}
        case Largest(most=most):
            places, values = _names(port)
            return {places: ("uint32", (most,)), values: ("float32", (most,))}
    return {port.name: (port.dtype, _shape(port))}


def to_wire(port: Update, array: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The arrays of an entry. Raises ProtocolError where more elements are not 0 than the entry may have."""
    match port.carries:
        case Rotation():
            whole = np.rint(np.asarray(array, np.float64).reshape(-1) / step(port))
            numbers = np.clip(whole, -largest(port), largest(port)).astype(np.int32).view(np.uint32)
            return {port.name: np.frombuffer(pack_bits(numbers, port.bits), np.uint8)}
        case Largest(most=most):
            flat = np.asarray(array, np.float32).reshape(-1)
            places = np.flatnonzero(flat)
            if places.size > most:
                raise ProtocolError(f"update {port.name!r}: {places.size} elements are not 0, it may have {most}")
            if places.size < most:
                # Filled up with zeros, so that every update has one size.
                free = np.ones(flat.size, bool)
                free[places] = False
                places = np.sort(np.concatenate([places, np.flatnonzero(free)[: most - places.size]]))
            names = _names(port)
            return {names[0]: places.astype(np.uint32), names[1]: flat[places]}
    return {port.name: array}


def from_wire(port: Update, arrays: Arrays) -> NDArray[Any]:
    """The entry, in its own shape. `arrays` have the dtypes and shapes of `wire_specs`. Raises MessageError."""
    here = f"update {port.name!r}"
    match port.carries:
        case Rotation():
            raw = np.asarray(arrays[port.name])
            left = raw.size * 8 - entries(port) * port.bits
            if left and int(raw[-1]) >> (8 - left):
                raise MessageError(f"{here}: what is left of its last byte is not 0")
            sign = np.uint32(32 - port.bits)
            numbers = (unpack_bits(raw, entries(port), port.bits) << sign).view(np.int32) >> np.int32(sign)
            if numbers.size and int(numbers.min()) < -largest(port):
                raise MessageError(f"{here}: has {int(numbers.min())} steps, at most {largest(port)} are allowed")
            return (numbers * step(port)).astype(np.float32).reshape(_shape(port))
        case Largest():
            places, values = (np.asarray(arrays[name]) for name in _names(port))
            size = entries(port)
            if places.size and (int(places[-1]) >= size or not (places[1:] > places[:-1]).all()):
                raise MessageError(f"{here}: its places must grow and be below {size}")
            dense = np.zeros(size, np.float32)
            dense[places] = values
            return dense.reshape(_shape(port))
    return arrays[port.name]


def _names(port: Update) -> tuple[str, str]:
    return f"{port.name}/places", f"{port.name}/values"


def _shape(port: Update) -> tuple[int, ...]:
    return tuple(int(dim) for dim in port.shape)
