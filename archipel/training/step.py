"""A training step as one graph: forward, loss, gradients and optimizer in standard operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from archipel.autodiff import differentiate
from archipel.bundle.roles import Hyperparameter, Metric, Parameter, Program, State
from archipel.errors import TrainingError
from archipel.graph.model import Model
from archipel.graph.passes import remove_dead_code, share_subexpressions
from archipel.graph.shapes import dims, dtype_of
from archipel.training.assembly import Assembly, port
from archipel.training.losses import Loss, mean
from archipel.training.optimizers import Optimizer

LOSS = "loss"
NEXT = ".next"


def step_graph(
    model: Model, loss: Loss, optimizer: Optimizer, trainable: str | Sequence[str] = "*", steps: int = 1
) -> Model:
    """A `train` program: one optimizer step on one batch.

    Inputs: the model's own, `label`, each trainable parameter under its own name, its state as `<parameter>.<state>`,
    the optimizer's hyperparameters (scalar float32). Outputs: `<parameter>.next`, `<parameter>.<state>.next`, and the
    metric `loss` (scalar, mean over the batch, before the step). `trainable` is a glob, or several, over parameter
    names; the others stay initializers. The loss is of the model's first output.

    The result's `initial` holds the trainable parameters' values. Raises TrainingError for names that collide or match
    nothing, AutodiffError where a gradient cannot be built.
    """
    if steps != 1:
        raise TrainingError(f"steps={steps}: one batch per graph is supported; call the graph {steps} times")
    rates = optimizer.hyperparameters
    specs = optimizer.init()
    work = Assembly(model, loss, trainable, [LOSS, *(rate.name for rate in rates)])
    states = [(name, spec, f"{name}.{spec.name}") for name in work.trainable for spec in specs]
    work.reserve([tensor for _, _, tensor in states])
    work.reserve([*(name + NEXT for name in work.trainable), *(tensor + NEXT for _, _, tensor in states)])
    op = work.op
    inputs: list[object] = list(work.ports())

    by_parameter: dict[str, dict[str, ir.Value]] = {name: {} for name in work.trainable}
    parameters = dict(zip(work.trainable, work.parameters))
    for name, spec, tensor in states:
        parameter = parameters[name]
        shape = [d for d in dims(parameter) if d is not None]
        value = op.input(tensor, dtype_of(parameter), shape)
        by_parameter[name][spec.name] = value
        inputs.append(port(State, value, tensor=tensor, lifetime="round", init=spec.init))
    scalars = {}
    for rate in rates:
        value = scalars[rate.name] = op.input(rate.name, ir.DataType.FLOAT, [])
        inputs.append(port(Hyperparameter, value, default=rate.default, minimum=rate.minimum, maximum=rate.maximum))

    with op.scope(LOSS):
        objective = mean(op, loss.values(op, work.output, work.label))
        seed = op.constant(np.ones((), dtype_of(objective).numpy()))
    gradients = differentiate(op, {objective: seed}, work.parameters)

    updates = []
    for (name, parameter), gradient in zip(parameters.items(), gradients):
        with op.scope(f"{name}.update"):
            updates.append((name, optimizer.update(op, parameter, gradient, by_parameter[name], scalars)))
    outputs: list[object] = []
    for name, updated in updates:
        moved = op.name_output(updated.parameter, name + NEXT)
        outputs.append(port(Parameter, moved, tensor=name))
    for name, updated in updates:
        for spec in specs:
            tensor = f"{name}.{spec.name}"
            kept = op.name_output(updated.state[spec.name], tensor + NEXT)
            outputs.append(port(State, kept, tensor=tensor, lifetime="round", init=spec.init))
    outputs.append(port(Metric, op.name_output(objective, LOSS), reduction="mean"))

    remove_dead_code(work.model.ir)
    share_subexpressions(work.model.ir)
    signature = Program(kind="train", inputs=tuple(inputs), outputs=tuple(outputs))  # type: ignore[arg-type]
    return Model(work.model.ir, signature=signature, initial=work.initial)
