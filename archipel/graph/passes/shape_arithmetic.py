"""Shapes computed in the graph become constants: computed here, on numbers and names of sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.opset import OPSET
from archipel.graph.passes.base import GraphPass
from archipel.graph.shapes import Dim, constant_array, dims, dtype_of, infer_node, same_dim, same_shape
from archipel.graph.walk import bodies

_MAX_CONTENT = 64  # elements; longer integer vectors are no shapes
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


class FoldShapes(GraphPass):
    """Replace computed shapes by constants, as far as they follow from the inputs' sizes.

    Evaluates Shape, Slice, Gather, Concat, Squeeze, Unsqueeze and arithmetic on sizes, some of which are only names.
    Reshape gets a constant target with -1 for one symbolic size, Expand one with 1, which keeps the input's size.
    Shapes of later nodes become known on the way.
    """

    def change(self, model: ir.Model) -> bool:
        main = Builder(model.graph)
        known: dict[ir.Value, list[Dim]] = {}  # contents of integer values
        refined: set[ir.Value] = set()  # values whose shape is better known than before: their readers infer again
        modified = _sweep(main, known, refined)
        for body in model.graph.subgraphs():
            modified |= _sweep(Builder(body, outer=main), known, refined)
        return modified


fold_shapes = FoldShapes()


def _sweep(op: Builder, known: dict[ir.Value, list[Dim]], refined: set[ir.Value]) -> bool:
    modified = False
    for node in list(op.graph):
        if node.domain != "":
            continue
        # One sweep in the graph's order: what is refined here is known when its readers come.
        if any(value in refined for value in node.inputs):
            _infer(node, refined)
        if node.op_type in ("Reshape", "Expand"):
            modified |= _set_target(op, node, known, refined)
        output = node.outputs[0]
        if len(node.outputs) != 1 or output.dtype not in _INTEGERS or node.op_type == "Constant":
            continue
        content = _follow(node, known)
        if content is None or len(content) > _MAX_CONTENT:
            continue
        known[output] = content
        if all(isinstance(d, int) for d in content) and output.shape is not None and not output.is_graph_output():
            array = np.array(content, dtype_of(output).numpy()).reshape(() if not dims(output) else (-1,))
            output.replace_all_uses_with(op.constant(array))
            modified = True
    return modified


def _infer(node: ir.Node, refined: set[ir.Value]) -> None:
    """Infer the node's shapes again; sizes known before stay where inference knows less."""
    if bodies(node):
        return
    before = [value.shape for value in node.outputs]
    infer_node(node, OPSET)
    for value, shape in zip(node.outputs, before):
        _refine(value, [d if isinstance(d, int) else d.value for d in shape] if shape is not None else None, refined)


def _refine(value: ir.Value, shape: Sequence[Dim] | None, refined: set[ir.Value]) -> None:
    """Merge the sizes known from `value.shape` and from `shape` (known before) into `value.shape`."""
    if shape is None or (value.shape is not None and len(value.shape) != len(shape)):
        refined.add(value)
        return
    have = dims(value) if value.shape is not None else [None] * len(shape)
    joined = [a if isinstance(a, int) or b is None else b for a, b in zip(have, shape)]
    value.shape = ir.Shape(joined)
    if joined != list(shape):
        refined.add(value)


