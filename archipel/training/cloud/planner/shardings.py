"""How an operator can be divided over n devices: what it then reads and writes, and which gradients must be summed.

A layout says how a value lies on the devices: `WHOLE` on each, divided along one axis (its number), or `SUM`: each
device has a summand. That is what `torch.distributed.tensor` calls Replicate, Shard and Partial.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from archipel.graph.shapes import constant_array
from archipel.training.cloud.planner.costs import Operand, Tensor, Unit

WHOLE = -1
SUM = -2
Layout = int

_ELEMENTWISE = frozenset({
    "Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh",
    "Softplus", "Softsign", "Mish", "Erf", "Exp", "Log", "Sqrt", "Reciprocal", "Abs", "Neg", "Sign", "Sin",
    "Cos", "Floor", "Ceil", "Round", "Clip", "Cast", "Identity", "Not", "Add", "Sub", "Mul", "Div", "Pow",
    "Min", "Max", "Mean", "Sum", "Where", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And",
    "Or", "Xor", "Dropout", "ThresholdedRelu", "Mod",
})  # fmt: skip
_POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool"})
_RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
_REDUCED = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
_REDUCES = frozenset(f"Reduce{kind}" for kind in _REDUCED)
_OVER_AXIS = frozenset({"Softmax", "LogSoftmax", "Hardmax", "CumSum", "ArgMax", "ArgMin"})


@dataclass(frozen=True)
class Strategy:
    """One way to divide a unit.

    Attributes:
        name: "replicate", "batch" (along axis 0 of the first result), "column", "row" or "axis K".
        reads: the layout that each of the unit's `reads` must have; of a parameter in its own axes.
        gradients: the layout in which each read's gradient comes out. SUM of a parameter: devices must add them up.
        writes: the layout of each result.
        share: the part of the work that each device does.

    On a device an operator runs with its own attributes, but for the sizes of a reshape and the groups of a convolution
    whose channels are divided: it then has 1 / n of them.
    """

    name: str
    reads: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    writes: tuple[Layout, ...]
    share: float


def strategies(unit: Unit, n: int) -> list[Strategy]:
    """All ways that are known for this unit on n devices; the first one is "replicate", which always works."""
    whole = (WHOLE,) * len(unit.reads)
    found = [Strategy("replicate", whole, whole, (WHOLE,) * len(unit.writes), 1.0)]
    if n > 1 and unit.writes:
        for name, axes, written in _divided(unit, n):
            found += _strategy(unit, n, name, axes, written)
    return found


# (name, the axis of each read as the operator sees it that is divided, or WHOLE; layout of the first result)
_Choice = tuple[str, tuple[Layout, ...], Layout]


def _strategy(unit: Unit, n: int, name: str, axes: tuple[Layout, ...], written: Layout) -> list[Strategy]:
    reads, gradients = [], []
    for read, axis in zip(unit.reads, axes):
        if axis >= 0 and (read is None or axis >= len(read.shape) or read.shape[axis] % n):
            return []
        own = read.axes[axis] if isinstance(read, Operand) and axis >= 0 else axis
        reads.append(own)
        # What is whole on each device is there read for a part of the result, so each has a part of its gradient. Where
        # the result is a SUM, what is whole is the bias: each device adds 1 / n of it, and has its whole gradient.
        gradients.append(own if own >= 0 else WHOLE if written == SUM else SUM)
    # A value that is read twice can only be laid one way.
    laid = {(read.name, layout) for read, layout in zip(unit.reads, reads) if isinstance(read, Tensor)}
    if len({read.name for read in unit.reads if isinstance(read, Tensor)}) < len(laid):
        return []
    if written >= 0 and (written >= len(unit.writes[0].shape) or unit.writes[0].shape[written] % n):
        return []
    if written >= 0 and any(len(t.shape) <= written or t.shape[written] % n for t in unit.writes[1:]):
        return []
    writes = (written,) * len(unit.writes)
    return [Strategy(name, tuple(reads), tuple(gradients), writes, 1 / n)]


def _divided(unit: Unit, n: int) -> Iterable[_Choice]:
    op = unit.op_type
    out = unit.writes[0].shape
    if unit.node.domain != "" or (len(unit.writes) > 1 and op not in ("Dropout", "MaxPool", "Split")):
        return
    if op in ("MatMul", "Gemm"):
        yield from _products(unit)
    elif op == "Conv":
        yield from _convolutions(unit, n)
    elif op in _ELEMENTWISE:
        for axis in range(len(out)):
            yield _named(axis), _aligned(unit, axis, len(out)), axis
    elif op in _RESHAPES:
        yield from _reshapes(unit)
    elif op == "Transpose":
        perm = unit.node.attributes.get_ints("perm") or tuple(range(len(out)))[::-1]
        for axis, before in enumerate(perm):
            yield _named(axis), (before,), axis
    elif op in _POOLS:
        for axis in (0, 1):
            yield _named(axis), (axis,), axis
    elif op == "BatchNormalization":
        # Divided by examples the statistics are those of each device, as DistributedDataParallel has them.
        yield "batch", (0, *([WHOLE] * (len(unit.reads) - 1))), 0
    elif op in ("LayerNormalization", "RMSNormalization"):
        normalized = unit.node.attributes.get_int("axis", -1) % len(out)
        for axis in range(normalized):
            yield _named(axis), (axis, *([WHOLE] * (len(unit.reads) - 1))), axis
    elif op in _OVER_AXIS:
        taken = unit.node.attributes.get_int("axis", -1) % len(out)
        if len(_shape(unit.reads[0])) == len(out):
            for axis in range(len(out)):
                if axis != taken:
                    yield _named(axis), (axis, *([WHOLE] * (len(unit.reads) - 1))), axis
    elif op in _REDUCES:
        yield from _reductions(unit)
    elif op == "Gather":
        yield from _gathers(unit)
    elif op == "Concat" and all(isinstance(read, Tensor) for read in unit.reads):
        joined = unit.node.attributes.get_int("axis", 0) % len(out)
        for axis in range(len(out)):
            if axis != joined:
                yield _named(axis), (axis,) * len(unit.reads), axis


def _named(axis: int) -> str:
    return "batch" if axis == 0 else f"axis {axis}"


def _shape(read: Tensor | Operand | None) -> tuple[int, ...]:
    return () if read is None else read.shape


def _aligned(unit: Unit, axis: int, rank: int) -> tuple[Layout, ...]:
    """The axis of each read that broadcasting puts at `axis`; WHOLE where it has none, or one of size 1.

    A constant that has one there gets it, too, and makes the choice impossible: nothing divides constants.
    """
    found = []
    for place, read in enumerate(unit.reads):
        shape: Sequence[object] = _shape(read)
        value = unit.node.inputs[place] if read is None and place < len(unit.node.inputs) else None
        if value is not None:
            shape = (0,) * rank if value.shape is None else tuple(value.shape)
        own = axis - (rank - len(shape))
        found.append(own if own >= 0 and shape[own] != 1 else WHOLE)
    return tuple(found)


def _products(unit: Unit) -> Iterable[_Choice]:
    a, b, *biases = unit.reads
    gemm = unit.op_type == "Gemm"
    turned_a = gemm and bool(unit.node.attributes.get_int("transA", 0))
    turned_b = gemm and bool(unit.node.attributes.get_int("transB", 0))
    rank, out = len(_shape(a)), len(unit.writes[0].shape)
    if not isinstance(a, Tensor) or b is None or rank < 2 or turned_a or len(_shape(b)) < 2:
        return
    whole = (WHOLE,) * len(biases)
    if len(_shape(b)) > 2:  # two activations with as many axes: attention's products
        for axis in range(out - 2):
            aligned = _aligned(unit, axis, out)[:2]
            if isinstance(b, Tensor) and min(aligned) >= 0:
                yield _named(axis), (*aligned, *whole), axis
        return
    for axis in range(out - 1):
        # A bias of one axis goes along the columns.
        yield _named(axis), (axis, WHOLE, *whole), axis
    if isinstance(b, Operand) and all(len(_shape(bias)) == 1 for bias in biases if bias is not None):
        columns, sums = (0, 1) if turned_b else (1, 0)
        yield "column", (WHOLE, columns, *(WHOLE if bias is None else 0 for bias in biases)), out - 1
        yield "row", (rank - 1, sums, *whole), SUM


def _convolutions(unit: Unit, n: int) -> Iterable[_Choice]:
    _, b, *biases = unit.reads
    group = unit.node.attributes.get_int("group", 1)
    whole, first = (WHOLE,) * len(biases), tuple(WHOLE if bias is None else 0 for bias in biases)
    yield "batch", (0, WHOLE, *whole), 0
    if not isinstance(b, Operand):
        return
    if group == 1:
        yield "column", (WHOLE, 0, *first), 1
        yield "row", (1, 1, *whole), SUM
    elif group % n == 0:
        yield "axis 1", (1, 0, *first), 1


def _reshapes(unit: Unit) -> Iterable[_Choice]:
    before, after = _shape(unit.reads[0]), unit.writes[0].shape
    for source, target in leading_axes(before, after):
        yield _named(target), (source, *([WHOLE] * (len(unit.reads) - 1))), target


def leading_axes(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """Axes (of `before`, of `after`) that begin groups of axes with as many elements: dividing one divides the other.

    Example:
        leading_axes((6, 32, 16), (6, 64, 8))   # [(0, 0), (1, 1)]
    """
    found, i, j = list[tuple[int, int]](), 0, 0
    while i < len(before) and j < len(after):
        start_i, start_j, a, b = i, j, before[i], after[j]
        while a != b:
            if a < b:
                i += 1
                if i >= len(before):
                    return found
                a *= before[i]
            else:
                j += 1
                if j >= len(after):
                    return found
                b *= after[j]
        # Axes of size 1 in front of the group are not what it is divided by.
        while start_i < i and before[start_i] == 1:
            start_i += 1
        while start_j < j and after[start_j] == 1:
            start_j += 1
        if a > 1:
            found.append((start_i, start_j))
        i, j = i + 1, j + 1
    return found


def _reductions(unit: Unit) -> Iterable[_Choice]:
    rank = len(_shape(unit.reads[0]))
    axes = _constants(unit.node, 1) if len(unit.node.inputs) > 1 else list(range(rank))
    if axes is None:
        return
    gone = {axis % rank for axis in axes}
    keeps = bool(unit.node.attributes.get_int("keepdims", 1))
    for axis in range(rank):
        if axis not in gone:
            after = axis if keeps else axis - sum(other < axis for other in gone)
            yield _named(after), (axis, *([WHOLE] * (len(unit.reads) - 1))), after


def _gathers(unit: Unit) -> Iterable[_Choice]:
    data, index = unit.reads[:2]
    rank, places = len(_shape(data)), len(_shape(index))
    axis = unit.node.attributes.get_int("axis", 0) % max(rank, 1)
    if isinstance(data, Operand) and axis == 0 and isinstance(index, Tensor):  # an embedding
        for place in range(places):
            yield _named(place), (WHOLE, place), place
        yield "column", (rank - 1, WHOLE), places + rank - 2
    elif isinstance(data, Tensor) and index is None:
        chosen = unit.node.inputs[1]
        picks = 0 if chosen is None or chosen.shape is None else len(chosen.shape)
        for other in range(rank):
            if other != axis:
                after = other if other < axis else other + picks - 1
                yield _named(after), (other, WHOLE), after


def _constants(node: ir.Node, place: int) -> list[int] | None:
    content = constant_array(node.inputs[place])
    return None if content is None else [int(number) for number in content.reshape(-1)]
