"""The options of `archipel convert` for what is settled of the model before anything else: fixed inputs, loops, and the
transforms of raw inputs in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from archipel.cli.input_output.arrays import read_arrays
from archipel.cli.input_output.option_group import option_group
from archipel.converter.sources import read_model
from archipel.datasets import Dataset, Stream, as_dataset
from archipel.datasets.entry_names import name_entries
from archipel.errors import CommandError
from archipel.graph import Model
from archipel.preprocessing import Normalize, describe, fitted, load_settings, put_before
from archipel.preprocessing.description import text_of


@dataclass(frozen=True)
class ModelOptions:
    """`fixed`: NAME=NUMBER texts of inputs and free sizes; `limit_loops`: the most iterations of loops without a
    bound; `preprocess`: a file of transforms, `preprocess_data`: one of raw examples to measure on."""

    fixed: tuple[str, ...]
    limit_loops: int | None
    preprocess: Path | None
    preprocess_data: Path | None

    def settle(self, source: Path | Model) -> Path | Model:
        """The source as it is if nothing is given, else its model with all of this. Raises ArchipelError."""
        if self.preprocess_data is not None and self.preprocess is None:
            raise CommandError("--preprocess-data goes with --preprocess")
        if not self.fixed and self.limit_loops is None and self.preprocess is None:
            return source
        model = source if isinstance(source, Model) else read_model(source, None)
        names = {port.name for port in model.inputs}
        given = dict(map(_number, self.fixed))
        values = {name: number for name, number in given.items() if name in names}
        sizes = {name: _whole(name, number) for name, number in given.items() if name not in names}
        if given:
            model = model.fix(values, sizes)
        model = model if self.limit_loops is None else model.limit_loops(self.limit_loops)
        return model if self.preprocess is None else self._prepared(model, self.preprocess)

    def _prepared(self, model: Model, file: Path) -> Model:
        if described := describe(model):
            raise CommandError(
                f"--preprocess {file}: the model prepares raw inputs already ({text_of(described)}); leave it out"
            )
        transforms = load_settings(file)
        if self.preprocess_data is not None:
            transforms = fitted(transforms, _examples(self.preprocess_data, [info.name for info in model.inputs]))
        elif any(isinstance(part, Normalize) and not part.mean for part in transforms):
            raise CommandError(
                f"--preprocess {file}: normalize has no mean and std; write them into the file, or give raw "
                "examples to measure them on, --preprocess-data DATA"
            )
        return put_before(model, transforms)


def _examples(path: Path, inputs: Sequence[str]) -> np.ndarray | dict[str, np.ndarray] | Dataset | Stream:
    """What `fitted` takes: the arrays of a file of NumPy's that the model reads, or a data set of anything else."""
    if path.suffix not in (".npy", ".npz"):
        return as_dataset(path)
    arrays = read_arrays(path)
    if isinstance(arrays, np.ndarray):
        return arrays
    entries = name_entries(arrays, inputs, [])
    return {name: entries[name] for name in inputs if name in entries}


def _number(text: str) -> tuple[str, int | float]:
    name, equals, value = text.rpartition("=")
    convert: Callable[[str], int | float]
    for convert in (int, float) if equals and name else ():
        try:
            return name, convert(value)
        except ValueError:
            continue
    raise CommandError(f"--fix {text}: give NAME=NUMBER, an input or a free size of the model and its value")


def _whole(name: str, number: float) -> int:
    if not isinstance(number, int):
        raise CommandError(f"--fix {name}={number}: no input has this name, and a size is a whole number")
    return number


model_options = option_group(
    "model_settings",
    ModelOptions,
    click.option("--fix", "fixed", multiple=True, metavar="NAME=NUMBER",
                 help="Give an input one value for good, such as a sampling rate or a state of zeros, or a free size a "
                 "number; may be given several times. Branches that this decides go."),
    click.option("--limit-loops", type=click.IntRange(1), metavar="N",
                 help="Stop loops that only their condition ends after N iterations."),
    click.option("--preprocess", type=click.Path(path_type=Path), metavar="FILE.toml",
                 help="Put transforms of raw inputs (bytes of pictures, 16-bit sound) in front of the model, so that "
                 "devices take these: [[preprocess]] tables, see docs/preprocessing.md."),
    click.option("--preprocess-data", type=click.Path(path_type=Path), metavar="DATA",
                 help="Raw examples on which normalize without mean and std is measured: .npy, .npz, or what "
                 "`archipel data inspect` reads, such as a folder of pictures."),
)  # fmt: skip
