"""Lowering: from one model to the programs of a bundle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import numpy as np

from archipel import strategies
from archipel.bundle import Phase, Program
from archipel.bundle.roles import Broadcast, DType, Example, Output, Parameter, State
from archipel.compression.compressed import CompressedModel
from archipel.compression.deploy import deploy, refresh_program
from archipel.converter.device_half.adapters import adapt
from archipel.converter.device_half.clusters import stack
from archipel.converter.device_half.distilled import with_table
from archipel.converter.device_half.federated import divide, local_training, schedule, train_programs, written_program
from archipel.converter.device_half.replaced import Adapted, merge_into
from archipel.converter.device_half.roles import Division, assign_roles
from archipel.converter.options import Training
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.graph.parameters import trainable_names
from archipel.strategies.device import DeviceHalf
from archipel.training import evaluate_graph
from archipel.training.batch_norm import prepared
from archipel.training.evaluation import score_graph
from archipel.training.folding import is_batch_norm
from archipel.training.recompute import recompute
from archipel.training.step import StepOptions


class Lowered(NamedTuple):
    """The programs by name, each a Model with its signature, and the phases of a local round.

    `source` is the float graph that the train programs were made of, None without them.
    """

    programs: dict[str, Model]
    schedule: tuple[Phase, ...]
    source: Model | None = None


def predict_program(predict: Model) -> Model:
    """The model with the signature of `predict`: every input is an example field, every output an answer."""
    inputs = tuple(Example(name=info.name, dtype=cast(DType, info.dtype), shape=info.shape) for info in predict.inputs)
    outputs = tuple(Output(name=info.name, dtype=cast(DType, info.dtype), shape=info.shape) for info in predict.outputs)
    return Model(predict.ir, signature=Program(kind="predict", inputs=inputs, outputs=outputs))


def lower(model: Model, training: Training | None, *, max_clip: float = math.inf) -> Lowered:
    """Make the programs of a bundle of the model: without `training` only `predict`.

    `max_clip` is that of the privacy policy, within which a clip is chosen. A CompressedModel predicts with its
    deployed form and is trained in its training form.
    Raises ConversionError for options that do not fit the model, CompressionError or TrainingError from the parts.
    """
    # Folding first: it changes which parameters there are, and all programs must agree on those.
    if training is not None and training.step_options.get("batch_norm") == "folded":
        model = _folded(model)
    deployment = deploy(model)
    programs = {"predict": predict_program(deployment.predict)}
    if training is None:
        return Lowered(programs, ())
    if isinstance(model, CompressedModel) and model.training_form is not None:
        model = model.training_form
    trained = lower_training(model, training)
    adapted, division = trained.adapted, trained.division
    batch_norm = training.step_options.get("batch_norm", "train")
    measured = evaluate_graph(adapted.model, training.loss, trainable=adapted.trained, batch_norm=batch_norm)
    programs["evaluate"] = score_graph(programs["predict"], training.loss)
    programs.update(trained.programs)
    # `refresh` makes anew every initializer of `predict` that derives from a tensor that training moves.
    refresh = refresh_program(
        deployment,
        {name: model.parameters[name] for name in adapted.derived},
        _predicted_statistics(measured),
    )
    if adapted.replaced:
        # `predict` has the full weights: they are made of what replaces them before anything is derived from them.
        refresh = merge_into(refresh, adapted.replaced, model.parameters)
        # Its inputs are now the replacements, whose first values only the adapted model has.
        refresh.initial.update({name: adapted.model.parameters[name] for name in adapted.trained})
    programs["refresh"] = assign_roles(refresh, division, copies=division.copied)
    half = trained.half
    local = local_training(trained.programs, training.optimizer, division, max_clip)
    if half.begin is not None:
        programs["begin"] = written_program(half.begin, local)
    programs["finish"] = written_program(half.finish, local)
    source = model if adapted.added else adapted.model
    return Lowered(programs, schedule(half, training.epochs, training.batch_size), source)


class Trained(NamedTuple):
    """The train programs of a round by name, and what they were made of."""

    programs: dict[str, Model]
    half: DeviceHalf
    adapted: Adapted
    division: Division


def lower_training(model: Model, training: Training) -> Trained:
    """The train programs of a model. Most mistakes in the options are found here, before anything slow begins.

    Raises ConversionError, TrainingError, GraphError (a pattern that matches nothing) or AutodiffError.
    """
    half, strategy = training.half, training.strategy
    batch_norm = training.step_options.get("batch_norm", "train")
    if half.adapters is not None:
        adapted = adapt(model, half.adapters, training.trainable, strategy)
    elif half.models is not None:
        adapted = stack(model, half.models, training.trainable, batch_norm, strategy)
    elif half.logits:
        adapted = with_table(model, training.loss, training.trainable, strategy)
    else:
        adapted = Adapted(model, (), tuple(trainable_names(model.ir, training.trainable)))
    division = divide(adapted.model, adapted.trained, half, strategy, batch_norm)
    options = training.step_options
    if options.get("recompute") == "auto":
        options = StepOptions(**options)
        options["recompute"] = recompute(batch_size=training.batch_size)
    programs = train_programs(adapted.model, training.loss, training.optimizer, options, half, division, strategy)
    _check_broadcasts(programs, division.shared, strategy)
    return Trained(programs, half, adapted, division)


def _folded(model: Model) -> Model:
    """The model with BatchNormalization folded into the layers before, and so with fewer parameters.

    A quantized model must have been folded before it was quantized. Raises ConversionError where it was not.
    """
    form = model.training_form if isinstance(model, CompressedModel) else None
    if form is None:
        return prepared(model, "folded")
    if any(map(is_batch_norm, form.ir.graph)):
        raise ConversionError(
            "step_options: batch_norm='folded', but the model was quantized with its BatchNormalization; pass "
            "compression= to convert, or use 'train' or 'frozen'"
        )
    return model


def _check_broadcasts(training: Mapping[str, Model], parameters: Mapping[str, np.ndarray], strategy: str) -> None:
    read = [port.tensor for model in training.values() for port in model.program.inputs if isinstance(port, Broadcast)]
    algorithm = strategies.get(strategy)  # what a strategy broadcasts beside the parameters shows in its first state
    missing = sorted(set(read) - set(algorithm.broadcast(algorithm.init(parameters)))) if read else []
    if missing:
        raise ConversionError(
            f"the train program reads {missing[0]!r} as a broadcast of the server, but strategy {strategy!r} does not "
            "broadcast it; use anchor='start', which is the same where devices start from the server's parameters"
        )


def _predicted_statistics(evaluate: Model) -> dict[str, State]:
    """Running statistics: the state that starts as a tensor of the model, by that tensor's name."""
    ports = [port for port in evaluate.program.inputs if isinstance(port, State)]
    return {port.init: port for port in ports if isinstance(port.init, str)}


def initial_values(programs: Mapping[str, Model]) -> dict[str, np.ndarray]:
    """The values that the programs' parameters, running statistics and personal tensors start from, by name."""
    return {name: value for program in programs.values() for name, value in program.initial.items()}


def parameter_names(programs: Mapping[str, Model]) -> list[str]:
    """Every tensor that some program reads as a parameter, in the order of first use."""
    ports = [port for model in programs.values() for port in model.program.inputs]
    return list(dict.fromkeys(port.tensor for port in ports if isinstance(port, Parameter)))
