"""`gradient` and `vjp`."""

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
    """Differentiate one value of a model with respect to others, in reverse mode.

    Arguments:
        model: any model; it stays as it is.
        of: name of a floating-point value with exactly one element, such as a loss.
        wrt: names of floating-point values: graph inputs, initializers (weights) or inner values.

    Returns a model with the outputs of `model`, followed by an output `<name>.grad` for each name in `wrt`, of the
    shape and type of that value; zeros where `of` does not depend on it. Another `.grad` is appended to a name that an
    input or output has already. The result computes in standard operators and can be differentiated again.

    Raises AutodiffError for an unknown name, a name given twice, an empty `wrt` or an `of` with several elements,
    NotDifferentiableError for integers and for a dependence that passes no derivative, MissingRuleError for an operator
    without a rule.

    Example:
        with_gradients = autodiff.gradient(model, of="loss", wrt=model.parameter_names)
    """
    result = model.copy()
    graph = result.ir.graph
    if not isinstance(of, str):
        raise AutodiffError(f"of={of!r}: gradient takes the name of one value, a string; vjp takes several")
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
    """Vector-Jacobian product: as `gradient`, for values of any shape, each multiplied by a cotangent.

    Arguments:
        model: any model; it stays as it is.
        of: names of floating-point values of any shape.
        wrt: names of floating-point values: graph inputs, initializers (weights) or inner values.

    Returns a model with an additional input `<name>.cotangent` for each name in `of`, of the shape and type of that
    value, and the outputs of `gradient`: the gradient of the sum of all products of `of` and cotangent elements.

    Raises the errors of `gradient`, and AutodiffError if an input is called `<name>.cotangent` already.

    Example:
        pulled = autodiff.vjp(model, of=["output"], wrt=["input"])
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
        # An input has no unnamed sizes: what the graph does not name gets a name here.
        shape = [f"{cotangent}_dim{i}" if d is None else d for i, d in enumerate(dims(value))]
        seeds[value] = op.input(cotangent, dtype_of(value), shape)
    return _emit(result, op, seeds, wrt)


def _emit(model: Model, op: Builder, seeds: dict[ir.Value, ir.Value], wrt: Sequence[str]) -> Model:
    names = _names(wrt, "wrt")
    values = [_float_value(op.graph, name, "wrt") for name in names]
    for name, grad in zip(names, differentiate(op, seeds, values)):
        output = f"{name}.grad"
        while any(value.name == output for value in (*op.graph.outputs, *op.graph.inputs)):
            output += ".grad"
        op.free_name(output)
        op.name_output(grad, output)
    # Functions with a rule of their own are differentiated by now; `optimize` takes no graph with functions.
    inline_functions(model.ir)
    optimize(model.ir)
    # No signature: a program's signature names all outputs, and the gradients are not among them.
    return Model(model.ir, initial=model.initial)


def _names(names: Sequence[str], argument: str) -> list[str]:
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


def _float_value(graph: ir.Graph, name: str, argument: str) -> ir.Value:
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
