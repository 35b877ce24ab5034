"""gradient and vjp: what users call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from archipel.autodiff.reverse import differentiate
from archipel.errors import AutodiffError, NotDifferentiableError
from archipel.graph.build import Builder
from archipel.graph.functions import inline_functions
from archipel.graph.model import Model
from archipel.graph.passes import optimize
from archipel.graph.shapes import dims, dtype_of, is_float, static_size


def gradient(model: Model, of: str = "loss", wrt: Sequence[str] = ()) -> Model:
    """The model with its original outputs, then `<name>.grad` for each name in `wrt`.

    `of` names a floating-point value with one element; each gradient has the shape and type of what `wrt` names: a
    graph input, an initializer or an inner value. Where `of` does not depend on it, the gradient is zeros. Raises
    AutodiffError for an unknown name or an `of` with several elements, NotDifferentiableError for integers,
    MissingRuleError for an operator without rule.
    """
    result = model.copy()
    graph = result.ir.graph
    if not isinstance(of, str):
        raise AutodiffError(f"of={of!r}: a gradient is of one value, named by a string; vjp takes several")
    target = _float_value(graph, of, "of")
    if static_size(dims(target)) != 1:
        raise AutodiffError(
            f"of={of!r} has shape {list(dims(target))}, a gradient needs one element; reduce it to a scalar, or use "
            f"vjp(model, of=[{of!r}], ...), which takes a cotangent of that shape"
        )
    op = Builder(graph)
    seed = op.constant(np.ones([d for d in dims(target) if isinstance(d, int)], dtype_of(target).numpy()))
    return _emit(result, op, {target: seed}, wrt)


def vjp(model: Model, of: Sequence[str], wrt: Sequence[str]) -> Model:
    """The model with an input `<name>.cotangent` for each name in `of`, and outputs `<name>.grad` as in `gradient`.

    A cotangent has the shape and type of the value it belongs to.
    """
    targets = _names(of, "of")
    result = model.copy()
    graph = result.ir.graph
    op = Builder(graph)
    seeds = {}
    for name in targets:
        value = _float_value(graph, name, "of")
        cotangent = f"{name}.cotangent"
        if any(port.name == cotangent for port in graph.inputs):
            raise AutodiffError(f"the model already has an input {cotangent!r}; rename it")
        op.free_name(cotangent)
        shape = [f"{cotangent}_dim{i}" if d is None else d for i, d in enumerate(dims(value))]
        seeds[value] = op.input(cotangent, dtype_of(value), shape)
    return _emit(result, op, seeds, wrt)


def _emit(model: Model, op: Builder, seeds: dict[ir.Value, ir.Value], wrt: Sequence[str]) -> Model:
    names = _names(wrt, "wrt")
    values = [_float_value(op.graph, name, "wrt") for name in names]
    for name, found in zip(names, differentiate(op, seeds, values)):
        output = f"{name}.grad"
        while any(value.name == output for value in (*op.graph.outputs, *op.graph.inputs)):
            output += ".grad"
        op.free_name(output)
        op.name_output(found, output)
    inline_functions(model.ir)
    optimize(model.ir)
    # The result is no program any more: its outputs are more than the signature says.
    return Model(model.ir, initial=model.initial)


def _names(names: Sequence[str], argument: str) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if not isinstance(name, str):
            raise AutodiffError(f"{argument} holds {name!r}; expected names of values, as strings")
    if not listed:
        raise AutodiffError(f"{argument} is empty; name at least one value")
    twice = {name for name in listed if listed.count(name) > 1}
    if twice:
        raise AutodiffError(f"{argument} names {', '.join(sorted(twice))} twice")
    return listed


def _float_value(graph: ir.Graph, name: str, argument: str) -> ir.Value:
    found = next((value for value in graph.inputs if value.name == name), None) or graph.initializers.get(name)
    if found is None:
        found = next((value for node in graph for value in node.outputs if value.name == name), None)
    if found is None:
        known = [*(v.name for v in graph.inputs), *graph.initializers, *(v.name for v in graph.outputs)]
        raise AutodiffError(f"{argument}: the model has no value {name!r}; it has: {', '.join(map(str, known))}")
    if not is_float(found):
        raise NotDifferentiableError(
            f"{argument}: {name!r} is {dtype_of(found).numpy().name}; only floating-point values have gradients"
        )
    return found
