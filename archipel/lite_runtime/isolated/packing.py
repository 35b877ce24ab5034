"""Packs a call's arrays into one flat mapping for a child process, and back: `NAME` or `NAME/KEY`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from archipel.bundle import Bundle
from archipel.bundle.manifest import ITEM_BYTES
from archipel.errors import RuntimeInputError
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.learned import join_names
from archipel.lite_runtime.training.calls import FitData, RoundData

Arrays = Mapping[str, np.ndarray]


def pack(where: str, name: str, value: object) -> dict[str, np.ndarray]:
    """{name: value} for an array, {name/KEY: value} for a mapping, {} for None. Raises RuntimeInputError."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {f"{name}/{key}": _check_array(where, f"{name}[{key!r}]", array) for key, array in value.items()}
    return {name: _check_array(where, name, value)}


def unpack(name: str, arrays: Arrays) -> Any:
    """Inverse of `pack`, for a value that is not None."""
    return arrays[name] if name in arrays else group(name, arrays)


def group(name: str, arrays: Arrays) -> dict[str, np.ndarray]:
    """The arrays called `name`/KEY, by KEY."""
    return {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}


def pack_fit(data: FitData) -> dict[str, np.ndarray]:
    """Arrays `x`, `y`, `broadcast/NAME`, and of the validation `vx` and `vy`. Raises RuntimeInputError."""
    vx, vy = (None, None) if data.validation is None else data.validation
    return {
        **pack("fit", "x", data.x),
        **pack("fit", "y", data.y),
        **pack("fit", "broadcast", dict(data.broadcast or {})),
        **pack("fit: validation", "vx", vx),
        **pack("fit: validation", "vy", vy),
    }


def unpack_fit(arrays: Arrays, validation: bool) -> FitData:
    """Inverse of `pack_fit`; `validation` says whether the fit has validation data."""
    return FitData(
        unpack("x", arrays),
        arrays.get("y"),
        validation=(unpack("vx", arrays), arrays.get("vy")) if validation else None,
        broadcast=group("broadcast", arrays),
    )


def pack_round(data: RoundData) -> dict[str, np.ndarray]:
    """Arrays `x`, `y`, `broadcast/NAME` and `parameter/NAME`. Raises RuntimeInputError."""
    return {
        **pack("local_round", "x", data.x),
        **pack("local_round", "y", data.y),
        **pack("local_round", "broadcast", dict(data.broadcast or {})),
        **pack("local_round", "parameter", None if data.parameters is None else dict(data.parameters)),
    }


def unpack_round(arrays: Arrays, given: bool) -> RoundData:
    """Inverse of `pack_round`; `given` says whether the caller gave parameters."""
    return RoundData(
        unpack("x", arrays),
        arrays.get("y"),
        parameters=group("parameter", arrays) if given else None,
        broadcast=group("broadcast", arrays),
    )


def pack_learned(bundle: Bundle, parameters: Arrays, state: DeviceState) -> dict[str, np.ndarray]:
    """All that was learned: `parameter/NAME` if it is not the bundle's own, `personal/NAME`, `state/NAME`."""
    # By identity: the child maps the published tensors itself, and comparing values would read all of them.
    published = bundle.parameters()
    moved = {name: array for name, array in parameters.items() if array is not published[name]}
    return join_names({"parameter": moved, "personal": state.personal, "state": state.state})


def _check_array(where: str, name: str, value: object) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise RuntimeInputError(f"{where}: {name} must be a numpy array, got {type(value).__name__}")
    # The raw bytes are sent, so big-endian arrays would arrive as other numbers.
    if value.dtype.name not in ITEM_BYTES or not value.dtype.isnative:
        raise RuntimeInputError(f"{where}: {name} has dtype {value.dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
    return value
