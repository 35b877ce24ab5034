"""`chain` makes a model of transforms, `put_before` puts them in front of one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import onnx_ir as ir

from archipel.errors import PreprocessingError
from archipel.graph.build import Builder
from archipel.graph.model import Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.parameters import parameter_names, record_parameters
from archipel.graph.passes.constants import EXACT
from archipel.graph.shapes import Dim, dims, is_float, rename_size
from archipel.preprocessing.description import record
from archipel.preprocessing.raw import Raw
from archipel.preprocessing.transform import Transform, shape_text

SCOPE = "preprocess"
"""What the names of the nodes begin with."""


_FLOATS = {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}


class Branch(NamedTuple):
    """The transforms of one input, behind what it is before them."""

    raw: Raw
    transforms: tuple[Transform, ...]


def chain(transforms: Sequence[Transform], *, floats: str = "float32") -> Model:
    """The model that computes transforms: raw inputs to prepared ones.

    Arguments:
        transforms: a `Raw` and what follows it; for several inputs several of those, one after the other.
        floats: "float32" or "float64": the type to compute in.

    Returns a model without parameters. Its inputs are called "input" (or "input_0", "input_1", ...) or as their `Raw`
    says, its outputs "output" (or "output_0", ...).

    Raises PreprocessingError, which names the transform, for one that does not fit what comes before it.

    Example:
        prepare = preprocessing.chain([Raw("uint8", ("batch", "height", "width", 3)), Resize((32, 32)), Scale()])
    """
    if floats not in _FLOATS:
        raise PreprocessingError(f"chain: floats is float32 or float64, is {floats!r}")
    element = _FLOATS[floats]
    branches = _branches(transforms, None)
    graph = ir.Graph([], [], nodes=[], name=SCOPE, opset_imports={"": OPSET})
    op = Builder(graph, scope=SCOPE)
    several = len(branches) > 1
    values = [
        op.input(b.raw.name or b.raw.input or (f"input_{i}" if several else "input"), b.raw.element, b.raw.shape)
        for i, b in enumerate(branches)
    ]
    names = [str(value.name) for value in values]
    if len(set(names)) < len(names):
        raise PreprocessingError(f"chain: two raw inputs have one name: {', '.join(names)}; give them others")
    for index, (branch, value) in enumerate(zip(branches, values)):
        result = _emit(op, branch, value, element)
        op.name_output(result, f"output_{index}" if several else "output")
    model = ir.Model(graph, ir_version=IR_VERSION)
    record_parameters(model, [])
    return Model(model)


def put_before(model: Model, transforms: Sequence[Transform], *, raw: Raw | None = None) -> Model:
    """The model with transforms in front: its inputs are raw, and it goes through training, compression and `convert`
    like any other. Predict, train and evaluate programs then all read raw examples.

    Arguments:
        model: with parameters or without; it is not changed. Compress the result, not what is compressed.
        transforms: a `Raw` and what follows it, for each of the model's inputs that is to be raw. Other inputs stay.
        raw: what the first input is, where `transforms` does not begin with one.

    Returns a model whose raw inputs are called as the model's own, or as their `Raw` says. Its parameters are the
    model's; constants of transforms are none, so nothing trains or quantizes them.

    Raises PreprocessingError, which names the transform, or the axis in which the result is not what the model takes.

    Example:
        model = preprocessing.put_before(
            Model.from_onnx("model.onnx"),
            [Raw("uint8", ("batch", 32, 32, 3)), Scale(), Normalize(mean, std), Layout("NHWC", "NCHW")],
        )
    """
    if model.signature is not None or getattr(model, "training_form", None) is not None:
        kind = "a program, whose inputs have roles" if model.signature is not None else "compressed already"
        raise PreprocessingError(f"put_before: the model is {kind}; put transforms before the model that it is made of")
    result = model.copy()
    graph = result.ir.graph
    record_parameters(result.ir, parameter_names(result.ir))
    op = Builder(graph, scope=SCOPE)
    first = next(iter(graph), None)
    if first is None:
        raise PreprocessingError("put_before: the model has no nodes; chain makes a model of transforms alone")
    branches = _branches(transforms, raw)
    targets = _targets(model, branches)
    for branch, name in zip(branches, targets):
        index, old = next((i, value) for i, value in enumerate(graph.inputs) if value.name == name)
        op.free_name(branch.raw.name or name)
        if old.name == (branch.raw.name or name):
            old.name = op.unique(f"{name}_prepared")
        value = ir.Value(
            name=branch.raw.name or name, type=ir.TensorType(branch.raw.element), shape=ir.Shape(branch.raw.shape)
        )
        if any(value.name == other.name for other in graph.inputs if other is not old):
            raise PreprocessingError(f"put_before: the model has an input {value.name!r} already; choose another name=")
        floats = old.dtype if old.dtype is not None and is_float(old) else ir.DataType.FLOAT
        graph.inputs[index] = value
        with op.before(first):
            prepared = _converted(op, _emit(op, branch, value, floats), old, name)
        _agree(graph, prepared, old, name)
        old.replace_all_uses_with(prepared, replace_graph_outputs=True)
    for node in itertools.takewhile(lambda node: node is not first, graph):
        node.metadata_props[EXACT] = ""
    record(result.ir, [part for b in branches for part in (b.raw, *b.transforms)])
    return result


def _branches(transforms: Sequence[Transform], raw: Raw | None) -> list[Branch]:
    for part in transforms:
        if not isinstance(part, Transform):
            raise PreprocessingError(f"{part!r} is no transform; see archipel.preprocessing")
    parts: list[Transform] = list(transforms)
    if raw is not None and not (parts and isinstance(parts[0], Raw)):
        parts.insert(0, raw)
    if not parts or not isinstance(parts[0], Raw):
        raise PreprocessingError("transforms begin with a Raw, which says the type and shape of what they read")
    return list(_split(parts))


def _split(parts: Sequence[Transform]) -> Iterator[Branch]:
    starts = [i for i, part in enumerate(parts) if isinstance(part, Raw)]
    for start, end in zip(starts, [*starts[1:], len(parts)]):
        head = parts[start]
        assert isinstance(head, Raw)
        yield Branch(head, tuple(parts[start + 1 : end]))


def _targets(model: Model, branches: Sequence[Branch]) -> list[str]:
    """The model's input for each branch."""
    names = [info.name for info in model.inputs]
    given = [branch.raw.input for branch in branches if branch.raw.input]
    for name in given:
        if name not in names or given.count(name) > 1:
            problem = "twice" if name in names else f"but the model has {', '.join(names)}"
            raise PreprocessingError(f"raw: input {name!r} is given {problem}")
    free = iter([name for name in names if name not in given])
    found = [branch.raw.input or next(free, "") for branch in branches]
    if "" in found:
        raise PreprocessingError(f"{len(branches)} raw inputs, but the model has {len(names)}: {', '.join(names)}")
    return found


