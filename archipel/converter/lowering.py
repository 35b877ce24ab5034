"""Lowering: from one model to the programs of a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from archipel import strategies
from archipel.bundle import Phase, Program
from archipel.bundle.roles import Broadcast, DType, Example, Output, Parameter, State
from archipel.compression.compressed import CompressedModel
from archipel.compression.deploy import deploy, refresh_program
from archipel.converter.adapters import Adapted, adapt, merge_into
from archipel.converter.federated import divide, local_training, schedule, train_programs, written_program
from archipel.converter.roles import assign_roles
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.graph.parameters import trainable_names
from archipel.strategies.device import describe
from archipel.training import evaluate_graph
from archipel.training.batch_norm import prepared
from archipel.training.folding import is_batch_norm
from archipel.training.losses import Loss
from archipel.training.optimizers import Optimizer
from archipel.training.step import StepOptions


class Lowered(NamedTuple):
    """The programs by name, each a Model with its signature, and the phases of a local round."""

    programs: dict[str, Model]
    schedule: tuple[Phase, ...]


def predict_program(predict: Model) -> Model:
    """The model itself with the signature of `predict`: every input an example field, every output an answer."""
    inputs = tuple(Example(name=info.name, dtype=cast(DType, info.dtype), shape=info.shape) for info in predict.inputs)
    outputs = tuple(Output(name=info.name, dtype=cast(DType, info.dtype), shape=info.shape) for info in predict.outputs)
    return Model(predict.ir, signature=Program(kind="predict", inputs=inputs, outputs=outputs))


def lower(
    model: Model,
    *,
    loss: Loss | None,
    optimizer: Optimizer | None,
    trainable: str | Sequence[str],
    step_options: StepOptions,
    strategy: str,
    strategy_options: Mapping[str, object],
    epochs: int,
    batch_size: int,
) -> Lowered:
    """What a bundle of the model consists of. Without a loss: `predict` only.

    A CompressedModel predicts with its deployed form and is trained in its training form.
    Raises ConversionError for options that do not fit together, CompressionError or TrainingError from the parts.
    """
    _check(step_options)
    batch_norm = step_options.get("batch_norm", "train")
    if batch_norm == "folded":
        form = model.training_form if isinstance(model, CompressedModel) else None
        if form is not None and any(map(is_batch_norm, form.ir.graph)):
            raise ConversionError(
                "step_options: batch_norm='folded', but the model was quantized with its BatchNormalization; pass "
                "recipe= to convert, or use 'train' or 'frozen'"
            )
        if form is None:
            model = prepared(model, batch_norm)  # every program has the parameters that are left
    deployment = deploy(model)
    programs = {"predict": predict_program(deployment.predict)}
    if isinstance(model, CompressedModel) and model.training_form is not None:
        model = model.training_form
    if loss is None:
        if optimizer is not None or step_options:
            what = "an optimizer" if optimizer is not None else "step_options"
            raise ConversionError(f"{what} without a loss: pass loss= too, or neither for a predict-only bundle")
        return Lowered(programs, ())
    if optimizer is None:
        raise ConversionError("a loss without an optimizer: pass optimizer= too, or neither for a predict-only bundle")
    algorithm = strategies.get(strategy)
    half = describe(algorithm.name, algorithm.device, strategy_options)
    if half.adapters is None:
        adapted = Adapted(model, (), tuple(trainable_names(model.ir, trainable)))
    else:
        adapted = adapt(model, half.adapters, trainable, strategy)
    division = divide(adapted.model, adapted.trained, half, strategy)
    evaluate = evaluate_graph(adapted.model, loss, trainable=adapted.trained, batch_norm=batch_norm)
    programs["evaluate"] = assign_roles(evaluate, division, copies=division.copied)
    training = train_programs(adapted.model, loss, optimizer, step_options, half, division, strategy)
    programs.update(training)
    _check_broadcasts(training, division.shared, strategy)
    refresh = refresh_program(
        deployment,
        {name: model.parameters[name] for name in adapted.derived},
        _predicted_statistics(evaluate),
    )
    if adapted.adapters:
        refresh = merge_into(refresh, adapted.adapters, model.parameters)
        refresh.initial.update({name: adapted.model.parameters[name] for name in adapted.trained})
    programs["refresh"] = assign_roles(refresh, division, copies=division.copied)
    local = local_training(training, optimizer, division)
    if half.begin is not None:
        programs["begin"] = written_program(half.begin, local)
    programs["finish"] = written_program(half.finish, local)
    return Lowered(programs, schedule(half, epochs, batch_size))


def _check(options: StepOptions) -> None:
    if not isinstance(options, Mapping):
        raise ConversionError(f"step_options must be a mapping from name to value, is {options!r}")
    known = StepOptions.__optional_keys__
    for name in options:
        if name not in known:
            raise ConversionError(f"step_options: no option {name!r}; step_graph has {', '.join(sorted(known))}")
    if options.get("steps", 1) != 1:
        raise ConversionError(
            f"step_options: steps={options['steps']!r}, but devices hand one batch at a time to the train program; "
            "leave steps out, or use accumulate= for updates from several batches"
        )


def _check_broadcasts(training: Mapping[str, Model], parameters: Mapping[str, np.ndarray], strategy: str) -> None:
    signatures = [program.signature for program in training.values() if program.signature is not None]
    asked = [port.tensor for signature in signatures for port in signature.inputs if isinstance(port, Broadcast)]
    algorithm = strategies.get(strategy)
    missing = sorted(set(asked) - set(algorithm.broadcast(algorithm.init(parameters)))) if asked else []
    if missing:
        raise ConversionError(
            f"the train program reads {missing[0]!r} as the server broadcasts it, and strategy {strategy!r} does not; "
            "use anchor='start', which is the same where devices start from what the server sent"
        )


def _predicted_statistics(evaluate: Model) -> dict[str, State]:
    """The state that starts as a tensor of the model, by that tensor's name: running statistics."""
    ports = evaluate.signature.inputs if evaluate.signature is not None else ()
    return {port.init: port for port in ports if isinstance(port, State) and isinstance(port.init, str)}


def initial_values(programs: Mapping[str, Model]) -> dict[str, np.ndarray]:
    """What the programs' parameters, personal tensors and running statistics start from."""
    return {name: value for program in programs.values() for name, value in program.initial.items()}


def parameter_names(programs: Mapping[str, Model]) -> list[str]:
    """Every tensor that some program reads as a parameter, in the order of first use."""
    names: dict[str, None] = {}
    for program in programs.values():
        if program.signature is not None:
            for port in program.signature.inputs:
                if isinstance(port, Parameter):
                    names.setdefault(port.tensor)
    return list(names)
