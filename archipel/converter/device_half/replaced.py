"""Weights that other tensors replace: adapters, or stacks of several models. The graph computes the weight of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import Parameter, State
from archipel.compression.deploy import evaluate_constants
from archipel.errors import ConversionError
from archipel.graph import Builder, Model
from archipel.graph.parameters import parameter_names, record_parameters
from archipel.graph.passes import remove_dead_code
from archipel.strategies.device import CHOICE, STACK


class Replacement(Protocol):
    """How one weight is made of other tensors."""

    @property
    def weight(self) -> str:
        """The name of the weight."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the float32 tensors that are trained in its place, by name."""

    @property
    def reads(self) -> tuple[State, ...]:
        """State that says how the weight is made of them."""

    def merge(self, op: Builder, weight: ir.Value, values: Mapping[str, ir.Value]) -> ir.Value:
        """Emit the weight, given its first value and what `shapes` and `reads` name."""


@dataclass(frozen=True)
class Adapted:
    """A model with replaced weights. `trained` are the tensors that train: their replacements, `full` weights, and
    `added` ones, which are parameters of the federation but no part of the model."""

    model: Model
    replaced: tuple[Replacement, ...]
    full: tuple[str, ...]
    added: tuple[str, ...] = ()

    @property
    def trained(self) -> list[str]:
        return [*(name for each in self.replaced for name in each.shapes), *self.added, *self.full]

    @property
    def derived(self) -> list[str]:
        """The tensors of the original model whose values change with training."""
        return [*(each.weight for each in self.replaced), *self.full]


def insert(model: Model, replacement: Replacement, initial: Mapping[str, np.ndarray]) -> None:
    """Let all readers of a weight read what is made of the tensors `initial`, which become initializers.

    Raises ConversionError for a name that the model has.
    """
    graph = model.ir.graph
    weight = graph.initializers[replacement.weight]
    # Taken before the merge is emitted, which may read the weight itself and must go on doing so.
    uses = list(weight.uses())
    op = Builder(graph, scope=f"{replacement.weight}.replaced")
    values = {name: add_initializer(op, name, content) for name, content in initial.items()}
    values |= {port.name: graph.initializers[port.name] for port in replacement.reads}
    with op.before(graph[0]):
        merged = replacement.merge(op, weight, values)
    for use in uses:
        use.node.replace_input_with(use.idx, merged)


def add_initializer(op: Builder, name: str, content: np.ndarray) -> ir.Value:
    """An initializer of exactly this name. Raises ConversionError where the model has such a tensor."""
    graph = op.main
    if name in graph.initializers or any(value.name == name for value in graph.inputs):
        raise ConversionError(f"the model already has a tensor called {name!r}; rename it")
    op.free_name(name)
    tensor = ir.tensor(content, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(content.shape))
    value.const_value = tensor
    graph.register_initializer(value)
    return value


def merge_into(refresh: Model, replaced: Sequence[Replacement], base: Mapping[str, np.ndarray]) -> Model:
    """A refresh program that reads what replaces weights in place of these. Changes the program's graph.

    `base` has the weights' first values by name.
    """
    signature, graph = refresh.program, refresh.ir.graph
    op = Builder(graph, scope="merge")
    ports: dict[str, Parameter | State] = {port.name: port for port in signature.inputs}  # type: ignore[misc]
    initial, read = dict(refresh.initial), dict[str, ir.Value]()
    with op.before(graph[0]):
        for each in replaced:
            weight = next(value for value in graph.inputs if value.name == each.weight)
            graph.inputs.remove(weight)
            del ports[each.weight], initial[each.weight]
            weight.name = op.unique(f"{each.weight}.merged")
            values = {name: op.input(name, ir.DataType.FLOAT, shape) for name, shape in each.shapes.items()}
            for port in each.reads:
                if port.name not in read:
                    read[port.name] = op.input(port.name, ir.DataType[port.dtype.upper()], [])
                    ports[port.name] = port
            merged = each.merge(op, op.constant(base[each.weight]), {**values, **read})
            weight.replace_all_uses_with(merged)
            for name, shape in each.shapes.items():
                ports[name] = Parameter(name=name, tensor=name, dtype="float32", shape=shape)
    inputs = tuple(ports[value.name or ""] for value in graph.inputs)
    remove_dead_code(refresh.ir)
    return Model(refresh.ir, signature=msgspec.structs.replace(signature, inputs=inputs), initial=initial)


def merge_back(model: Model) -> None:
    """Compute each replaced weight, and remove what replaces it. Changes the model."""
    graph = model.ir.graph
    names = [name for name in parameter_names(model.ir) if f"{name}.lora_a" in graph.initializers]
    # An adapted weight is read by its merge alone (`insert`), and so is a stack.
    merged = {name: next(iter(graph.initializers[name].uses())).node.outputs[0] for name in names}
    for name in [name for name in graph.initializers if name.endswith(STACK) and CHOICE in graph.initializers]:
        merged[name.removesuffix(STACK)] = next(iter(graph.initializers[name].uses())).node.outputs[0]
    if not merged:
        return
    contents = evaluate_constants(model.ir, [str(value.name) for value in merged.values()])
    op = Builder(graph)
    for name, value in merged.items():
        content = contents[str(value.name)]
        weight = graph.initializers.get(name)
        if weight is None:
            weight = add_initializer(op, name, content)
        value.replace_all_uses_with(weight)
        weight.const_value = ir.tensor(content, name=name)
    remove_dead_code(model.ir)
    known = {*parameter_names(model.ir), *merged}
    record_parameters(model.ir, [name for name in graph.initializers if name in known])
