"""`convert`: any model to a signed bundle."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import (
    Bundle,
    Lineage,
    PrivacyPolicy,
    Program,
    Statistic,
    open_bundle,
    pack,
    parameter_specs,
    write_bundle,
)
from archipel.compression.compress import compress
from archipel.compression.compressed import CompressedModel
from archipel.compression.examples import Data
from archipel.compression.part import Part
from archipel.compression.recipe import load_recipe
from archipel.compression.report import Measured, Report
from archipel.compression.work import Progress
from archipel.converter.features import split_features
from archipel.converter.limits import compute_limits
from archipel.converter.lowering import initial_values, lower, parameter_names
from archipel.converter.repeated import with_repeated
from archipel.converter.self_test import self_test as make_self_test
from archipel.converter.statistics import PROGRAM, AnyStatistic, analyze_program
from archipel.converter.weights import check_refresh, derived_tensors, share_weights
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.training.batch_norm import prepared
from archipel.training.losses import Loss
from archipel.training.optimizers import Optimizer
from archipel.training.step import StepOptions

SUFFIX = ".bundle"
DEFAULT_PRIVACY = PrivacyPolicy(modes=("secure",), min_cohort=10, threshold=0.67, max_clip=10.0, max_bits=24)
DAY, VALID_DAYS = 86400, 730


def convert(
    source: Any,
    path: str | os.PathLike[str],
    *,
    trainable: str | Sequence[str] = "*",
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    step_options: StepOptions | None = None,
    recipe: Sequence[Part] | str | os.PathLike[str] | None = None,
    sign_key: Ed25519PrivateKey | None = None,
    target: str = "onnxruntime",
    example: Any = None,
    data: Data | None = None,
    calibration: Data | None = None,
    validation: Data | None = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    name: str | None = None,
    epochs: int = 1,
    batch_size: int = 16,
    strategy: str = "fedavg",
    strategy_options: Mapping[str, object] | None = None,
    privacy: PrivacyPolicy = DEFAULT_PRIVACY,
    parent: str | None = None,
    lineage: Lineage | None = None,
    self_test: Mapping[str, np.ndarray] | None = None,
    statistics: Sequence[AnyStatistic] = (),
    max_examples: int = 1000,
    sequence: int = 0,
    not_after: int | None = None,
    populations: Sequence[str] = (),
) -> Bundle:
    """Make a bundle of `source`: the path of an ONNX or .pt2 file, a Model, or a torch module or scikit-learn
    estimator with `example`.

    `path` ending in ".bundle" becomes one file, anything else a folder; it must not exist. Without a loss the bundle
    has `predict` only; with one it also has `evaluate`, `train` (one step of `optimizer` on the parameters that match
    `trainable`), `refresh` and the strategy's `finish`, and a schedule of `epochs` in batches of `batch_size`. Some
    strategies have a `begin` too, or several train programs with numbers of epochs of their own (docs/strategies.md).
    `step_options` are further arguments of `training.step_graph`, by name: `transforms`, `accumulate`, `batch_norm`
    (which `evaluate` and `predict` follow), `dropout`, `per_example`, `precision`.
    `recipe` (parts, or the path of a TOML file) compresses the model first, with `data`, `calibration`, `validation`,
    `seed`, `folder` and `on_progress` as in `compress`; so does passing the CompressedModel that `compress` returned.
    Devices then predict with the compressed graph, and train what is float of it: rounding is made anew by `refresh`.
    `sign_key` is the publisher's key; `strategy_options` are those of the strategy's device half. `self_test` are
    examples, an array for every input, that go into the bundle with what `predict` answers to them, for devices to
    compare; without it they are pseudo-random numbers. Whoever has the bundle can read them. `parent` is the digest of
    the bundle that this one replaces; it goes into the lineage, with the recipe and what `compress` measured.
    `populations` are those that may use it (none: any), until `not_after` (Unix seconds; None: two years from today; 0:
    without end); a greater `sequence` than before ends the use of all bundles of this name with a smaller one.

    `statistics` (without a loss): what an analytics task takes of the model's outputs over a population, as
    converter.Sum, Mean, Histogram and Quantiles; of each device's examples at most `max_examples` count.

    Where what comes before the trained layers is frozen and costs enough, it becomes the program `features`, which
    devices run once per example; train programs whose steps are short get one that makes several at once.

    Returns the bundle, verified. Raises ConversionError, or the error of the part that failed.
    """
    path = Path(path)
    if sign_key is None:
        raise ConversionError(
            "a bundle must be signed: pass sign_key=; `archipel keys FILE` makes one, bundle.load_private_key reads it"
        )
    if target != "onnxruntime":
        raise ConversionError(f"target {target!r}: this version converts for 'onnxruntime'")
    if path.exists():
        raise ConversionError(f"{path}: exists already; remove it or choose another name")
    model = _model(source, example)
    report = model.report if isinstance(model, CompressedModel) else None
    parts = load_recipe(recipe) if isinstance(recipe, str | os.PathLike) else list(recipe or ())
    if parts:
        if (step_options or {}).get("batch_norm") == "folded":
            model = prepared(model, "folded")  # compression sees the parameters that every program will have
        model, report = compress(
            model, parts, data, calibration, validation, loss=loss, seed=seed, folder=folder, on_progress=on_progress
        )
    programs, schedule = lower(
        model,
        loss=loss,
        optimizer=optimizer,
        trainable=trainable,
        step_options=step_options or {},
        strategy=strategy,
        strategy_options=_upload_options(strategy_options or {}, privacy),
        epochs=epochs,
        batch_size=batch_size,
    )
    described: tuple[Statistic, ...] = ()
    if statistics:
        if loss is not None:
            raise ConversionError("statistics with a loss: an analysis is a bundle of its own; leave one of them out")
        programs[PROGRAM], described = analyze_program(
            programs["predict"], statistics, max_examples=max_examples, bits=privacy.max_bits
        )
    programs = with_repeated(split_features(programs), batch_size)
    check_refresh(programs["predict"], derived_tensors(programs))
    values = initial_values(programs)
    parameters = {tensor: values[tensor] for tensor in parameter_names(programs)}
    graphs, weights = share_weights(programs, {**parameters, **values})
    files = {program: f"{program}.onnx" for program in programs}
    write = partial(
        write_bundle,
        name=name or path.name.removesuffix(SUFFIX),
        programs={program: _located(programs[program].signature, files[program]) for program in programs},
        graphs={files[program]: graphs[program] for program in programs},
        weights=weights,
        parameters=parameter_specs(parameters, list(parameters)),
        limits=compute_limits(programs, batch_size),
        privacy=privacy,
        key=sign_key,
        schedule=schedule,
        strategy=strategy if loss is not None else "",
        lineage=lineage or _lineage(report, parent),
        self_test=make_self_test(programs["predict"], values, self_test),
        statistics=described,
        sequence=sequence,
        not_after=default_not_after() if not_after is None else not_after,
        populations=populations,
    )
    if path.suffix != SUFFIX:
        return write(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        pack(write(Path(folder) / "bundle").folder, path)
    return open_bundle(path, [sign_key.public_key().public_bytes_raw()])


def default_not_after() -> int:
    """Two years from today, at midnight UTC: bundles that are made on one day are the same."""
    return (int(time.time()) // DAY + VALID_DAYS) * DAY


def _upload_options(given: Mapping[str, object], privacy: PrivacyPolicy) -> Mapping[str, object]:
    """What the policy says of weights holds for the strategy's device half."""
    if privacy.weighting != "uniform" or not isinstance(given, Mapping):
        return given
    if given.get("weighting", "uniform") != "uniform":
        raise ConversionError(
            f"strategy_options: weighting is {given['weighting']!r}, but the privacy policy wants every device to "
            "weigh 1; leave it out, or change privacy"
        )
    return {**given, "weighting": "uniform"}


