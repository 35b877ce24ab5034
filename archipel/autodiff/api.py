"""`gradient`, `vjp`, `jvp` and `hessian_vector`."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from archipel.autodiff.forward import push_forward, second_sweep
from archipel.autodiff.overrides import Overrides, opened
from archipel.autodiff.ports import finish, input_like, is_taken, listed_names, named_values, scalar_target
from archipel.autodiff.reverse import differentiate
from archipel.errors import AutodiffError
from archipel.graph.build import Builder
from archipel.graph.model import Model


def gradient(model: Model, of: str = "loss", wrt: Sequence[str] = (), *, rules: Overrides | None = None) -> Model:
    """Differentiate one value of a model with respect to others, in reverse mode.

    Arguments:
        model: any model; it stays as it is.
        of: name of a floating-point value with exactly one element, such as a loss.
        wrt: names of floating-point values: graph inputs, initializers (weights) or inner values.
        rules: rules for this call alone: name of a node, or (domain, operator) of an operator or a model-local function
            -> gradient rule, as `rule` takes it. They count for the model's own nodes, also those in bodies of If, Loop
            and Scan, and not for those that rules emit.

    Returns a model with the outputs of `model`, followed by an output `<name>.grad` for each name in `wrt`, of the
    shape and type of that value; zeros where `of` does not depend on it. Another `.grad` is appended to a name that an
    input or output has already. The result computes in standard operators and can be differentiated again.

    Raises AutodiffError for an unknown name, a name given twice, a key of `rules` that fits no node, an empty `wrt` or
    an `of` with several elements, NotDifferentiableError for integers and for a dependence that passes no derivative,
    MissingRuleError for an operator without a rule.

    Example:
        with_gradients = autodiff.gradient(model, of="loss", wrt=model.parameter_names)
    """
    result = opened(model, rules)
    op = Builder(result.ir.graph)
    target, seed = scalar_target(
        op,
        of,
        "gradient takes the name of one value, a string; vjp takes several",
        f"a gradient needs one element; reduce it to a scalar, or use vjp(model, of=[{of!r}], ...), which takes a "
        "cotangent of that shape",
    )
    values = named_values(op, wrt, "wrt")
    return finish(result, op, listed_names(wrt, "wrt"), differentiate(op, {target: seed}, values), "grad")


def vjp(model: Model, of: Sequence[str], wrt: Sequence[str], *, rules: Overrides | None = None) -> Model:
    """Vector-Jacobian product: as `gradient`, for values of any shape, each multiplied by a cotangent.

    Arguments:
        model: any model; it stays as it is.
        of: names of floating-point values of any shape.
        wrt: names of floating-point values: graph inputs, initializers (weights) or inner values.
        rules: as for `gradient`.

    Returns a model with an additional input `<name>.cotangent` for each name in `of`, of the shape and type of that
    value, and the outputs of `gradient`: the gradient of the sum of all products of `of` and cotangent elements.

    Raises the errors of `gradient`, and AutodiffError if an input is called `<name>.cotangent` already.

    Example:
        pulled = autodiff.vjp(model, of=["output"], wrt=["input"])
    """
    result = opened(model, rules)
    op = Builder(result.ir.graph)
    targets, values = named_values(op, of, "of"), named_values(op, wrt, "wrt")
    for target in targets:
        if is_taken(op, f"{target.name}.cotangent"):
            raise AutodiffError(f"the model already has an input or output '{target.name}.cotangent'; rename it")
    seeds = {target: input_like(op, target, "cotangent") for target in targets}
    return finish(result, op, listed_names(wrt, "wrt"), differentiate(op, seeds, values), "grad")


def jvp(model: Model, of: Sequence[str], wrt: Sequence[str], *, rules: Overrides | None = None) -> Model:
    """Jacobian-vector product, forward mode: how values change when others move along a tangent.

    Arguments:
        model: any model; it stays as it is.
        of: names of floating-point values of any shape.
        wrt: names of floating-point values: graph inputs, initializers (weights) or inner values.
        rules: as for `gradient`.

    Returns a model with an additional input `<name>.tangent` for each name in `wrt`, of the shape and type of that
    value, and the outputs of `model`, followed by an output `<name>.tangent` for each name in `of`: its derivative
    along all tangents together; zeros where it depends on none of `wrt`. Another `.tangent` is appended to a name that
    an input or output has already, so that a jvp of a jvp has the tangent `x.tangent.tangent`.

    Raises the errors of `gradient`, and MissingRuleError for an operator whose gradient holds a node without a rule.

    Example:
        pushed = autodiff.jvp(model, of=["output"], wrt=["input"])
    """
    result = opened(model, rules)
    op = Builder(result.ir.graph)
    targets, values = named_values(op, of, "of"), named_values(op, wrt, "wrt")
    tangents = {value: input_like(op, value, "tangent") for value in values}
    return finish(result, op, listed_names(of, "of"), push_forward(op, targets, tangents), "tangent")


def hessian_vector(model: Model, of: str = "loss", wrt: Sequence[str] = (), *, rules: Overrides | None = None) -> Model:
    """Hessian-vector product: the second derivatives of one value, times a tangent of all values in `wrt` together.

    It is the gradient of the inner product of gradient and tangent (Pearlmutter, Fast Exact Multiplication by the
    Hessian, 1994): the Hessian is symmetric, so this is the derivative of the gradient along the tangent.

    Arguments:
        model: any model; it stays as it is.
        of: name of a floating-point value with exactly one element, such as a loss.
        wrt: names of floating-point values: graph inputs, initializers (weights) or inner values.
        rules: as for `gradient`.

    Returns a model with an additional input `<name>.tangent` for each name in `wrt` and the outputs of `model`,
    followed by an output `<name>.hvp` for each name in `wrt`, both of the shape and type of that value. Kinks, as of a
    Relu, have no part in it. Names that are taken get another `.tangent` or `.hvp`.

    Raises the errors of `gradient`, and MissingRuleError for an operator whose gradient holds a node without a rule.

    Example:
        curvature = autodiff.hessian_vector(model, of="loss", wrt=model.parameter_names)
    """
    result = opened(model, rules)
    op = Builder(result.ir.graph)
    target, seed = scalar_target(
        op,
        of,
        "hessian_vector takes the name of one value, a string",
        "a second derivative needs one element; reduce it to a scalar",
    )
    # A rule may replace the output of its node; the copy of it stays for the second sweep.
    values = [_with_own_copy(op, value) for value in named_values(op, wrt, "wrt")]
    names = listed_names(wrt, "wrt")
    tangents = [input_like(op, value, "tangent", name) for value, name in zip(values, names)]
    # Each is a value of its own: the gradients of two values may be one.
    gradients = [op.Identity(value) for value in differentiate(op, {target: seed}, values)]
    with second_sweep("hessian_vector"):
        products = differentiate(op, dict(zip(gradients, tangents)), values, flat_steps=True)
    return finish(result, op, names, products, "hvp")


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
