"""What step and evaluation graphs share: a model's graph with label and weights as inputs, and names kept free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

import onnx_ir as ir

from archipel.bundle.roles import DType, Example, Label, Parameter, Port
from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.model import Model, TensorInfo
from archipel.graph.parameters import match, promote
from archipel.training.losses import Loss

LABEL = "label"
P = TypeVar("P", bound=Port)


class Assembly:
    """A copy of the model's graph under construction: `output` and `label` for the loss, `parameters` as inputs."""

    def __init__(self, model: Model, loss: Loss, trainable: str | Sequence[str], names: Iterable[str]) -> None:
        known = model.parameter_names
        if not known:
            raise TrainingError("the model has no parameters among its initializers; nothing can be trained")
        self.trainable = match(known, trainable)
        if not self.trainable:
            raise TrainingError("trainable is empty; name at least one parameter, or '*'")
        values = model.parameters
        self.initial = {name: values[name] for name in self.trainable}
        self.model = model.copy()
        self.graph = self.model.ir.graph
        self.op = Builder(self.graph)
        self.examples = [TensorInfo.of(value) for value in self.graph.inputs]
        self.output = self.graph.outputs[0]
        self.graph.outputs.clear()
        self.reserve([LABEL, *names])
        dtype, shape = loss.label(self.output)
        self.label = self.op.input(LABEL, dtype, shape)
        self.parameters = promote(self.model.ir, self.trainable)

    def reserve(self, names: Iterable[str]) -> None:
        """Make sure that inputs and outputs can have these names."""
        taken = {value.name for value in self.graph.inputs} | set(self.graph.initializers)
        for name in names:
            if name in taken:
                raise TrainingError(f"the model already has an input or weight called {name!r}; rename it")
            self.op.free_name(name)

    def ports(self) -> list[Example | Label | Parameter]:
        """Roles of the inputs there are so far, in the graph's order."""
        return [
            *(port(Example, info) for info in self.examples),
            port(Label, TensorInfo.of(self.label)),
            *(port(Parameter, TensorInfo.of(value), tensor=value.name) for value in self.parameters),
        ]


def port(role: type[P], value: TensorInfo | ir.Value, **meaning: object) -> P:
    """A port of this role for a graph input or output."""
    info = TensorInfo.of(value) if isinstance(value, ir.Value) else value
    return role(name=info.name, dtype=cast(DType, info.dtype), shape=info.shape, **meaning)