def _lineage(report: Report | None, parent: str | None) -> Lineage:
    """The recipe as TOML, and what was measured before and after it."""
    if report is None:
        return Lineage(parent=parent)
    metrics: dict[str, float] = {}
    for when, measured in (("before", report.before), ("after", report.after)):
        metrics.update({f"{name}_{when}": float(value) for name, value in _numbers(measured).items()})
    return Lineage(parent=parent, recipe=(report.recipe,), metrics=metrics)


def _numbers(measured: Measured) -> dict[str, float]:
    return {name: value for name, value in dataclasses.asdict(measured).items() if value is not None}


def _located(signature: Program | None, file: str) -> Program:
    if signature is None:
        raise ConversionError(f"program for {file} has no signature")
    return msgspec.structs.replace(signature, file=file)


def _model(source: Any, example: Any) -> Model:
    if isinstance(source, Model):
        return source
    if isinstance(source, str | os.PathLike):
        return Model.from_torch(source, example) if os.fspath(source).endswith(".pt2") else Model.from_onnx(source)
    name = type(source).__name__
    if hasattr(source, "state_dict"):  # a module, or a program of torch.export, which has its examples
        if example is None and not hasattr(source, "graph_signature"):
            raise ConversionError(f"{name}: a torch module needs example=, a tensor that it takes")
        return Model.from_torch(source, example)
    if hasattr(source, "get_params") and (hasattr(source, "predict") or hasattr(source, "transform")):
        if example is None:
            raise ConversionError(f"{name}: an estimator needs example=, an array of [examples, features]")
        return Model.from_sklearn(source, example)
    raise ConversionError(
        "source: expected a path (.onnx, .pt2), an archipel.Model, a torch module or program, or a scikit-learn "
        f"estimator, got {name}"
    )
