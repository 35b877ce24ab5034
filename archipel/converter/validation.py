"""Checks of a request before any work: its arguments with one another, then with the model.

A group of arguments checks its own fields when it is made (options.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from archipel.bundle import ModelCard, PrivacyPolicy, encode_card
from archipel.bundle.roles import Example
from archipel.bundle.validation import check_text, validate_policy
from archipel.compression.compressed import CompressedModel
from archipel.compression.low_rank import LowRank
from archipel.converter.arguments import check_instance, check_number, check_struct, check_whole
from archipel.converter.lowering import lower_training, predict_program
from archipel.converter.options import Analysis, Compression, Signing, Training
from archipel.converter.request import Request
from archipel.converter.self_test import check_examples
from archipel.converter.sources import check_source
from archipel.converter.statistics import analyze_program, check_counts
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.graph.batch import STAYS
from archipel.graph.check import refuse_not_finite
from archipel.graph.parameters import match

UNSIGNED = (
    "a bundle must be signed: pass signing=Signing(key); `archipel keys FILE` makes a key, bundle.load_private_key "
    "reads it"
)


def check_request(request: Request) -> None:
    """Refuse mistakes that show without the model. Reads nothing but whether there is something at the path.

    Raises ConversionError, ManifestError for a name or a privacy policy that no manifest may have, or CardError.
    """
    if request.signing is None:
        raise ConversionError(UNSIGNED)
    check_instance("signing", request.signing, Signing, "a converter.Signing")
    for where, group, kind in (
        ("training", request.training, Training),
        ("analysis", request.analysis, Analysis),
        ("compression", request.compression, Compression),
    ):
        check_instance(where, group, kind | None, f"a converter.{kind.__name__}")
    _check_path(request.path)
    if request.name is not None:
        check_instance("name", request.name, str, "text")
    check_text("name", request.bundle_name)
    if request.card is not None:
        check_instance("card", request.card, ModelCard, "a bundle.ModelCard")
        encode_card(request.card)
    check_whole("batch_size", request.batch_size, 1)
    check_number("min_agreement", request.min_agreement, 0, 1)
    check_number("min_snr", request.min_snr, -math.inf, math.inf)
    check_struct("privacy", request.privacy, PrivacyPolicy)
    validate_policy(request.privacy)
    if request.analysis is not None:
        if request.training is not None:
            raise ConversionError("analysis with training: an analysis is a bundle of its own; leave one of them out")
        check_counts(request.analysis.max_examples, request.privacy.max_bits)
    if request.training is not None:
        with_weighting(request.training, request.privacy)
    if request.self_test is not None:
        check_instance("self_test", request.self_test, Mapping, "arrays by the names of the model's inputs")
    check_source(request.source, request.example)


def check_model(request: Request, model: Model) -> None:
    """Refuse arguments that do not fit the model, before compression takes hours.

    If the model will be compressed, its programs are made once as it is now, and thrown away: compression changes
    neither its inputs and outputs nor, except for LowRank, the names of its parameters. Raises ConversionError,
    TrainingError, GraphError or AutodiffError.
    """
    refuse_not_finite(model.ir)
    predict = predict_program(model)
    ports = [port for port in predict.program.inputs if isinstance(port, Example)]
    if request.training is not None:
        _check_batch(ports, request.training.batch_size, model)
    # A model with a scalar input gets no self-test, and then its examples are not read.
    if request.self_test and all(port.shape for port in ports):
        check_examples(ports, request.self_test)
    if not request.parts:
        return  # without compression the programs are made next, and raise the same errors
    if request.analysis is not None:
        analyze_program(
            predict,
            request.analysis.statistics,
            max_examples=request.analysis.max_examples,
            bits=request.privacy.max_bits,
        )
    if request.training is None:
        return
    if any(isinstance(part, LowRank) for part in request.parts):
        # Patterns may name factors that do not exist yet, so the programs cannot be made.
        _check_patterns_or_factors(request.training, model)
    else:
        form = model.training_form if isinstance(model, CompressedModel) else None
        lower_training(form or model, request.training)


def with_weighting(training: Training, privacy: PrivacyPolicy) -> Training:
    """The training with the policy's weighting as an option of the strategy's device half.

    Raises ConversionError where the options ask for another one.
    """
    if privacy.weighting != "uniform":
        return training
    options = training.strategy_options
    if options.get("weighting", "uniform") != "uniform":
        raise ConversionError(
            f"strategy_options: weighting is {options['weighting']!r}, but the privacy policy wants every device to "
            "weigh 1; leave it out, or change privacy"
        )
    return replace(training, strategy_options={**options, "weighting": "uniform"})


def _check_batch(ports: Sequence[Example], batch_size: int, model: Model) -> None:
    """Refuse to train a model for batches of another fixed size, or with an input that is none of examples: no device
    could make a step."""
    scalar = next((port for port in ports if not port.shape), None)
    if scalar is not None:
        raise ConversionError(
            f"training: input {scalar.name!r} is one number for a whole batch, and devices train on examples; give it "
            f"one value with Model.fix({{{scalar.name!r}: ...}})"
        )
    batches = {port.shape[0] for port in ports if isinstance(port.shape[0], str)}
    for port in ports:
        axis = next((axis for axis, size in enumerate(port.shape) if size in batches), None)
        if axis:
            raise ConversionError(
                f"training: input {port.name!r} has the batch on axis {axis}, and devices train on examples along the "
                f"first; export the model with it there, or give the input one value, as Model.fix({{{port.name!r}: "
                "0.0}) does for a state that starts from zeros"
            )
    fixed = next((port for port in ports if port.shape and isinstance(port.shape[0], int)), None)
    if fixed is None or fixed.shape[0] == batch_size:
        return
    notes = () if model.import_report is None else model.import_report.notes
    why = next((f" ({note})" for note in notes if note.startswith(STAYS)), "")
    raise ConversionError(
        f"training: input {fixed.name!r} takes batches of exactly {fixed.shape[0]}, and devices train in batches of "
        f"{batch_size}{why}; export the model with a dynamic batch axis (torch.onnx.export has dynamic_shapes=), or "
        f"pass batch_size={fixed.shape[0]}"
    )


def _check_path(path: str | os.PathLike[str]) -> None:
    check_instance("path", path, str | os.PathLike, "a path")
    place = Path(path)
    if place.exists():
        raise ConversionError(f"{place}: exists already; remove it or choose another name")
    # Missing folders are made later: the nearest one that exists must allow that.
    folder = next(parent for parent in place.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written to" if folder.is_dir() else "is not a folder"
        raise ConversionError(f"path {place}: {folder} {why}; choose another path")


def _check_patterns_or_factors(training: Training, model: Model) -> None:
    """Refuse a pattern of `trainable` that matches neither a parameter nor a factor that LowRank may make of one.

    LowRank makes `<weight>.left` and `<weight>.right` of some weights.
    """
    names = model.parameter_names
    match([*names, *(f"{name}.{factor}" for name in names for factor in ("left", "right"))], training.trainable)
