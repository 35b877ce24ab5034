"""`stop_gradient`, `clip_gradient` and `straight_through`: custom gradients for parts of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import onnx_ir as ir

from archipel.autodiff.ports import float_value, listed_names
from archipel.errors import AutodiffError
from archipel.graph.build import Builder
from archipel.graph.markers import CLIP, STOP, STRAIGHT, define_marker, marker
from archipel.graph.model import Model
from archipel.graph.shapes import dims, is_float, same_shape
from archipel.graph.walk import levels, origins, values


def stop_gradient(model: Model, names: Sequence[str]) -> Model:
    """Make values constants to every derivative: no gradient and no tangent passes them.

    Arguments:
        model: any model; it stays as it is.
        names: names of floating-point values: graph inputs, initializers (weights) or inner values, also those in
            bodies of If, Loop and Scan.

    Returns the model with a marker behind each value, which all readers of the value read. The marker computes nothing,
    stays in saved files, and counts in derivatives of derivatives as well.

    Raises AutodiffError for an unknown name, a name given twice or no name, NotDifferentiableError for integers.

    Example:
        frozen = autodiff.stop_gradient(model, ["encoder.output"])
    """
    return _marked(model, dict.fromkeys(listed_names(names, "names"), ()), STOP, {})


def clip_gradient(model: Model, names: Sequence[str], limit: float, by: Literal["value", "norm"] = "value") -> Model:
    """Limit the gradient that passes values on its way back, inside the graph.

    Arguments:
        model: any model; it stays as it is.
        names: names of floating-point values: graph inputs, initializers (weights) or inner values, also those in
            bodies of If, Loop and Scan.
        limit: a number above 0.
        by: "value": each element of the gradient of each value is cut to [-limit, limit]; "norm": the whole gradient of
            each value, on its own, is scaled down to a Euclidean norm of at most `limit`.

    Returns the model with a marker behind each value, as `stop_gradient` does. What passes is the sum of the gradients
    of all readers of the value. Forward mode does not clip: a tangent is no gradient. Where a gradient computes a value
    again (what `checkpoint` marks, loops inside bodies), second derivatives limit each computation's part on its own.

    Raises the errors of `stop_gradient`, and AutodiffError for another `limit` or `by`.

    Example:
        tame = autodiff.clip_gradient(model, ["hidden"], limit=1.0, by="norm")
    """
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise AutodiffError(f"limit={limit!r}; expected a number above 0")
    if by not in ("value", "norm"):
        raise AutodiffError(f"by={by!r}; expected 'value' or 'norm'")
    settings = {"limit": ir.AttrFloat32("limit", float(limit)), "by": ir.AttrString("by", by)}
    return _marked(model, dict.fromkeys(listed_names(names, "names"), ()), CLIP, settings)


def straight_through(model: Model, names: Sequence[str] | Mapping[str, str]) -> Model:
    """Let the gradient of a value pass to what it was computed from as if it were the same, whatever is between: for
    rounding, signs and other steps (Bengio et al. 2013, section 3).

    Arguments:
        model: any model; it stays as it is.
        names: names of values that floating-point nodes compute; the gradient goes to the node's only floating-point
            input of the value's shape. Or a mapping from such a name to that of the value that its gradient goes to, of
            the same shape and type, any number of nodes before.

    Returns the model with a marker behind each value, as `stop_gradient` does.

    Raises the errors of `stop_gradient`, and AutodiffError where no such input or several exist, and for a value of
    another shape, or one that the named value does not depend on.

    Example:
        trainable = autodiff.straight_through(model, ["rounded"])
    """
    listed = listed_names(list(names) if isinstance(names, Mapping) else names, "names")
    sources = dict(names) if isinstance(names, Mapping) else {}
    pairs = {name: (sources[name],) if name in sources else () for name in listed}
    return _marked(model, pairs, STRAIGHT, {})


def _marked(model: Model, names: Mapping[str, tuple[str, ...]], op_type: str, settings: dict[str, ir.Attr]) -> Model:
    result = model.copy()
    define_marker(result.ir, op_type)
    main = Builder(result.ir.graph)
    for name, source in names.items():
        op = _level_of(main, name)
        value = float_value(op.graph, name, "names")
        inputs = [value] if op_type != STRAIGHT else [_source(main, value, *source), value]
        _insert(op, value, inputs, op_type, settings)
    return Model(result.ir, signature=result.signature, initial=result.initial)


def _level_of(main: Builder, name: str) -> Builder:
    """The builder of the graph, or of the body in it, that has a value of this name; `main` if there is none."""
    found = (level for level in levels(main.graph) if any(value.name == name for value in values(level)))
    level = next(found, main.graph)
    return main if level is main.graph else Builder(level, outer=main)


def _source(main: Builder, value: ir.Value, name: str | None = None) -> ir.Value:
    node, title = value.producer(), f"names: the gradient of {value.name!r}"
    if name is not None:
        source = float_value(_level_of(main, name).graph, name, "names")
        if source is value or source not in set(origins(value)):
            raise AutodiffError(f"{title} cannot go to {name!r}, which it does not depend on")
        if not _alike(source, value):
            raise AutodiffError(
                f"{title} cannot go to {name!r}: that is {source.dtype}{list(dims(source))}, "
                f"the value {value.dtype}{list(dims(value))}"
            )
        return source
    if node is None:
        raise AutodiffError(f"{title} cannot pass straight through: it is no result of a node")
    found = [v for v in dict.fromkeys(node.inputs) if v is not None and is_float(v) and _alike(v, value)]
    if len(found) != 1:
        count = "several inputs" if found else "no floating-point input"
        raise AutodiffError(
            f"{title}: {node.op_type} {node.name!r} has {count} of its shape; say where it goes, as in "
            f"{{{value.name!r}: 'the name of a value before it'}}"
        )
    return found[0]


def _alike(source: ir.Value, value: ir.Value) -> bool:
    return source.dtype == value.dtype and same_shape(dims(source), dims(value))


def _insert(op: Builder, value: ir.Value, inputs: list[ir.Value], op_type: str, settings: dict[str, ir.Attr]) -> None:
    readers, port = list(value.uses()), value.is_graph_output()
    node = marker(op, op_type, inputs, settings.values())
    out = node.outputs[0]
    maker, first = value.producer(), next(iter(op.graph), None)
    if maker is not None:
        op.graph.insert_after(maker, node)
    elif first is not None:
        op.graph.insert_before(first, node)
    else:
        op.graph.append(node)
    for use in readers:
        use.node.replace_input_with(use.idx, out)
    # An output keeps its name, and with it what is behind the marker: of="y" means the marked value.
    if port and maker is not None:
        name, value.name = value.name, op.unique(f"{value.name}/inner")
        out.name = name
        value.replace_all_uses_with(out, replace_graph_outputs=True)
        for place in range(len(inputs)):
            node.replace_input_with(place, inputs[place])
