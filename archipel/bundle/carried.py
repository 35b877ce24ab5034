"""The rules of a manifest about update entries that carry the changes of parameters in another form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from archipel.bundle.roles import Broadcast, Hyperparameter, Largest, LowRank, Program, Rotation, Update
from archipel.errors import ManifestError

if TYPE_CHECKING:
    from archipel.bundle.manifest import TensorSpec

UPDATE_SEED = "update_seed"
"""The hyperparameter of `finish` with the public seed of the round's random rotation."""
LEFT, RIGHT = "low_rank/left/", "low_rank/right/"
"""Prefixes of the names of the bases that the server sends for the factors of a parameter."""
MOST_SEED = float((1 << 24) - 1)
"""Up to here float32 holds every whole number."""
MOST_BLOCK = 1 << 16
"""The largest block of a rotation."""


def validate_carried(where: str, program: Program, parameters: Mapping[str, TensorSpec]) -> None:
    """Check the update entries that carry others' changes. Raises ManifestError."""
    updates = [port for port in program.outputs if isinstance(port, Update)]
    taken = {port.tensor for port in updates if port.carries is None}
    for port in updates:
        if port.carries is None:
            continue
        here = f"{where}: update {port.name!r}"
        if program.kind != "finish" or port.kind != "delta" or port.clip is None or port.noise:
            raise ManifestError(f"{here}: only a clipped delta of finish without noise carries the changes of others")
        if port.tensor in parameters:
            raise ManifestError(f"{here}: its tensor {port.tensor!r} is a parameter, and it carries others' changes")
        for name in port.carries.parameters:
            if name not in parameters or parameters[name].dtype != "float32":
                raise ManifestError(f"{here}: carries {name!r}, which is not a float32 parameter of the bundle")
            if name in taken:
                raise ManifestError(f"{here}: the change of {name!r} is uploaded twice")
            taken.add(name)
        size = sum(math.prod(int(dim) for dim in parameters[name].shape) for name in port.carries.parameters)
        _validate_shape(here, port, size)
        if isinstance(port.carries, Rotation):
            _validate_seed(here, program)
        if isinstance(port.carries, LowRank):
            _validate_bases(here, port, program, parameters)


def _validate_shape(here: str, port: Update, size: int) -> None:
    match port.carries:
        case Rotation(block=block, taken=taken):
            if not 1 <= block <= MOST_BLOCK or block & (block - 1):
                raise ManifestError(f"{here}: block must be a power of two up to {MOST_BLOCK}, is {block}")
            rows = -(-size // block)
            if not 0 <= taken < max(rows * block, 1):
                raise ManifestError(f"{here}: takes {taken} of {rows * block} elements")
            shape: tuple[int, ...] = (taken,) if taken else (rows, block)
        case Largest(most=most):
            if not 1 <= most <= size:
                raise ManifestError(f"{here}: most must be from 1 to {size}, is {most}")
            shape = (size,)
        case _:  # `_validate_bases` does it
            return
    if not size or tuple(port.shape) != shape:
        raise ManifestError(f"{here}: {size} elements have the shape {list(shape)} there, not {list(port.shape)}")


def _validate_seed(here: str, program: Program) -> None:
    seeds = [each for each in program.inputs if isinstance(each, Hyperparameter) and each.name == UPDATE_SEED]
    if not seeds or not (seeds[0].minimum == 0 and seeds[0].maximum == MOST_SEED):
        raise ManifestError(f"{here}: needs the hyperparameter {UPDATE_SEED!r}, from 0 to {MOST_SEED:g}")


def _validate_bases(here: str, port: Update, program: Program, parameters: Mapping[str, TensorSpec]) -> None:
    names = port.carries.parameters if port.carries else ()
    if len(names) != 1 or len(parameters[names[0]].shape) < 2:
        raise ManifestError(f"{here}: carries the factors of one matrix, not {list(names)}")
    rows, *others = (int(dim) for dim in parameters[names[0]].shape)
    columns, rank = math.prod(others), int(port.shape[-1]) if len(port.shape) == 2 else 0
    if not 1 <= rank <= min(rows, columns) or tuple(port.shape) != (rows + columns, rank):
        raise ManifestError(f"{here}: factors of a matrix [{rows}, {columns}] have no shape {list(port.shape)}")
    bases = {each.tensor: tuple(each.shape) for each in program.inputs if isinstance(each, Broadcast)}
    if bases.get(LEFT + names[0]) != (rows, rank) or bases.get(RIGHT + names[0]) != (columns, rank):
        raise ManifestError(f"{here}: the program reads no bases of {names[0]!r} of rank {rank} as broadcasts")
