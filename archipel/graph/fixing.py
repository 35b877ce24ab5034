"""Inputs and sizes that get one value for good, and what follows from that: branches that go, shapes that are known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import ArrayLike

from archipel.errors import GraphError
from archipel.graph.build import Builder
from archipel.graph.importing.cleaning import clean
from archipel.graph.report import ImportReport
from archipel.graph.shapes import dims, dtype_of, rename_size
from archipel.library_errors import one_line

_SWEEPS = 8  # a branch that goes makes shapes known, on which the next condition depends; exports nest four deep


def fix(model: ir.Model, values: Mapping[str, ArrayLike], sizes: Mapping[str, int]) -> ir.Model:
    """What `Model.fix` does, for a model without functions. Raises GraphError."""
    model = model.clone()
    inputs = {str(value.name): value for value in model.graph.inputs}
    for name in values:
        if name not in inputs:
            raise GraphError(f"fix: {name!r} is no input of the model; there are: {', '.join(inputs) or 'none'}")
    arrays = {name: _array(inputs[name], content) for name, content in values.items()}
    for name, size in {**_sizes_of(inputs, arrays), **sizes}.items():
        _set_size(model, name, size)
    op = Builder(model.graph, scope="fixed")
    for name, array in arrays.items():
        _replace(op, inputs[name], array, arrays)
    model = _simplified(model)
    report = ImportReport.of(model)
    if report is not None:
        fixed = [f"input {name!r}" for name in values] + [f"size {name!r} ({size})" for name, size in sizes.items()]
        report.with_notes(f"fixed: {', '.join(fixed)}").record(model)
    return model


def _array(value: ir.Value, content: ArrayLike) -> np.ndarray:
    """The content in the input's type. Raises GraphError if it does not fit type or shape."""
    given, wanted = np.asarray(content), dtype_of(value).numpy()
    array = given.astype(wanted)
    if not np.can_cast(given.dtype, wanted, "same_kind") and not np.array_equal(array, given):
        raise GraphError(f"fix: {value.name!r} is {wanted.name}, and the given {given.dtype} does not fit that")
    shape = dims(value)
    fits = array.ndim <= len(shape) and all(
        have == 1 or not isinstance(want, int) or have == want for have, want in zip(array.shape[::-1], shape[::-1])
    )
    if not fits:
        raise GraphError(f"fix: {value.name!r} has the shape {list(shape)}, and the given value {list(array.shape)}")
    return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)


def _sizes_of(inputs: Mapping[str, ir.Value], arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """The symbolic sizes that arrays of more than one element along an axis give."""
    found: dict[str, int] = {}
    for name, array in arrays.items():
        for have, want in zip(array.shape, dims(inputs[name])):
            if have != 1 and isinstance(want, str) and found.setdefault(want, have) != have:
                raise GraphError(f"fix: {name!r} has {have} for the size {want!r}, which is {found[want]} elsewhere")
    return found


def _set_size(model: ir.Model, name: str, size: int) -> None:
    free = {d for value in model.graph.inputs for d in dims(value) if isinstance(d, str)}
    if name not in free:
        raise GraphError(f"fix: no input has a free size {name!r}; there are: {', '.join(sorted(free)) or 'none'}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise GraphError(f"fix: the size {name!r} is {size!r}; give a whole number of 1 or more")
    rename_size(model.graph, name, size)


def _replace(op: Builder, value: ir.Value, array: np.ndarray, fixed: Mapping[str, np.ndarray]) -> None:
    """A constant takes the input's place, repeated along axes of a size that other inputs have at run time."""
    graph = op.graph
    parts: list[ir.Value] = []
    for axis, size in enumerate(dims(value)):
        places = [(v, i) for v in graph.inputs if v.name not in fixed for i, d in enumerate(dims(v)) if d == size]
        if isinstance(size, str) and places:
            source, place = places[0]
            parts.append(op.Shape(source, start=place, end=place + 1))
        else:
            parts.append(op.constant(np.array([size if isinstance(size, int) else array.shape[axis]], np.int64)))
    result = op.constant(array) if array.ndim else op.initializer("fixed", array)
    if any(part.const_value is None for part in parts):
        result = op.Expand(result, op.Concat(*parts, axis=0))
    elif array.ndim:
        wanted = [int(part.const_value.numpy()[0]) for part in parts if part.const_value is not None]
        result = op.constant(np.ascontiguousarray(np.broadcast_to(array, wanted)))
    result.shape = ir.Shape(dims(value)) if result.producer() is not None else result.shape
    graph.inputs.remove(value)
    value.replace_all_uses_with(result, replace_graph_outputs=False)
    made = [node for node in graph if node is not None and str(node.name).startswith("fixed/")]
    first = next(node for node in graph if node not in made)
    for node in made:
        graph.remove(node)
    graph.insert_before(first, made)


def _simplified(model: ir.Model) -> ir.Model:
    """The model with shapes inferred anew, constants folded and decided branches inlined, until nothing changes."""
    for _ in range(_SWEEPS):
        before = _size(model)
        try:
            model = ir.from_proto(
                onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=True, data_prop=True)
            )
            clean(model)
        except GraphError:
            raise
        except Exception as error:  # inference and folding raise exceptions of their own for sizes that do not fit
            raise GraphError(f"fix: the graph does not allow these values: {one_line(error)}") from error
        if _size(model) == before:
            break
    return model


def _size(model: ir.Model) -> int:
    return sum(1 for _ in model.graph.all_nodes())
