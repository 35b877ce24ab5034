"""Choose inner values of student and teacher, and compare them: FitNets (Romero et al. 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.errors import CompressionError
from archipel.graph import Builder, Model
from archipel.graph.shapes import dims, is_float, is_static
from archipel.graph.walk import descendants

_CHANNELS_FIRST = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Resize")
_CHANNELS_LAST = ("Gemm", "MatMul")
_COLLECT = ("ReduceMean", "Flatten", "Reshape")  # of pictures: they end the convolutional part


@dataclass(frozen=True)
class Hint:
    """A value of the student, and the teacher's value that it should resemble; channels lie along `axis`.

    With `project` a trained matrix [student's channels, teacher's channels] maps the student's value first.
    """

    student: str
    teacher: str
    axis: int
    project: bool


@dataclass(frozen=True)
class _Site:
    name: str
    axis: int
    shape: tuple[int, ...]

    @property
    def key(self) -> tuple[int, ...]:
        """All sizes but that of the channels: values are compared if it is equal."""
        return (len(self.shape), self.axis, *(size for i, size in enumerate(self.shape, 1) if i != self.axis))

    @property
    def channels(self) -> int:
        return self.shape[self.axis - 1]


def hints(student: Model, teacher: Model, named: Sequence[Sequence[str]], alike: bool) -> list[Hint]:
    """The pairs `named`, or else for each resolution the last value of that size that a layer reads.

    `alike`: the student was made from the teacher, so that channel i means the same in both. Raises CompressionError
    for an unknown name, for shapes that differ in more than one axis, and where nothing matches.
    """
    if named:
        return [_named_hint(student, teacher, str(first), str(second), alike) for first, second in named]
    # Later sites replace earlier ones of the same resolution.
    ours, theirs = ({site.key: site for site in _sites(model)} for model in (student, teacher))
    matched = [
        Hint(site.name, theirs[key].name, site.axis, not alike or site.channels != theirs[key].channels)
        for key, site in ours.items()
        if key in theirs
    ]
    if not matched:
        names = [[site.name for site in sites.values()] for sites in (ours, theirs)]
        raise CompressionError(
            f"Distil: no feature of the student ({', '.join(names[0]) or 'it has none'}) has the resolution of one of "
            f"the teacher ({', '.join(names[1]) or 'it has none'}); name pairs in match=, or use features=0"
        )
    return matched


def distance(op: Builder, hint: Hint, student: ir.Value, teacher: ir.Value, weight: ir.Value | None) -> ir.Value:
    """The mean squared difference of each example, [batch]; `weight` is the projection."""
    if weight is not None:
        last = len(dims(student)) - 1
        order = [i for i in range(last + 1) if i != hint.axis]
        moved = op.Transpose(student, perm=[*order, hint.axis]) if hint.axis != last else student
        student = op.MatMul(moved, weight)
        if hint.axis != last:
            back = [*order, hint.axis]
            student = op.Transpose(student, perm=[back.index(i) for i in range(last + 1)])
    away = op.Sub(student, teacher)
    return op.ReduceMean(op.Mul(away, away), list(range(1, len(dims(teacher)))), keepdims=0)


def first_projection(hint: Hint, student: ir.Value, teacher: ir.Value, rng: np.random.Generator) -> np.ndarray:
    """The initial projection, float32 [student's channels, teacher's channels], scaled to keep the variance."""
    sizes = [dims(value)[hint.axis] for value in (student, teacher)]
    rows, columns = (size if isinstance(size, int) else 0 for size in sizes)
    weights: np.ndarray = rng.standard_normal((rows, columns)) / np.sqrt(max(rows, 1))
    return weights.astype(np.float32)


def inner_values(model: Model) -> dict[str, ir.Value]:
    """The values that nodes of the main graph compute, by name."""
    return {value.name: value for node in model.ir.graph for value in node.outputs if value.name}


def _sites(model: Model) -> list[_Site]:
    graph = model.ir.graph
    batch = dims(graph.inputs[0])[:1]
    weights = {graph.initializers[name] for name in model.parameter_names}
    outputs = set(graph.outputs)
    # Values that depend on weights and on inputs: a flattened picture is no feature.
    learned = (descendants(graph, weights) & descendants(graph, graph.inputs)) - weights - set(graph.inputs)
    sites = []
    for node in graph:
        value = node.inputs[0] if node.inputs and node.domain == "" else None
        if value is None or value not in learned or value in outputs or not is_float(value):
            continue
        # A site has the batch first, and fixed sizes behind it.
        if value.shape is None or dims(value)[:1] != batch or not is_static(dims(value)[1:]) or len(dims(value)) < 2:
            continue
        axis = _channel_axis(node.op_type, len(dims(value)))
        if axis is not None:
            sites.append(_Site(str(value.name), axis, tuple(int(d) for d in dims(value)[1:] if d is not None)))
    return sites


def _channel_axis(reader: str, rank: int) -> int | None:
    if reader in _CHANNELS_FIRST or (reader in _COLLECT and rank == 4):
        return 1
    return rank - 1 if reader in _CHANNELS_LAST else None


def _named_hint(student: Model, teacher: Model, first: str, second: str, alike: bool) -> Hint:
    values = []
    for role, model, name in (("student", student, first), ("teacher", teacher, second)):
        value = inner_values(model).get(name)
        if value is None or value.shape is None:
            known = ", ".join(site.name for site in _sites(model))
            raise CompressionError(f"Distil: match: the {role} has no value {name!r}; layers read {known}")
        values.append(value)
    shapes = [dims(value)[1:] for value in values]
    differing = [i for i, (a, b) in enumerate(zip(*shapes), start=1) if a != b]
    if len(shapes[0]) != len(shapes[1]) or len(differing) > 1 or not all(map(is_static, shapes)):
        raise CompressionError(
            f"Distil: match: {first!r} is {list(dims(values[0]))} and {second!r} is {list(dims(values[1]))}; they may "
            "differ along one axis, the channels, and need fixed sizes"
        )
    rank = len(shapes[0]) + 1
    # The axis that differs has the channels; else axis 1 of pictures, and the last axis of matrices and sequences.
    axis = differing[0] if differing else (1 if rank > 3 else rank - 1)
    return Hint(first, second, axis, bool(differing) or not alike)
