"""What a caller may choose for a fit or a round: one struct each, checked once and then carried whole.

The structs are plain data: a child process gets the very struct that its parent checked, and a checkpoint belongs to
the fit whose options decide the same result. Arrays, callbacks and the control go beside them (calls.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from archipel.errors import RuntimeInputError

MAX_SEED = 2**32 - 1
_SHOWN = 120
"""So many characters of a wrong value are shown."""

# A field's description says what it must be: it is the end of the sentence that an error tells.
_Count = Annotated[int, Meta(ge=1, le=2**63 - 1, description="a whole number of at least 1 (and below 2**63)")]
_Flag = Annotated[bool, Meta(description="True or False")]
_Numbers = Annotated[dict[str, float], Meta(description="numbers by name, such as {'lr': 0.1}")]
_Seed = Annotated[int, Meta(ge=0, le=MAX_SEED, description=f"from 0 to {MAX_SEED} (a whole number)")]


class FitOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a fit trains; `check_options` makes one of a caller's keywords."""

    epochs: _Count = 1
    """Passes over all examples."""

    batch_size: _Count = 32
    """Examples for one step."""

    shuffle: _Flag = True
    """Whether every pass has an order of its own, which follows from `seed`; else all have that of the arrays."""

    seed: _Seed = 0
    """Of the order and of everything random in the program."""

    hyperparameters: _Numbers = {}
    """Values other than the program's defaults; names and bounds are those that the bundle declares."""

    program: Annotated[str | None, Meta(description="the name of a train program, or None")] = None
    """The train program; None: the only one, or the one called "train"."""

    moves: Annotated[tuple[str, ...] | None, Meta(description="a sequence of names of tensors, or None")] = None
    """The parameters and personal tensors that take their new values; None: all that the program writes."""

    checkpoint: Annotated[str | None, Meta(description="the path of a file, or None")] = None
    """The file that an interrupted fit goes on from; None: an interrupted fit is lost."""

    checkpoint_every: Annotated[float, Meta(ge=0, description="a number of seconds, 0 or more")] = 30.0
    """Seconds after which the checkpoint is written again; 0: after every step."""

    feature_cache: _Flag = True
    """Whether what a frozen backbone makes of an example is kept, where the bundle has a `features` program."""

    def deciding(self) -> dict[str, object]:
        """Those that decide what is learned, beside the phase: a checkpoint belongs to a fit with the same ones."""
        return {"shuffle": self.shuffle, "seed": self.seed, "hyperparameters": self.hyperparameters}


class RoundOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a device's part of a round trains; all else is in the bundle's schedule."""

    seed: _Seed
    """Of the order and of everything random in the programs."""

    hyperparameters: _Numbers = {}
    """Values other than the programs' defaults; names and bounds are those that the bundle declares."""


Options = TypeVar("Options", FitOptions, RoundOptions)


def check_options(kind: type[Options], call: str, given: Mapping[str, object]) -> Options:
    """The keywords that `call` was given, as one struct.

    NumPy's numbers, paths, and any mapping or collection are taken for Python's own. Raises RuntimeInputError that
    names the first option that is wrong, says what it must be, and what came.
    """
    plain = {name: _plain(value) for name, value in given.items()}
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        for field in msgspec.structs.fields(kind):
            if field.name in plain and not _fits(plain[field.name], field.type):
                [meta] = field.type.__metadata__
                came = repr(given[field.name])
                came = came if len(came) <= _SHOWN else f"{came[:_SHOWN]} ..."
                raise RuntimeInputError(f"{call}: {field.name} must be {meta.description}, got {came}") from None
        raise RuntimeInputError(f"{call}: {error}") from None


def _fits(value: object, kind: object) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return tuple(map(_plain, value))
    return value
