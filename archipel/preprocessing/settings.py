"""Transforms from settings: tables of TOML, each with the `kind` of a transform and its fields."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from archipel.errors import PreprocessingError
from archipel.library_errors import one_line
from archipel.preprocessing.augmentation import RandomFlip, RandomGain, RandomMask, RandomNoise, RandomShift
from archipel.preprocessing.layout import Layout
from archipel.preprocessing.numbers import Average, Cast, Clip, Normalize, OneHot, Scale, Standardize
from archipel.preprocessing.pictures import CropOrPad, Greyscale
from archipel.preprocessing.raw import Raw
from archipel.preprocessing.resize import Resize, ResizeShorter
from archipel.preprocessing.sound import LogMel, Mfcc, Preemphasis, Spectrogram
from archipel.preprocessing.transform import Transform, kind_of
from archipel.preprocessing.windows import Frames

TRANSFORMS: tuple[type[Transform], ...] = (
    Raw, Cast, Scale, Normalize, Clip, Standardize, Average, OneHot, Layout, Resize, ResizeShorter, CropOrPad,
    Greyscale, Frames, Preemphasis, Spectrogram, LogMel, Mfcc,
    RandomFlip, RandomShift, RandomGain, RandomNoise, RandomMask,
)  # fmt: skip
"""Every kind of transform. In settings `CropOrPad` is called "crop_or_pad"."""

TABLE = "preprocess"
"""What the list of tables is called in files: [[preprocess]]."""

_LONGEST = 64


def from_settings(tables: object) -> list[Transform]:
    """Transforms from a list of tables, decoded strictly.

    Arguments:
        tables: as `tomllib` reads [[preprocess]]: [{"kind": "raw", "dtype": "uint8", ...}, {"kind": "scale"}, ...].

    Raises PreprocessingError that names the entry, counted from 1, its kind and the field.

    Example:
        transforms = from_settings([{"kind": "raw", "dtype": "int16", "shape": ["batch", 16000]}, {"kind": "log_mel"}])
    """
    if isinstance(tables, str | Mapping) or not isinstance(tables, Sequence):
        raise PreprocessingError(f"[[{TABLE}]]: expected a list of tables, got {type(tables).__name__}")
    if len(tables) > _LONGEST:
        raise PreprocessingError(f"[[{TABLE}]]: {len(tables)} entries, more than {_LONGEST}")
    return [_transform(number, table) for number, table in enumerate(tables, start=1)]


def load_settings(path: str | os.PathLike[str]) -> list[Transform]:
    """Transforms from a TOML file of [[preprocess]] tables. Raises PreprocessingError that names the file and entry.

    Example:
        prepare = chain(load_settings("preprocess.toml"))
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PreprocessingError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PreprocessingError(f"{path}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise PreprocessingError(f"{path}: not TOML: {one_line(error)}") from None
    tables = content.pop(TABLE, None)
    if content or not tables:
        extra = f"; unknown: {', '.join(map(repr, content))}" if content else ""
        raise PreprocessingError(f"{path}: expected a list of [[{TABLE}]] tables, each with a kind{extra}")
    try:
        return from_settings(tables)
    except PreprocessingError as error:
        raise PreprocessingError(f"{path}: {error}") from None


def _transform(number: int, table: object) -> Transform:
    if not isinstance(table, Mapping):
        raise PreprocessingError(f"[[{TABLE}]] {number}: expected a table with a kind, got {type(table).__name__}")
    kinds: dict[str, Any] = {kind_of(kind.__name__): kind for kind in TRANSFORMS}
    kind = kinds.get(str(table.get("kind", "")))
    if kind is None:
        raise PreprocessingError(f"[[{TABLE}]] {number}: kind is one of {', '.join(kinds)}")
    try:
        return msgspec.convert(dict(table), kind)  # type: ignore[no-any-return]
    except (msgspec.ValidationError, PreprocessingError) as error:
        text = str(error).removeprefix(f"{table['kind']}: ")
        raise PreprocessingError(f"[[{TABLE}]] {number} ({table['kind']}): {text}") from None
