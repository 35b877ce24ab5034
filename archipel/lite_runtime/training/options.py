"""The options of a fit and of a round: one struct each, checked once and then passed on as a whole.

The structs are plain data: a child process gets the struct that its parent checked, and a checkpoint's fingerprint
covers the options that determine the result. Arrays, callbacks and the control are passed beside them (calls.py).
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
"""The characters of a wrong value that an error shows."""

# A field's description ends the error's sentence "NAME must be ...".
_Count = Annotated[int, Meta(ge=1, le=2**63 - 1, description="a whole number of at least 1 (and below 2**63)")]
_Flag = Annotated[bool, Meta(description="True or False")]
_Numbers = Annotated[dict[str, float], Meta(description="numbers by name, such as {'lr': 0.1}")]
_Seed = Annotated[int, Meta(ge=0, le=MAX_SEED, description=f"from 0 to {MAX_SEED} (a whole number)")]


class FitOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a fit trains; `check_options` makes one from a caller's keywords."""

    epochs: _Count = 1
    """Passes over all examples."""

    batch_size: _Count = 32
    """Examples for one step."""

    shuffle: _Flag = True
    """Whether every pass has an order of its own, which follows from `seed`; else all have that of the arrays."""

    seed: _Seed = 0
    """Determines the order and all random numbers in the program."""

    hyperparameters: _Numbers = {}
    """Values other than the program's defaults; names and bounds are those that the bundle declares."""

    program: Annotated[str | None, Meta(description="the name of a train program, or None")] = None
    """The train program; None: the only one, or the one called "train"."""

    moves: Annotated[tuple[str, ...] | None, Meta(description="a sequence of names of tensors, or None")] = None
    """The parameters and personal tensors that take their new values; None: all that the program writes."""

    checkpoint: Annotated[str | None, Meta(description="the path of a file, or None")] = None
    """The file from which an interrupted fit continues; None: an interrupted fit is lost."""

    checkpoint_every: Annotated[float, Meta(ge=0, description="a number of seconds, 0 or more")] = 30.0
    """Seconds after which the checkpoint is written again; 0: after every step."""

    feature_cache: _Flag = True
    """Whether a frozen backbone's outputs are kept, if the bundle has a `features` program."""

    def deciding(self) -> dict[str, object]:
        """The options, beside those of the phase, that determine the result: a checkpoint's fingerprint covers them."""
        return {"shuffle": self.shuffle, "seed": self.seed, "hyperparameters": self.hyperparameters}


class RoundOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a device's part of a round trains; the bundle's schedule says the rest."""

    seed: _Seed
    """Determines the order and all random numbers in the programs."""

    hyperparameters: _Numbers = {}
    """Values other than the programs' defaults; names and bounds are those that the bundle declares."""


Options = TypeVar("Options", FitOptions, RoundOptions)


def check_options(kind: type[Options], call: str, given: Mapping[str, object]) -> Options:
    """Check the keywords that `call` was given, and return them as one struct.

    Converts NumPy's numbers, paths, mappings and collections to Python's own. Raises RuntimeInputError, which names the
    first wrong option, what it must be, and what it is.
    """
    plain = {name: _plain(value) for name, value in given.items()}
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        # msgspec tells a path such as `$.epochs`; look for the option, to name it in the caller's words.
        for field in msgspec.structs.fields(kind):
            if field.name in plain and not _fits(plain[field.name], field.type):
                [meta] = field.type.__metadata__
                text = repr(given[field.name])
                text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
                raise RuntimeInputError(f"{call}: {field.name} must be {meta.description}, got {text}") from None
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
