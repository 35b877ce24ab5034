"""A strategy's device half as programs: a train program for each part of the round, `begin`, `finish`, the schedule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import cast

import numpy as np
import onnx_ir as ir

from archipel.bundle import Phase
from archipel.bundle.roles import Hyperparameter, Port
from archipel.converter.device_half.contrast import contrasted
from archipel.converter.device_half.distilled import DistillingLoss
from archipel.converter.device_half.measuring import MEASURING, measuring_program
from archipel.converter.device_half.roles import Division, assign_roles, select
from archipel.errors import ConversionError
from archipel.graph import Model, promote
from archipel.strategies.device import (
    CHOICE,
    CORRECTION,
    LOGITS,
    ClipExamples,
    Contrast,
    Correction,
    DeviceHalf,
    Distill,
    Follows,
    LocalTraining,
    MakeProgram,
    Part,
    Pull,
    RunningPair,
    Tries,
)
from archipel.strategies.program import choice_state
from archipel.training import per_example, step_graph, transforms
from archipel.training.batch_norm import BatchNorm, statistics_of_layers
from archipel.training.losses import Loss
from archipel.training.nested import MetaSGD, MoreauSGD
from archipel.training.optimizers import SGD, Optimizer
from archipel.training.schedules import Schedule
from archipel.training.step import StepOptions


def divide(
    model: Model, names: Sequence[str], half: DeviceHalf, strategy: str, batch_norm: BatchNorm = "train"
) -> Division:
    """Divide the trained tensors `names` into shared and personal ones, as the strategy wants it.

    With `batch_norm` "train" the running statistics, which training moves, are divided too. Raises ConversionError
    where nothing is left to share, the strategy's personal operators have no tensor, or layers share only one of their
    statistics.
    """
    values = model.parameters
    operators = half.personal_operators
    personal = {name for name in names if _weighs_in(model.ir.graph.initializers[name], operators)}
    if operators and not personal:
        raise ConversionError(
            f"strategy {strategy!r}: no trained tensor is a weight of {', '.join(operators)}; batch_norm='folded' "
            "leaves none, trainable= may leave them out, and exporters merge them into the layer before "
            "(torch.onnx.export keeps them with optimize=False)"
        )
    layers = statistics_of_layers(model) if batch_norm == "train" else []
    averages = list(dict.fromkeys(name for _, *pair in layers for name in pair))
    personal.update(select([*names, *averages], half.personal, strategy, "personal"))
    if half.logits:
        personal.update(name for name in [*names, *averages] if name != LOGITS)
    shared = {name: values[name] for name in names if name not in personal}
    if not shared:
        raise ConversionError(f"strategy {strategy!r}: every trained tensor is personal, so there is nothing to share")
    return Division(
        shared=shared,
        personal={name: values[name] for name in names if name in personal},
        copied=any(part.trains == "copies" for part in half.parts),
        statistics=tuple(_shared_pairs(model, layers, personal, half, strategy)),
    )


def train_programs(
    model: Model,
    loss: Loss,
    optimizer: Optimizer,
    options: StepOptions,
    half: DeviceHalf,
    division: Division,
    strategy: str,
) -> dict[str, Model]:
    """A train program for each part of the round. Raises ConversionError for options that the strategy cannot have.

    The caller has called `check_steps`.
    """
    programs = {}
    for number, part in enumerate(half.parts):
        if part.trains in MEASURING:
            programs[part.program] = measuring_program(part, model, loss, options, half, division, strategy)
            continue
        # The parts "all" and "copies" train every tensor.
        moved = {"personal": list(division.personal), "shared": list(division.shared)}.get(part.trains, division.all)
        if not moved:
            raise ConversionError(
                f"strategy {strategy!r}: program {part.program!r} trains the {part.trains} tensors, and there are "
                "none; name some with strategy_options={'personal': ...}"
            )
        still = [name for name in division.all if name not in moved]
        source, given = model, dict[str, Port]()
        if half.models is not None:
            source = model.copy()
            promote(source.ir, [CHOICE])
            given[CHOICE] = choice_state()
        if still:
            # As inputs they have the round's values; as initializers they would stay what the model began with.
            source = source.copy()
            promote(source.ir, still)
        contrast = next((term for term in part.terms if isinstance(term, Contrast)), None)
        aim = loss
        if contrast is not None:
            _check_contrast(model, options, strategy)
            source, aim, given = contrasted(source, loss, moved, contrast, strategy)
        distill = next((term for term in part.terms if isinstance(term, Distill)), None)
        if distill is not None:
            aim = DistillingLoss(loss, distill.strength)
        steps = _nested(optimizer, part)
        program = step_graph(source, aim, steps, trainable=moved, **_step_options(options, part, still, strategy))
        program.initial.update({name: model.parameters[name] for name in still})
        if half.models is not None:
            program.initial[CHOICE] = np.zeros((), np.int64)
        # The first part keeps plain names; each other one needs an optimizer's state and step count of its own.
        programs[part.program] = assign_roles(
            program,
            division,
            copies=part.trains == "copies",
            still=still,
            own=part.program if number else "",
            given=given,
        )
    return programs


def schedule(half: DeviceHalf, epochs: int, batch_size: int) -> tuple[Phase, ...]:
    """A phase for each part: its own number of epochs or steps, or `epochs`."""
    return tuple(
        Phase(
            program=part.program,
            batch_size=batch_size,
            steps=part.steps,
            epochs=None if part.steps is not None else epochs if part.epochs is None else part.epochs,
        )
        for part in half.parts
    )


def written_program(make: MakeProgram, local: LocalTraining) -> Model:
    """A program that the strategy itself wrote as ONNX: `begin` or `finish`."""
    proto, signature = make(local)
    model = Model.from_proto(proto, parameters=[])
    model.signature = signature
    return model


def local_training(
    programs: Mapping[str, Model], optimizer: Optimizer, division: Division, max_clip: float
) -> LocalTraining:
    """What the strategy's own graphs may need to know about the train programs."""
    ports = [port for model in programs.values() for port in model.program.inputs]
    return LocalTraining(
        parameters=division.shared,
        statistics=division.statistics,
        hyperparameters={port.name: port for port in ports if isinstance(port, Hyperparameter)},
        momentum=optimizer.momentum if isinstance(optimizer, SGD) else 0.0,
        max_clip=max_clip,
    )


