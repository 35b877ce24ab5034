"""`gradient`, `vjp`, `jvp` and `hessian_vector`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from archipel.autodiff.forward import push_forward, second_sweep
from archipel.autodiff.reverse import differentiate
from archipel.errors import AutodiffError, NotDifferentiableError
from archipel.graph.build import Builder
from archipel.graph.functions import inline_functions
from archipel.graph.model import Model
from archipel.graph.parameters import parameter_names
from archipel.graph.passes import optimize
from archipel.graph.passes.constants import hide_contents
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
    op = Builder(result.ir.graph)
    target, seed = _one_element(
        op,
        of,
        "gradient takes the name of one value, a string; vjp takes several",
        f"a gradient needs one element; reduce it to a scalar, or use vjp(model, of=[{of!r}], ...), which takes a "
        "cotangent of that shape",
    )
    values = _values(op, wrt, "wrt")
    return _finish(result, op, _names(wrt, "wrt"), differentiate(op, {target: seed}, values), "grad")


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
    result = model.copy()
    op = Builder(result.ir.graph)
    targets, values = _values(op, of, "of"), _values(op, wrt, "wrt")
    for target in targets:
        if _is_taken(op, f"{target.name}.cotangent"):
            raise AutodiffError(f"the model already has an input or output '{target.name}.cotangent'; rename it")
    seeds = {target: _input_like(op, target, "cotangent") for target in targets}
    return _finish(result, op, _names(wrt, "wrt"), differentiate(op, seeds, values), "grad")


def jvp(model: Model, of: Sequence[str], wrt: Sequence[str]) -> Model:
    """Jacobian-vector product, forward mode: how values change when others move along a tangent.

    Arguments:
        model: any model; it stays as it is.
        of: names of floating-point values of any shape.
        wrt: names of floating-point values: graph inputs, initializers (weights) or inner values.

    Returns a model with an additional input `<name>.tangent` for each name in `wrt`, of the shape and type of that
    value, and the outputs of `model`, followed by an output `<name>.tangent` for each name in `of`: its derivative
    along all tangents together; zeros where it depends on none of `wrt`. Another `.tangent` is appended to a name that
    an input or output has already, so that a jvp of a jvp has the tangent `x.tangent.tangent`.

    Raises the errors of `gradient`, and MissingRuleError for an operator whose gradient holds a node without a rule.

    Example:
        pushed = autodiff.jvp(model, of=["output"], wrt=["input"])
    """
    result = model.copy()
    op = Builder(result.ir.graph)
    targets, values = _values(op, of, "of"), _values(op, wrt, "wrt")
    tangents = {value: _input_like(op, value, "tangent") for value in values}
    return _finish(result, op, _names(of, "of"), push_forward(op, targets, tangents), "tangent")


def hessian_vector(model: Model, of: str = "loss", wrt: Sequence[str] = ()) -> Model:
    """Hessian-vector product: the second derivatives of one value, times a tangent of all values in `wrt` together.

    It is the gradient of the inner product of gradient and tangent (Pearlmutter, Fast Exact Multiplication by the
    Hessian, 1994): the Hessian is symmetric, so this is the derivative of the gradient along the tangent.

    Arguments:
        model: any model; it stays as it is.
        of: name of a floating-point value with exactly one element, such as a loss.
        wrt: names of floating-point values: graph inputs, initializers (weights) or inner values.

    Returns a model with an additional input `<name>.tangent` for each name in `wrt` and the outputs of `model`,
    followed by an output `<name>.hvp` for each name in `wrt`, both of the shape and type of that value. Kinks, as of a
    Relu, have no part in it. Names that are taken get another `.tangent` or `.hvp`.

    Raises the errors of `gradient`, and MissingRuleError for an operator whose gradient holds a node without a rule.

    Example:
        curvature = autodiff.hessian_vector(model, of="loss", wrt=model.parameter_names)
    """
    result = model.copy()
    op = Builder(result.ir.graph)
    target, seed = _one_element(
        op,
        of,
        "hessian_vector takes the name of one value, a string",
        "a second derivative needs one element; reduce it to a scalar",
    )
    # A rule may replace the output of its node; the copy of it stays for the second sweep.
    values = [_with_own_copy(op, value) for value in _values(op, wrt, "wrt")]
    names = _names(wrt, "wrt")
    tangents = [_input_like(op, value, "tangent", name) for value, name in zip(values, names)]
    # Each is a value of its own: the gradients of two values may be one.
    gradients = [op.Identity(value) for value in differentiate(op, {target: seed}, values)]
    with second_sweep("hessian_vector"):
        products = differentiate(op, dict(zip(gradients, tangents)), values, flat_steps=True)
    return _finish(result, op, names, products, "hvp")


def _one_element(op: Builder, of: str, one_name: str, one_element: str) -> tuple[ir.Value, ir.Value]:
    """The value called `of`, and its cotangent: one. The texts say what an error says of other arguments."""
    if not isinstance(of, str):
        raise AutodiffError(f"of={of!r}: {one_name}")
    target = _float_value(op.graph, of, "of")
    if static_size(dims(target)) != 1:
        raise AutodiffError(f"of={of!r} has shape {list(dims(target))}, {one_element}")
    ones = np.ones([d for d in dims(target) if isinstance(d, int)], dtype_of(target).numpy())
    return target, op.constant(ones)


def _with_own_copy(op: Builder, value: ir.Value) -> ir.Value:
    """A copy that the readers of an inner value read instead; other values as they are."""
    node = value.producer()
    if node is None:
        return value
    readers = list(value.uses())
    with op.after(node):
        copy = op.Identity(value)
    for reader in readers:
        reader.node.replace_input_with(reader.idx, copy)
    return copy


def _input_like(op: Builder, value: ir.Value, suffix: str, name: str | None = None) -> ir.Value:
    """A new input of the value's shape and type, called `<name>.<suffix>`, by default after the value."""
    name = _free_name(op, name or str(value.name), suffix)
    # An input has no unnamed sizes: what the graph does not name gets a name here.
    shape = [f"{name}_dim{i}" if d is None else d for i, d in enumerate(dims(value))]
    return op.input(name, dtype_of(value), shape)


def _finish(model: Model, op: Builder, names: Sequence[str], results: Sequence[ir.Value], suffix: str) -> Model:
    """The model with `results` as outputs `<name>.<suffix>`."""
    for name, result in zip(names, results):
        op.name_output(result, _free_name(op, name, suffix))
    # Functions with a rule of their own are differentiated by now; `optimize` takes no graph with functions.
    inline_functions(model.ir)
    with hide_contents(model.ir.graph, parameter_names(model.ir)):  # weights that are zero now are to stay
        optimize(model.ir)
    # No signature: a program's signature names all outputs, and the derivatives are not among them.
    return Model(model.ir, initial=model.initial)


def _free_name(op: Builder, name: str, suffix: str) -> str:
    """`<name>.<suffix>`, with as many suffixes more as it takes to be no port's name; inner values give way to it."""
    name += f".{suffix}"
    while _is_taken(op, name):
        name += f".{suffix}"
    op.free_name(name)
    return name


def _is_taken(op: Builder, name: str) -> bool:
    """Whether an input, output or initializer has this name."""
    return name in op.graph.initializers or any(v.name == name for v in (*op.graph.outputs, *op.graph.inputs))


def _values(op: Builder, names: Sequence[str], argument: str) -> list[ir.Value]:
    return [_float_value(op.graph, name, argument) for name in _names(names, argument)]


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
