"""Names in the arguments of transformations, and the inputs and outputs that transformations add to a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from archipel.autodiff.overrides import forget_rules
from archipel.errors import AutodiffError, NotDifferentiableError
from archipel.graph.build import Builder
from archipel.graph.functions import inline_functions
from archipel.graph.liveness import finish_early
from archipel.graph.markers import DOMAIN, MARKERS
from archipel.graph.model import Model
from archipel.graph.parameters import parameter_names
from archipel.graph.passes import optimize, remove_dead_code
from archipel.graph.passes.constants import hide_contents
from archipel.graph.shapes import dims, dtype_of, is_float, static_size


def scalar_target(op: Builder, of: str, one_name: str, one_element: str) -> tuple[ir.Value, ir.Value]:
    """The value called `of`, and its cotangent: one. The texts say what an error says of other arguments."""
    if not isinstance(of, str):
        raise AutodiffError(f"of={of!r}: {one_name}")
    target = float_value(op.graph, of, "of")
    if static_size(dims(target)) != 1:
        raise AutodiffError(f"of={of!r} has shape {list(dims(target))}, {one_element}")
    ones = np.ones([d for d in dims(target) if isinstance(d, int)], dtype_of(target).numpy())
    return target, op.constant(ones)


def input_like(op: Builder, value: ir.Value, suffix: str, name: str | None = None) -> ir.Value:
    """A new input of the value's shape and type, called `<name>.<suffix>`, by default after the value."""
    name = free_name(op, name or str(value.name), suffix)
    # An input has no unnamed sizes: what the graph does not name gets a name here.
    shape = [f"{name}_dim{i}" if d is None else d for i, d in enumerate(dims(value))]
    return op.input(name, dtype_of(value), shape)


def finish(model: Model, op: Builder, names: Sequence[str], results: Sequence[ir.Value], suffix: str) -> Model:
    """The model with `results` as outputs `<name>.<suffix>`."""
    for name, result in zip(names, results):
        op.name_output(result, free_name(op, name, suffix))
    forget_rules(model.ir.graph)
    remove_dead_code(model.ir)  # the nodes of forward mode that only stand for others
    # Functions with a rule of their own are differentiated by now. Markers stay for the next gradient; to `optimize`,
    # which takes no graph with functions, they are operators that it does not know.
    inline_functions(model.ir, keep=MARKERS)
    with _without_functions(model.ir), hide_contents(model.ir.graph, parameter_names(model.ir)):
        optimize(model.ir)  # contents are hidden so that weights that are zero now stay
    finish_early(model.ir.graph, model.ir.graph.outputs)
    # No signature: a program's signature names all outputs, and the derivatives are not among them.
    return Model(model.ir, initial=model.initial)


@contextmanager
def _without_functions(model: ir.Model) -> Iterator[None]:
    kept = dict(model.functions)
    model.functions.clear()
    try:
        yield
    finally:
        used = {node.op_identifier() for node in model.graph.all_nodes()}
        model.functions.update({key: function for key, function in kept.items() if key in used})
        if not model.functions:
            model.graph.opset_imports.pop(DOMAIN, None)


def free_name(op: Builder, name: str, suffix: str) -> str:
    """`<name>.<suffix>`, with as many suffixes more as it takes to be no port's name; inner values give way to it."""
    name += f".{suffix}"
    while is_taken(op, name):
        name += f".{suffix}"
    op.free_name(name)
    return name


def is_taken(op: Builder, name: str) -> bool:
    """Whether an input, output or initializer has this name."""
    return name in op.graph.initializers or any(v.name == name for v in (*op.graph.outputs, *op.graph.inputs))


def named_values(op: Builder, names: Sequence[str], argument: str) -> list[ir.Value]:
    return [float_value(op.graph, name, argument) for name in listed_names(names, argument)]


def listed_names(names: Sequence[str], argument: str) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names)  # a string is one name, not its letters
    for name in listed:
        if not isinstance(name, str):
            raise AutodiffError(f"{argument} holds {name!r}; expected names of values, as strings")
    if not listed:
        raise AutodiffError(f"{argument} is empty; name at least one value")
    twice = {name for name in listed if listed.count(name) > 1}
    if twice:
        raise AutodiffError(f"{argument} names {', '.join(sorted(twice))} twice")
    return listed


def float_value(graph: ir.Graph, name: str, argument: str) -> ir.Value:
    value = next((port for port in graph.inputs if port.name == name), None) or graph.initializers.get(name)
    if value is None:
        value = next((result for node in graph for result in node.outputs if result.name == name), None)
    if value is None:
        known = [*(v.name for v in graph.inputs), *graph.initializers, *(v.name for v in graph.outputs)]
        raise AutodiffError(f"{argument}: the model has no value {name!r}; it has: {', '.join(map(str, known))}")
    if not is_float(value):
        raise NotDifferentiableError(
            f"{argument}: {name!r} is {dtype_of(value).numpy().name}; only floating-point values have gradients"
        )
    return value
