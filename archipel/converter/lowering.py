"""Lowering: from one model to the programs of a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from archipel import strategies
from archipel.bundle import Program
from archipel.bundle.roles import Broadcast, DType, Example, Output, Parameter, State
from archipel.compression import StaticInt8, quantize_static, refresh_program
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.graph.functions import inline_functions
from archipel.graph.parameters import trainable_names
from archipel.training import evaluate_graph, step_graph
from archipel.training.batch_norm import prepared
from archipel.training.losses import Loss
from archipel.training.optimizers import Optimizer
from archipel.training.step import StepOptions


def predict_program(model: Model) -> Model:
    """The model itself with the signature of `predict`: every input an example field, every output an answer."""
    inputs = tuple(Example(name=info.name, dtype=cast(DType, info.dtype), shape=info.shape) for info in model.inputs)
    outputs = tuple(Output(name=info.name, dtype=cast(DType, info.dtype), shape=info.shape) for info in model.outputs)
    program = prepared(model, "frozen")
    inline_functions(program.ir)
    program.signature = Program(kind="predict", inputs=inputs, outputs=outputs)
    return program


def lower(
    model: Model,
    *,
    loss: Loss | None,
    optimizer: Optimizer | None,
    trainable: str | Sequence[str],
    step_options: StepOptions,
    recipe: Sequence[StaticInt8],
    calibration: Mapping[str, np.ndarray] | None,
    strategy: str,
    strategy_options: Mapping[str, object],
) -> dict[str, Model]:
    """The programs by name, each a Model with its signature. Without a loss: `predict` only.

    Raises ConversionError for options that do not fit together, CompressionError or TrainingError from the parts.
    """
    if len(recipe) > 1:
        raise ConversionError(f"recipe: one StaticInt8 at most, got {len(recipe)} parts")
    _check(step_options)
    batch_norm = step_options.get("batch_norm", "train")
    if batch_norm == "folded":
        model = prepared(model, batch_norm)  # every program has the parameters that are left
    compressed = model
    for part in recipe:
        if calibration is None:
            raise ConversionError("recipe: StaticInt8 needs calibration data; pass calibration={input name: array}")
        compressed = quantize_static(model, part, calibration)
    programs = {"predict": predict_program(compressed)}
    if loss is None:
        if optimizer is not None or step_options:
            what = "an optimizer" if optimizer is not None else "step_options"
            raise ConversionError(f"{what} without a loss: pass loss= too, or neither for a predict-only bundle")
        return programs
    if optimizer is None:
        raise ConversionError("a loss without an optimizer: pass optimizer= too, or neither for a predict-only bundle")
    names = trainable_names(model.ir, trainable)
    parameters = {name: model.parameters[name] for name in names}
    programs["evaluate"] = evaluate_graph(model, loss, trainable=names, batch_norm=batch_norm)
    programs["train"] = step_graph(model, loss, optimizer, trainable=names, **step_options)
    _check_broadcasts(programs["train"], parameters, strategy)
    programs["refresh"] = refresh_program(
        programs["predict"], parameters, statistics(programs), source=model if recipe else None
    )
    programs["finish"] = _finish(parameters, strategy, strategy_options)
    return programs


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


def _check_broadcasts(train: Model, parameters: Mapping[str, np.ndarray], strategy: str) -> None:
    asked = [port.tensor for port in train.signature.inputs if isinstance(port, Broadcast)] if train.signature else []
    algorithm = strategies.get(strategy)
    missing = sorted(set(asked) - set(algorithm.broadcast(algorithm.init(parameters)))) if asked else []
    if missing:
        raise ConversionError(
            f"the train program reads {missing[0]!r} as the server broadcasts it, and strategy {strategy!r} does not; "
            "use anchor='start', which is the same where devices start from what the server sent"
        )


def _finish(parameters: Mapping[str, np.ndarray], strategy: str, options: Mapping[str, object]) -> Model:
    try:
        proto, signature = strategies.get(strategy).finish(parameters, **options)
    except TypeError as error:
        raise ConversionError(f"strategy {strategy!r}: {error}") from None
    model = Model.from_proto(proto, parameters=[])
    model.signature = signature
    return model


def statistics(programs: Mapping[str, Model]) -> dict[str, State]:
    """The state that starts as a tensor of the model, by that tensor's name: running statistics."""
    ports = [port for program in programs.values() if program.signature for port in program.signature.inputs]
    return {port.init: port for port in ports if isinstance(port, State) and isinstance(port.init, str)}


def initial_values(programs: Mapping[str, Model]) -> dict[str, np.ndarray]:
    """What the programs' parameters, and their state of `statistics`, start from."""
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
