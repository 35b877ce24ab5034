"""The file of `archipel train`: which model, which data, how to train, where the result goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from archipel.errors import CommandError
from archipel.models.source import ModelSource
from archipel.toml_files import put_setting, read_toml

EXAMPLE = """\
[model]
zoo = "digits_cnn"             # or onnx = "network.onnx", bundle = "digits.bundle",
                               # python = "network.py:make" (runs the code of that file)
# [model.arguments]            # of the zoo's or your own function
# classes = 10

[data]
train = "train.npz"            # .npz, .csv, .parquet, .arrow, or a folder of them
validation = "validation.npz"  # chooses the best epoch
test = "test.npz"              # what is reached in the end
# [data.options]               # of the reader of these files: docs/data.md
# fields = { input = ["age", "hours"], label = "income" }
# or python = "data.py:load", which returns (train, validation) or (train, validation, test)
# [data.arguments]             # of that function

# [[preprocess]]               # transforms of raw examples, which become part of the network: docs/preprocessing.md
# kind = "scale"               # bytes to 0..1
# [[preprocess]]
# kind = "normalize"           # with the mean and deviation of the training data

[train]                        # the fields of archipel.TrainConfig
loss = "cross_entropy"         # a name, or a table: { name = "cross_entropy", label_smoothing = 0.1 }
optimizer = { name = "adamw", lr = 1e-3 }
schedule = { name = "cosine", warmup = 100 }
epochs = 20
batch_size = 64
patience = 5
metrics = ["F1Score"]          # names of torchmetrics

[output]
folder = "trained"             # model.onnx, state.pt, metrics.json, curves.png, checkpoint/

[card]                         # the model card, which goes with model.onnx into its bundles
description = "Digits on grey pictures of 28x28."
intended_use = "Trying out."
"""


class DataPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Files, read with the reader's `options`, or a function of `arguments` that returns the training data, or two or
    three data sets: also those for validation and for the test."""

    train: str | None = None
    validation: str | None = None
    test: str | None = None
    options: dict[str, Any] = {}
    python: str | None = None
    arguments: dict[str, Any] = {}


class OutputPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The folder of the results."""

    folder: str = "trained"


class Job(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A whole file."""

    model: ModelSource
    data: DataPart
    preprocess: list[dict[str, Any]] = []
    train: dict[str, Any] = {}
    card: dict[str, Any] = {}
    output: OutputPart = msgspec.field(default_factory=OutputPart)


def read_job(file: Path, settings: Sequence[str]) -> Job:
    """The job in a TOML file, with the settings KEY=VALUE in place of its own.

    Raises CommandError that names the file and the key, such as data.train.
    """
    table = read_toml(file)
    for setting in settings:
        put_setting(table, setting, Job.__struct_fields__, "epochs=3 or model.arguments.classes=4", otherwise="train")
    try:
        job = msgspec.convert(table, Job)
        _ = job.model.source
        if (job.data.python is None) == (job.data.train is None):
            raise CommandError("data: give train, a file, or python, a function")
        if job.data.arguments and job.data.python is None:
            raise CommandError("data.arguments: are for python; files have data.options")
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        key = path.rstrip("`").lstrip(".")
        raise CommandError(f"{file}: {key or 'the file'}: {text}; `archipel train --help` has an example") from None
    except CommandError as error:
        raise CommandError(f"{file}: {error}; `archipel train --help` has an example") from None
    return job
