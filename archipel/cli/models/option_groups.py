"""The group of options that `compress` and `convert` share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import click

from archipel.cli.input_output.arrays import read_arrays
from archipel.cli.input_output.option_group import option_group
from archipel.cli.input_output.spelling import rule
from archipel.compression import StaticInt8
from archipel.compression.part import Part
from archipel.training.step_engines import ONNX_RUNTIME

DEFAULT_RECIPE: tuple[Part, ...] = (StaticInt8(),)
"""What `compress` does without a recipe, and `convert` with calibration data and no recipe."""

DATA_RULES = [
    rule(r"\bpass (data|calibration|validation)=(\([^)]*\)|inputs)?", r"give --\1 FILE"),
    rule(r"^(data|calibration|validation)(?=: )", r"--\1"),
    rule(r"pass them under 'label', or as the last array of a tuple$", "give an .npz with the entry 'label'"),
]
"""How errors spell the arguments that have the examples of `files`."""


@dataclasses.dataclass(frozen=True)
class CompressionOptions:
    """A recipe, the files that it works on, and where it keeps its progress."""

    data: Path | None
    calibration: Path | None
    validation: Path | None
    recipe: Path | None
    work: Path | None
    seed: int
    engine: str

    @property
    def compresses(self) -> bool:
        """Whether `convert` compresses: by a recipe, or to int8 with the calibration data."""
        return self.recipe is not None or self.calibration is not None

    @property
    def files(self) -> dict[Literal["data", "calibration", "validation"], Path | None]:
        """The files of examples, by the argument of `compress` that takes their arrays."""
        return {"data": self.data, "calibration": self.calibration, "validation": self.validation}

    def read_sets(self) -> dict[str, Any]:
        """The arrays of `files`, None for a file that was not given. Raises CommandError, OSError."""
        return {purpose: None if path is None else read_arrays(path) for purpose, path in self.files.items()}


def note_default_recipe() -> None:
    """Say on standard error which recipe takes the place of a missing one."""
    click.echo("no --recipe: static_int8 with its defaults", err=True)


compression_options = option_group(
    "compression",
    CompressionOptions,
    click.option("--data", type=click.Path(path_type=Path),
                 help="Training data: an .npz with an entry for each of the model's inputs (or x) and labels (y)."),
    click.option("--calibration", type=click.Path(path_type=Path),
                 help="Examples (.npz or .npy, labels optional) for the ranges of activations. Default: --data."),
    click.option("--validation", type=click.Path(path_type=Path), help="Labelled .npz on which accuracy is measured."),
    click.option("--recipe", type=click.Path(path_type=Path),
                 help="A recipe in TOML; `archipel compress --list` shows what it may have."),
    click.option("--work", type=click.Path(path_type=Path),
                 help="A folder for progress; after an interruption the same command continues from it."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of every random choice."),
    click.option("--engine", default=ONNX_RUNTIME, show_default=True, metavar="NAME[:DEVICE]",
                 help="What trains: onnxruntime, or torch on its best device, torch:cpu, torch:cuda:1 ..."),
)  # fmt: skip
