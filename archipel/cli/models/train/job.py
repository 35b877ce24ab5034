"""The file of `archipel train`: which model, which data, how to train, where the result goes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from archipel.cli.input_output.toml_files import read_toml
from archipel.errors import CommandError

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


class ModelPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where the network comes from: one of `zoo`, `onnx`, `bundle` and `python`."""

    zoo: str | None = None
    onnx: str | None = None
    bundle: str | None = None
    python: str | None = None
    key: tuple[str, ...] = ()
    arguments: dict[str, Any] = {}

    @property
    def source(self) -> tuple[str, str]:
        """(kind, name)."""
        given = [(kind, name) for kind in KINDS if (name := getattr(self, kind)) is not None]
        if len(given) != 1:
            raise CommandError(f"model: give one of {', '.join(KINDS)}, got {[kind for kind, _ in given] or 'none'}")
        return given[0]


KINDS = ("zoo", "onnx", "bundle", "python")


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

    model: ModelPart
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
        _set(table, setting)
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


def load_function(name: str, key: str) -> Callable[..., Any]:
    """A function of the user's, `module:function` or `file.py:function`. It runs the module's code.

    Raises CommandError that names the key.
    """
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        raise CommandError(f"{key}: expected module:function or file.py:function, got {name!r}")
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise CommandError(f"{key}: {where}: no such file")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # where dataclasses and pickle look for it
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise CommandError(f"{key}: {error}; give file.py:function for a file") from None
    found = getattr(module, function, None)
    if not callable(found):
        raise CommandError(f"{key}: {where} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def check_arguments(function: Callable[..., Any], name: str, arguments: Mapping[str, Any], key: str) -> None:
    """Raise CommandError for arguments that the function does not have, and for those that it needs."""
    try:
        known = inspect.signature(function).parameters.values()
    except ValueError:  # some functions in C do not tell
        return
    named = [each.name for each in known if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for argument in arguments:
        if argument not in named and not any(each.kind is each.VAR_KEYWORD for each in known):
            raise CommandError(f"{key}.{argument}: {name} has no such argument; it has {', '.join(named) or 'none'}")
    for each in known:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) or each.default is not each.empty:
            continue
        if each.kind is each.POSITIONAL_ONLY:
            raise CommandError(f"{key.partition('.')[0]}.python: {name} takes {each.name!r} by position; give a "
                               "function whose arguments have names")  # fmt: skip
        if each.name not in arguments:
            raise CommandError(f"{key}: {name} needs {each.name!r}; give it in the table [{key}]")


def _set(table: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise CommandError(f"--set {setting}: expected KEY=VALUE, such as epochs=3 or model.arguments.classes=4")
    if parts[0] not in Job.__struct_fields__ or parts == ["train"]:
        parts = ["train", *parts]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a word without quotation marks, which a shell takes away
    at = table
    for part in parts[:-1]:
        inner = at.setdefault(part, {})
        if isinstance(inner, str):  # optimizer.lr where the file has optimizer = "adam"
            inner = at[part] = {"name": inner}
        if not isinstance(inner, dict):
            raise CommandError(f"--set {setting}: {part} is no table")
        at = inner
    at[parts[-1]] = value
