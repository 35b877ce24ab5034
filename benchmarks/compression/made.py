"""What is made of a float model by a recipe, and what is measured of each file: size, FLOPs, right answers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cells import Cells, digest
from control import control_parts
from evaluation import predictions, right
from recipe_files import recipe_text
from subjects import Subject, sizes

from archipel import Model
from archipel.compression import CompressedModel, compress, parse_recipe
from archipel.compression.recipe import write_recipe
from archipel.compression.stored import read_stored
from archipel.graph.flops import flops_per_example

Facts = dict[str, Any]
"""JSON-able: `files` in `Subject.made`, their `digest`, `bytes` and `zipped` together, `correct` of evaluation.py."""


def float_facts(subject: Subject, cells: Cells) -> Facts:
    """Of the float model as a device runs it."""
    return cells.get(f"{subject.title} float", {"model": subject.digest}, lambda: onnx_facts(subject, subject.deployed))


def compressed_facts(subject: Subject, scheme: str, cells: Cells) -> Facts:
    """Of what a recipe makes, with `validation`: accuracy in percent before and after.

    Raises ArchipelError where the recipe cannot be applied.
    """
    text = recipe_text(scheme, subject.name)
    key = {"model": subject.digest, "recipe": text, "seed": subject.seed}
    return cells.get(f"{subject.title} {scheme}", key, partial(_compressed, subject, scheme, text))


def control_facts(subject: Subject, scheme: str, cells: Cells) -> Facts:
    """As `compressed_facts`, of the float model after the training of that recipe and nothing else of it."""
    text = write_recipe(control_parts(parse_recipe(recipe_text(scheme, subject.name))))
    key = {"model": subject.digest, "recipe": text, "seed": subject.seed}
    make = partial(_compressed, subject, f"{scheme}-control", text)
    return cells.get(f"{subject.title} control of {scheme}", key, make)


def facts(subject: Subject, files: Sequence[Path], classes: np.ndarray) -> Facts:
    """Of files that an engine reads together, which gives the test examples these `classes`."""
    nbytes, zipped = sizes(*files)
    return {
        "files": [path.name for path in files], "digest": digest(*(path.read_bytes() for path in files)),
        "bytes": nbytes, "zipped": zipped, "correct": right(classes, subject.test),
    }  # fmt: skip


def onnx_facts(subject: Subject, path: Path) -> Facts:
    """As `facts`, of an ONNX file in ONNX Runtime, with its FLOPs for one example."""
    return {
        **facts(subject, [path], predictions(path, subject.test.inputs)),
        "flops": flops_per_example(read_stored(path)),
    }


def run_recipe(subject: Subject, model: Model, text: str, seed: int) -> tuple[CompressedModel, Facts]:
    """Apply a recipe to `model` with the data of `subject`; goes on where an earlier call was stopped."""
    field = model.inputs[0].name
    train, validation = subject.splits.train, subject.splits.validation
    place = subject.made / "runs" / digest(model.to_bytes(), text, seed)
    small, report = compress(
        model,
        parse_recipe(text),
        data={field: train.inputs, "label": train.labels},
        calibration={field: subject.calibration},
        validation={field: validation.inputs, "label": validation.labels},
        seed=seed,
        folder=place,
    )
    steps = [report.before, *(step.after for step in report.steps)]
    found = {"validation": [100 * (measured.accuracy or 0.0) for measured in (steps[0], steps[-1])]}
    shutil.rmtree(place)
    return small, found


def _compressed(subject: Subject, scheme: str, text: str) -> Facts:
    small, found = run_recipe(subject, subject.model, text, subject.seed)
    path = subject.made / f"{scheme}-{digest(text, subject.seed)}.onnx"
    small.save(path)
    return {**onnx_facts(subject, path), **found}