def _emit(op: Builder, branch: Branch, value: ir.Value, floats: ir.DataType) -> ir.Value:
    for number, transform in enumerate(branch.transforms, start=1):
        with op.part(transform.kind):
            try:
                value = transform.emit(op, value, floats)
            except PreprocessingError as error:
                raise PreprocessingError(f"transform {number} of {branch.raw.name or 'the input'}: {error}") from None
    return value


def _converted(op: Builder, value: ir.Value, old: ir.Value, name: str) -> ir.Value:
    """`value` in the type of the model's input."""
    if value.dtype == old.dtype or old.dtype is None:
        return value if value.producer() is not None else op.Identity(value)
    if is_float(value) and not is_float(old):
        raise PreprocessingError(
            f"input {name!r}: the model takes {old.dtype.numpy().name}, but the transforms give floating-point numbers"
        )
    return op.Cast(value, to=int(old.dtype))


def _agree(graph: ir.Graph, value: ir.Value, old: ir.Value, name: str) -> None:
    """Make the sizes of what the transforms give and of what the model takes the same. Refuses contradictions."""
    given, wanted = dims(value), dims(old)
    told = f"input {name!r}: the transforms give {shape_text(given)}, but the model takes {shape_text(wanted)}"
    if len(given) != len(wanted):
        raise PreprocessingError(f"{told}; Layout adds and removes axes")
    for axis, (has, takes) in enumerate(zip(given, wanted)):
        if isinstance(takes, int) and has != takes:
            remedy = "CropOrPad or Resize makes axes of one size" if axis else "the model has a fixed batch"
            raise PreprocessingError(f"{told}: axis {axis} differs; {remedy}")
        if isinstance(takes, str) and has is not None and has != takes:
            rename_size(graph, takes, has)
            wanted = dims(old)
    sizes: list[Dim] = [takes if has is None else has for has, takes in zip(given, wanted)]
    value.shape = ir.Shape(sizes)
