"""The common part of step and evaluation graphs: label and weights as inputs, and a role for each port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np
import onnx_ir as ir

from archipel.autodiff.activity import influencing_values
from archipel.bundle.roles import (
    DType,
    Example,
    Input,
    Label,
    Lifetime,
    Parameter,
    Port,
    Program,
    ProgramKind,
    Result,
    State,
)
from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.functions import inline_functions
from archipel.graph.model import Model, TensorInfo
from archipel.graph.parameters import promote, trainable_names
from archipel.graph.passes import optimize
from archipel.graph.shapes import dtype_of
from archipel.training.losses import Loss

LABEL = "label"
NEXT = ".next"
P = TypeVar("P", bound=Port)


class Assembly:
    """A copy of the model's graph under construction: `output` and `label` for the loss, `parameters` as inputs."""

    def __init__(self, model: Model, loss: Loss, trainable: str | Sequence[str]) -> None:
        if not model.parameter_names:
            raise TrainingError("the model has no parameters among its initializers; nothing can be trained")
        names = trainable_names(model.ir, trainable)
        if not names:
            raise TrainingError("trainable is empty; name at least one parameter, or '*'")
        values = model.parameters
        self.initial = {name: values[name] for name in names}
        self.model = model.copy()
        self.graph = self.model.ir.graph
        self.op = Builder(self.graph)
        self.output = self.graph.outputs[0]
        # While the model has all of its outputs: the loss may name another of them in an error.
        dtype, shape = loss.label(self.output)
        self.graph.outputs.clear()
        self._inputs: dict[ir.Value, Input] = {value: port(Example, value) for value in self.graph.inputs}
        self._results: list[Result] = []
        # The order of the program's inputs: the model's own, the label, the parameters, then what options add.
        self.label = self.input(Label, LABEL, dtype, shape)
        self.parameters = promote(self.model.ir, names)
        """The trained parameters, as inputs."""
        self._inputs.update({value: port(Parameter, value, tensor=value.name) for value in self.parameters})

    @property
    def fields(self) -> list[ir.Value]:
        """The inputs of each batch, which is their first axis: examples and the label."""
        return [value for value in self.graph.inputs if isinstance(self._inputs[value], Example | Label)]

    def input(
        self, role: type[P], name: str, dtype: ir.DataType, shape: Sequence[int | str], **meaning: object
    ) -> ir.Value:
        """A graph input of this role and name, made at the first call."""
        for value, existing in self._inputs.items():
            if existing.name == name and type(existing) is role:
                return value
        self._reserve(name)
        value = self.op.input(name, dtype, shape)
        self._inputs[value] = cast(Input, port(role, value, **meaning))
        return value

    def state(self, tensor: str, like: ir.Value, init: float = 0.0) -> ir.Value:
        """An input for a tensor in the shape and type of `like` that is kept between the steps of a round."""
        shape = TensorInfo.of(like).shape
        return self.input(State, tensor, dtype_of(like), shape, tensor=tensor, lifetime="round", init=float(init))

    def scalar_state(self, tensor: str, dtype: ir.DataType, init: float, lifetime: Lifetime = "round") -> ir.Value:
        """As `state`, for one number."""
        return self.input(State, tensor, dtype, [], tensor=tensor, lifetime=lifetime, init=float(init))

    def make_state(self, value: ir.Value) -> None:
        """Turn an initializer into state that stays on the device and starts with its value."""
        name = value.name or ""
        if value.const_value is None:
            raise TrainingError(f"the model's tensor {name!r} has no value")
        self.initial[name] = np.asarray(value.const_value.numpy())  # taken before `promote`, which drops it
        promote(self.model.ir, [name])
        self._inputs[value] = port(State, value, tensor=name, lifetime="device", init=name)

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let all readers of `old` read `new`, of the same type and shape."""
        if new.shape is None:
            new.shape = old.shape
        old.replace_all_uses_with(new)
        if self.output is old:
            self.output = new

    def leave_idle(self) -> None:
        """Stop training parameters that the output does not depend on. As in PyTorch, weight decay spares them too."""
        reached = influencing_values(self.graph, [self.output])
        idle = [value for value in self.parameters if value not in reached]
        if len(idle) == len(self.parameters):
            names = [value.name for value in idle]
            raise TrainingError(
                f"the model's first output {self.output.name!r} depends on none of {names}, so no loss of it can train "
                "them; choose others with trainable=, or reorder the outputs"
            )
        self.parameters = [value for value in self.parameters if value in reached]
        # They stay inputs and get outputs of the same value, so that the program's ports are those of `trainable`.
        for value in idle:
            self.set_next(value, value)

    def set_next(self, before: ir.Value, after: ir.Value) -> None:
        """Make `after` the new value of the parameter or state `before`: the output `<tensor>.next`."""
        source = self._inputs[before]
        if not isinstance(source, Parameter | State):
            raise TrainingError(f"{before.name!r} is no parameter or state, so it has no next value")
        # The output has its input's meaning: tensor, lifetime and first value.
        meaning = {key: getattr(source, key) for key in source.__struct_fields__ if key not in Port.__struct_fields__}
        self.add_result(type(source), source.tensor + NEXT, after, **meaning)

    def add_result(self, role: type[P], name: str, value: ir.Value, **meaning: object) -> None:
        """Make `value` a graph output of this role."""
        self._reserve(name)
        self._results.append(cast(Result, port(role, self.op.name_output(value, name), **meaning)))

    def finish(self, kind: ProgramKind) -> Model:
        """The optimized graph with its signature."""
        # At the end, so that forward, gradients and optimizer share equal subexpressions.
        inline_functions(self.model.ir)
        optimize(self.model.ir)
        inputs = tuple(self._inputs[value] for value in self.graph.inputs)
        signature = Program(kind=kind, inputs=inputs, outputs=tuple(self._results))
        return Model(self.model.ir, signature=signature, initial=self.initial)

    def _reserve(self, name: str) -> None:
        # Inner values give way to a port's name; inputs and weights have names that users know.
        taken = [*self.graph.inputs, *self.graph.initializers.values(), *self.graph.outputs]
        if any(value.name == name for value in taken):
            raise TrainingError(f"the model already has an input or weight called {name!r}; rename it")
        self.op.free_name(name)


def port(role: type[P], value: ir.Value, **meaning: object) -> P:
    """A port of this role for a graph input or output."""
    info = TensorInfo.of(value)
    return role(name=info.name, dtype=cast(DType, info.dtype), shape=info.shape, **meaning)