def _step_options(options: StepOptions, part: Part, still: Sequence[str], strategy: str) -> StepOptions:
    """The caller's options with what the strategy adds to them."""
    changed = StepOptions(**options)
    given = list(options.get("transforms", ()))
    clips = [term for term in part.terms if isinstance(term, ClipExamples)]
    # Tensors held still are inputs, which per_example would take for fields with a row for each example.
    if options.get("per_example") is not None and still:
        raise ConversionError(
            f"step_options: strategy {strategy!r} trains a part of the model in {part.program!r}; leave per_example out"
        )
    # After the caller's transforms: clipping then bounds the gradient of the loss, and the strategy's pull stays whole.
    for term in part.terms:
        if isinstance(term, Pull):
            given.append(transforms.proximal(term.strength, name=term.name))
        elif isinstance(term, Correction):
            given.append(transforms.correction(CORRECTION))
    if part.terms:
        changed["transforms"] = given
    for clip in clips:
        changed["per_example"] = per_example(clip.clip, clip.noise)
    return changed


def _check_contrast(model: Model, options: StepOptions, strategy: str) -> None:
    """Refuse what does not go with the weights of two more models in a step."""
    here = f"strategy {strategy!r}"
    if options.get("per_example") is not None:
        raise ConversionError(f"step_options: {here} compares three models; leave per_example out")
    if options.get("batch_norm", "train") == "train" and statistics_of_layers(model):
        raise ConversionError(
            f"step_options: {here} compares features of three models, whose BatchNormalization would have to have the "
            "statistics of each; choose batch_norm='frozen' or use GroupNorm"
        )


