"""`convert`: any model to a signed bundle."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from archipel.bundle import (
    Bundle,
    Lineage,
    ModelCard,
    PrivacyPolicy,
    Statistic,
    open_bundle,
    pack,
    parameter_specs,
    write_bundle,
)
from archipel.bundle.card import mark_compressed
from archipel.compression.compress import compress
from archipel.compression.compressed import CompressedModel
from archipel.compression.report import Measured, Report
from archipel.converter.agreement import check_agreement
from archipel.converter.features import split_features
from archipel.converter.former_keywords import accepts_former_keywords
from archipel.converter.limits import compute_limits
from archipel.converter.lowering import initial_values, lower, parameter_names
from archipel.converter.metrics import with_ranges
from archipel.converter.notes import conversion_notes
from archipel.converter.options import Analysis, Compression, Signing, Training
from archipel.converter.outputs import with_first_output
from archipel.converter.repeated import with_repeated
from archipel.converter.request import DEFAULT_PRIVACY, SUFFIX, Request
from archipel.converter.self_test import bounded_self_test
from archipel.converter.sources import read_model
from archipel.converter.statistics import PROGRAM, analyze_program
from archipel.converter.validation import check_model, check_request, with_weighting
from archipel.converter.weights import SOURCE, check_refresh, derived_tensors, share_weights
from archipel.durable import reason_of, temporary_folder
from archipel.errors import BundleError
from archipel.graph import Model
from archipel.graph.model_card import card_of
from archipel.graph.parameters import trainable_names
from archipel.graph.report import record_conversion
from archipel.lite_runtime.agreement import MIN_AGREEMENT, MIN_SNR
from archipel.training.batch_norm import prepared


def make_bundle(request: Request) -> Bundle:
    """Do what `convert` does. All mistakes in the request are reported before the model is compressed."""
    check_request(request)
    training, signing, privacy = request.training, request.signing, request.privacy
    if training is not None:
        training = with_weighting(training, privacy)
    model = read_model(request.source, request.example)
    report = model.report if isinstance(model, CompressedModel) else None
    if training is not None and training.loss_output is not None:
        model = with_first_output(model, training.loss_output)
    original = model
    # Folded before compression, so that it works on the parameters that every program will have.
    if request.parts and training is not None and training.step_options.get("batch_norm") == "folded":
        model = prepared(model, "folded")
    check_model(dataclasses.replace(request, training=training), model)
    if request.compression is not None and request.parts:
        model, report = _compressed(model, request.compression, training)
    programs, schedule, source = lower(model, training, max_clip=privacy.max_clip)
    agreement = check_agreement(
        model,
        programs,
        axis=1 if training is None else getattr(training.loss, "axis", 1),
        min_agreement=request.min_agreement,
        min_snr=request.min_snr,
    )
    if training is not None:
        programs = with_ranges(programs, training.loss_range, privacy)
    described: tuple[Statistic, ...] = ()
    if request.analysis is not None:
        programs[PROGRAM], described = analyze_program(
            programs["predict"],
            request.analysis.statistics,
            max_examples=request.analysis.max_examples,
            bits=privacy.max_bits,
        )
    # Features first: without the backbone a step may be short enough to repeat, and only single steps can be split.
    programs = with_repeated(split_features(programs), request.rows)
    record_conversion(programs["predict"].ir, conversion_notes(original, training, programs))
    check_refresh(programs["predict"], derived_tensors(programs))
    values = initial_values(programs)
    parameters = {tensor: values[tensor] for tensor in parameter_names(programs)}
    graphs, weights = share_weights(programs, {**parameters, **values}, source)
    files = {graph: f"{graph}.onnx" for graph in graphs}
    write = partial(
        write_bundle,
        name=request.bundle_name,
        programs={name: msgspec.structs.replace(model.program, file=files[name]) for name, model in programs.items()},
        graphs={files[name]: graph for name, graph in graphs.items()},
        weights=weights,
        parameters=parameter_specs(parameters, list(parameters)),
        limits=compute_limits(programs, request.rows),
        privacy=privacy,
        key=signing.key,
        schedule=schedule,
        strategy="" if training is None else training.strategy,
        lineage=_lineage(signing.lineage or _measurements(report, signing.parent), agreement),
        self_test=bounded_self_test(
            programs["predict"], values, request.self_test, len(weights) + sum(map(len, graphs.values()))
        ),
        statistics=described,
        sequence=signing.sequence,
        not_after=signing.end,
        populations=signing.populations,
        source=files.get(SOURCE, ""),
        card=_card(request.card or card_of(original.ir), model, bool(request.parts)),
    )
    path = Path(request.path)
    if path.suffix != SUFFIX:
        return write(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # `write` makes a folder, which is packed into the file and removed whatever happens.
    with naming_target(path), temporary_folder(path) as folder:
        pack(write(folder / "bundle").folder, path)
    return open_bundle(path, [signing.key.public_key().public_bytes_raw()], allow_development=True)


@contextmanager
def naming_target(path: Path) -> Iterator[None]:
    """A context in which a bundle is made on the way to `path`: what cannot be written names `path` in its error."""
    try:
        yield
    except BundleError as error:
        if isinstance(error.__cause__, OSError):
            raise BundleError(f"{path}: cannot be written ({reason_of(error.__cause__)})") from error.__cause__
        raise


@accepts_former_keywords(make_bundle)
def convert(
    source: Any,
    path: str | os.PathLike[str],
    *,
    signing: Signing,
    training: Training | None = None,
    analysis: Analysis | None = None,
    compression: Compression | None = None,
    example: Any = None,
    name: str | None = None,
    privacy: PrivacyPolicy = DEFAULT_PRIVACY,
    self_test: Mapping[str, np.ndarray] | None = None,
    min_agreement: float = MIN_AGREEMENT,
    min_snr: float = MIN_SNR,
    card: ModelCard | None = None,
) -> Bundle:
    """Make a signed bundle of a model.

    Arguments:
        source: the path of an ONNX or .pt2 file, a Model, a torch module, or a scikit-learn estimator.
        path: a file if it ends in ".bundle", else a folder. It must not exist.
        signing: the publisher's key, what the bundle replaces, and for whom and until when it may be used in rounds.
        training: how devices train the model. The bundle then also has `evaluate`, `train` (one step of the
            optimizer), `refresh` and the strategy's `finish`, and a schedule of epochs in batches. Some strategies
            have a `begin` too, or several train programs with their own numbers of epochs (docs/strategies.md).
            None: `predict` only.
        analysis: the statistics of the model's outputs that an analytics task collects over a population; excludes
            `training`.
        compression: how the model is compressed first. Passing the CompressedModel of `compress` does the same.
        example: a tensor that a torch module takes, or an array `[examples, features]` for an estimator.
        name: of the bundle, 1 to 256 printable characters. None: that of `path`, without ".bundle".
        privacy: the bounds that devices insist on.
        self_test: an array `[examples, ...]` for every input. These examples go into the bundle, where anybody who has
            it can read them, with the answers of `predict`, so that devices can compare theirs. None: pseudo-random
            numbers.
        min_agreement: of a compressed model. `predict`, as devices run it, and the float graph that they train are
            compared on the examples of calibration and validation, and must give at least this share of them equal
            classes. 0: any.
        min_snr: of a compressed model, in dB: the least ratio of signal to noise, where the loss is none of
            classification or all examples are in one class. The signal is how the float graph's answers vary over the
            examples, the noise how far those of `predict` are from them. -math.inf: any.
        card: what the model is for, what it was trained on and how good it is; it becomes the bundle's `card.json`.
            None: the card that the source has, if it comes from a bundle or from a file of `export`.

    Returns:
        The bundle, opened and verified. If the layers before the trained ones are frozen and costly enough, it has a
        program `features` of them, which devices run once for each example. A train program whose steps are short has
        another one beside it that makes several steps at once. The lineage has the measured agreement among its
        metrics.

    Raises:
        ConversionError: an argument is wrong or does not fit the model, or `predict` agrees too little with the
            training form. Arguments are checked before the model is read, and with the model before it is compressed.
        ArchipelError: the error of the part that failed, such as ModelImportError or CompressionError.

    The keywords that the groups replace work with a DeprecationWarning until version 0.2.

    Example:
        convert("model.onnx", "digits.bundle", signing=Signing(key),
                training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.05), trainable="head.*"),
                compression=Compression([StaticInt8()], calibration=images))
    """
    return make_bundle(
        Request(
            source,
            path,
            signing,
            training,
            analysis,
            compression,
            example,
            name,
            privacy,
            self_test,
            min_agreement,
            min_snr,
            card,
        )
    )


def _compressed(model: Model, compression: Compression, training: Training | None) -> tuple[CompressedModel, Report]:
    return compress(
        model,
        compression.parts,
        compression.data,
        compression.calibration,
        compression.validation,
        loss=None if training is None else training.loss,
        seed=compression.seed,
        engine=compression.engine,
        folder=compression.folder,
        on_progress=compression.on_progress,
    )


def _card(card: ModelCard | None, model: Model, compressed: bool) -> ModelCard | None:
    """The card with the number of parameters, where it has none or compression has just changed it."""
    if card is None or (card.parameters and not compressed):
        return card
    parameters = model.parameters
    count = sum(parameters[name].size for name in trainable_names(model.ir, "*"))
    card = msgspec.structs.replace(card, parameters=count)
    return mark_compressed(card) if compressed else card


def _lineage(lineage: Lineage, agreement: dict[str, float]) -> Lineage:
    """The lineage with how far `predict` agrees with the training form, whoever wrote the rest of it."""
    return msgspec.structs.replace(lineage, metrics={**lineage.metrics, **agreement})


def _measurements(report: Report | None, parent: str | None) -> Lineage:
    """The recipe as TOML, and the measurements before and after it."""
    if report is None:
        return Lineage(parent=parent)
    metrics = {}
    for when, measured in (("before", report.before), ("after", report.after)):
        metrics.update({f"{name}_{when}": float(value) for name, value in _numbers(measured).items()})
    return Lineage(parent=parent, recipe=(report.recipe,), metrics=metrics)


def _numbers(measured: Measured) -> dict[str, float]:
    return {name: value for name, value in dataclasses.asdict(measured).items() if value is not None}