def _follow(node: ir.Node, known: dict[ir.Value, list[Dim]]) -> list[Dim] | None:
    """The content of the node's output, an integer vector or scalar, with names or None for sizes that are not fixed;
    None if nothing is known of it."""
    source = node.inputs[0] if node.inputs else None
    if node.op_type == "Shape":
        if source is None or source.shape is None:
            return None
        return list(dims(source))[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
    contents = [None if value is None else _content(value, known) for value in node.inputs]
    # A scalar is a list of one element here as well: the rank is in the output's shape.
    first = contents[0] if contents else None
    if first is None or source is None:
        return None
    if node.op_type in ("Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity"):
        return first if node.outputs[0].shape is not None and len(node.outputs[0].shape) <= 1 else None
    if node.op_type == "Concat":
        parts = [part for part in contents if part is not None]  # all must be known, or positions would shift
        return [d for part in parts for d in part] if len(parts) == len(contents) else None
    settings = [constant_array(value) for value in node.inputs[1:] if value is not None]
    if node.op_type == "Gather" and settings[0] is not None and node.attributes.get_int("axis", 0) == 0:
        places = settings[0].reshape(-1)
        return [first[place] for place in places] if (places < len(first)).all() else None
    if node.op_type == "Slice" and all(setting is not None and setting.size == 1 for setting in settings):
        start, end, *rest = (int(setting.reshape(-1)[0]) for setting in settings if setting is not None)
        return first[slice(start, end, rest[1] if len(rest) > 1 else 1)]
    if node.op_type in ("Add", "Sub", "Mul", "Div") and contents[1] is not None:
        return _arithmetic(node.op_type, first, contents[1])
    return None


def _content(value: ir.Value, known: dict[ir.Value, list[Dim]]) -> list[Dim] | None:
    if value in known:
        return known[value]
    array = constant_array(value) if value.dtype in _INTEGERS else None
    return None if array is None or array.size > _MAX_CONTENT or array.ndim > 1 else [int(v) for v in array.reshape(-1)]


def _arithmetic(op_type: str, a: list[Dim], b: list[Dim]) -> list[Dim] | None:
    if len(a) != len(b) and 1 not in (len(a), len(b)):
        return None
    size = max(len(a), len(b))
    return [_calculate(op_type, x, y) for x, y in zip(a * (size // len(a)), b * (size // len(b)))]


def _calculate(op_type: str, a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        if op_type == "Div":
            return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # towards zero
        return {"Add": a + b, "Sub": a - b, "Mul": a * b}[op_type]
    # With names only x + 0, x - 0, x * 1, x / 1, 0 + x and 1 * x have a known result.
    neutral = 0 if op_type in ("Add", "Sub") else 1
    if b == neutral:
        return a
    return b if a == neutral and op_type in ("Add", "Mul") else None


def _set_target(op: Builder, node: ir.Node, known: dict[ir.Value, list[Dim]], refined: set[ir.Value]) -> bool:
    """Give a Reshape or Expand a constant target if at most its symbolic sizes are open. Returns whether it did."""
    source, target, output = node.inputs[0], node.inputs[1], node.outputs[0]
    if source is None or target is None or constant_array(target) is not None:
        return False
    content = _content(target, known)
    if content is None or source.shape is None:
        return False
    free = [place for place, d in enumerate(content) if not isinstance(d, int)]
    if node.op_type == "Reshape":
        # One -1 at most. Sizes below 1 are Reshape's own codes (-1, 0 for "as in the input"), not sizes.
        if len(free) > 1 or any(isinstance(d, int) and d < 1 for d in content):
            return False
        filled = [-1 if place in free else d for place, d in enumerate(content)]
        node.attributes.pop("allowzero", None)
    else:
        # Expand leaves an axis as it is where the target is 1, so a symbolic size is no problem if the input has it.
        have = [1] * (len(content) - len(source.shape)) + list(dims(source))
        if len(have) != len(content) or not all(same_dim(have[place], content[place]) for place in free):
            return False
        filled = [1 if place in free else d for place, d in enumerate(content)]
        content = [h if w == 1 else w for h, w in zip(have, content)]
    node.replace_input_with(1, op.constant(np.array(filled, np.int64)))
    _refine(output, None if output.shape is None else dims(output), refined)
    if output.shape is None or not same_shape(dims(output), content):
        output.shape = ir.Shape(
            [a if isinstance(a, int) or b is None else b for a, b in zip(content, dims(output))]
            if output.shape is not None
            else content
        )
        refined.add(output)
    return True