def _nested(optimizer: Optimizer, part: Part) -> Optimizer:
    """The optimizer as the part's terms change it; `check_steps` has seen that it is plain SGD where they do."""
    for term in part.terms:
        if isinstance(term, Tries):
            return MetaSGD(cast(SGD, optimizer), term.inner_lr)
        if isinstance(term, Follows):
            return MoreauSGD(cast(SGD, optimizer), term.strength, term.local_lr, term.every)
    return optimizer


def check_steps(optimizer: Optimizer, options: StepOptions, half: DeviceHalf, strategy: str) -> None:
    """Refuse an optimizer and step options that the strategy cannot have, whatever the model is.

    Some strategies' `finish` divides the change of the parameters by what that many steps of SGD at a constant rate
    would make of a gradient, so every batch has to be such a step. Raises ConversionError.
    """
    here = f"strategy {strategy!r}"
    clips = any(isinstance(term, ClipExamples) for part in half.parts for term in part.terms)
    if clips and options.get("per_example") is not None:
        raise ConversionError(f"step_options: {here} clips single examples itself; leave per_example out")
    if half.models is not None and options.get("per_example") is not None:
        raise ConversionError(f"step_options: {here} chooses a model without noise; leave per_example out")
    for name in ("kernels", "recompute"):
        if clips and options.get(name):
            raise ConversionError(
                f"step_options: {name} goes with gradients of whole batches, but {here} clips those of single "
                f"examples; leave {name} out"
            )
    if half.optimizer == "any":
        return  # `finish` does not work with the number of steps
    if not isinstance(optimizer, SGD) or isinstance(optimizer.lr, Schedule):
        given = f"{type(optimizer).__name__}{' with a schedule' if isinstance(optimizer, SGD) else ''}"
        raise ConversionError(f"{here}: needs the optimizer sgd at a constant rate, got {given}")
    if optimizer.momentum and half.optimizer == "sgd":
        raise ConversionError(f"{here}: needs SGD without momentum, got momentum={optimizer.momentum}")
    if optimizer.nesterov or optimizer.dampening:
        raise ConversionError(f"{here}: counts on plain momentum; leave nesterov and dampening out")
    if options.get("accumulate", 1) != 1 or options.get("precision", "float32") != "float32":
        raise ConversionError(
            f"{here}: counts every batch as a step, but with accumulate or mixed precision some batches make no step; "
            "leave both out of step_options"
        )


def _shared_pairs(
    model: Model, layers: Sequence[tuple[ir.Node, str, str]], personal: Collection[str], half: DeviceHalf, strategy: str
) -> list[RunningPair]:
    """The running statistics that devices share: those of layers of which they share scale and shift, too."""
    pairs: dict[str, RunningPair] = {}
    for node, mean, variance in layers:
        owned = [value.name for value in node.inputs[1:] if value is not None and value.name in personal]
        value = model.ir.graph.initializers.get(variance)
        content = None if value is None else value.const_value
        # Statistics that are computed cannot be trained either, as `step_graph` says.
        if owned or node.op_type in half.personal_operators or content is None:
            continue
        pair = RunningPair(mean, variance, content.dtype.numpy().name, tuple(content.shape.numpy()))
        for name in (mean, variance):
            if pairs.setdefault(name, pair) != pair:
                raise ConversionError(
                    f"strategy {strategy!r}: two BatchNormalizations share {name!r} and no other statistic, so that "
                    "devices' statistics cannot be combined; give each its own, or use batch_norm='frozen'"
                )
    return list(dict.fromkeys(pairs.values()))


def _weighs_in(value: ir.Value, op_types: Collection[str]) -> bool:
    """Whether such an operator has the value as its second or third input: weight and bias, or scale and shift."""
    return any(use.node.op_type in op_types and use.idx in (1, 2) for use in value.uses())
