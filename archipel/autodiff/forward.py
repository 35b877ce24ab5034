"""Forward mode, as the transpose of the transpose: a vector-Jacobian product is linear in its cotangents, so its
derivative with respect to them, taken in reverse, is the Jacobian-vector product.

There is no second rule book: every reverse rule whose nodes have rules themselves has a forward derivative. Nodes of
the first sweep that only the cotangents' values reach are dead afterwards.

Radul et al., You Only Linearize Once (2023), takes the opposite way: reverse mode as the transpose of forward mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import onnx_ir as ir

from archipel.autodiff.reverse import differentiate
from archipel.errors import MissingRuleError
from archipel.graph.build import Builder


def push_forward(op: Builder, targets: Sequence[ir.Value], tangents: Mapping[ir.Value, ir.Value]) -> list[ir.Value]:
    """Emit the directional derivative of each target.

    Arguments:
        op: builder of the graph; it appends nodes to it.
        targets: floating-point values of the graph.
        tangents: value -> its tangent, of the value's shape and type.

    Returns one tangent for each target, of its shape and type; zeros where it depends on no value of `tangents`.

    Raises the errors of `differentiate`, and MissingRuleError for an operator whose gradient cannot be differentiated.
    """
    # Each is a value of its own: equal constants are one initializer, and equal gradients may be one value.
    cotangents = [op.Identity(op.full_like(target, 0.0)) for target in targets]
    gradients = differentiate(op, dict(zip(targets, cotangents)), list(tangents), again=False)
    seeds = {op.Identity(gradient): tangent for gradient, tangent in zip(gradients, tangents.values())}
    with second_sweep("jvp"):
        return differentiate(op, seeds, cotangents)


@contextmanager
def second_sweep(title: str) -> Iterator[None]:
    """A context: an error for a missing rule says that the rule is one for a node of a gradient, not of the model."""
    try:
        yield
    except MissingRuleError as error:
        raise MissingRuleError(
            f"{title} differentiates a gradient, and a node of it has no derivative: {error}"
        ) from None
