"""Sizes: small integers that follow from shapes, and are computed beside the tensors and not as tensors.

A graph reads a shape with Shape, computes with it, and hands it to Reshape, Expand or Slice. As tensors these would
have PyTorch wait for the device before each Reshape, and torch.compile would see a graph in pieces.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from torch import fx

from archipel.graph.shapes import dims, dtype_of

if TYPE_CHECKING:
    from archipel.training.cloud.graphs.tracing import Trace

Size = Any
"""A Python number, or a Proxy of one that is known when the module runs."""

MOST = 64  # elements; more are data


@dataclass(frozen=True)
class Sizes:
    """A tensor of rank 0 or 1 whose elements are Python numbers, or Proxies of them."""

    items: list[Size]
    rank: int

    @property
    def fixed(self) -> bool:
        """Whether all of them are known now."""
        return not any(isinstance(item, fx.Proxy) for item in self.items)

    def as_constant(self, dtype: torch.dtype) -> torch.Tensor:
        """The tensor, if all are known."""
        return torch.tensor(self.items if self.rank else self.items[0], dtype=dtype)


def make_tensor(items: list[Any], rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The tensor of sizes, when the module runs."""
    # One by one: torch.tensor of a list with symbolic sizes is no part of a compiled graph.
    each = [torch.full((), item, dtype=dtype, device=device) for item in items]
    return torch.stack(each) if rank else each[0]


def compute_sizes(trace: Trace, node: ir.Node) -> Sizes | None:
    """What the node computes, if it computes sizes from shapes and sizes; else None."""
    rule = _RULES.get(node.op_type) if node.domain == "" else None
    if rule is None or len(node.outputs) != 1:
        return None
    if node.op_type in ("Shape", "Size"):
        return rule(trace, node, [])
    given = [_given(trace, value) for value in node.inputs if value is not None]
    if not given or any(sizes is None for sizes in given) or all(sizes is not None and sizes.fixed for sizes in given):
        # Of constants alone a constant follows, which is computed as a tensor.
        return None
    found = rule(trace, node, [sizes for sizes in given if sizes is not None])
    return found if found is None or len(found.items) <= MOST else None


def _given(trace: Trace, value: ir.Value) -> Sizes | None:
    found = trace.values.get(value)
    if isinstance(found, Sizes):
        return found
    if isinstance(found, torch.Tensor) and found.ndim <= 1 and found.numel() <= MOST:
        return Sizes(found.reshape(-1).tolist(), found.ndim)
    return None


def _shape(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes:
    source = node.inputs[0]
    assert source is not None
    known = dims(source)
    axes = range(len(known))[slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", len(known)))]
    return Sizes([trace.size(source, axis) for axis in axes], 1)


def _size(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes:
    source = node.inputs[0]
    assert source is not None
    return Sizes([math.prod(trace.size(source, axis) for axis in range(len(dims(source))))], 0)


def _elementwise(function: Callable[..., Size]) -> Callable[[Trace, ir.Node, list[Sizes]], Sizes | None]:
    def rule(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes | None:
        length = max(len(sizes.items) for sizes in given)
        if any(len(sizes.items) not in (1, length) for sizes in given):
            return None
        columns = [sizes.items * length if len(sizes.items) == 1 else sizes.items for sizes in given]
        return Sizes([_apply(trace, function, row) for row in zip(*columns)], max(sizes.rank for sizes in given))

    return rule


def _apply(trace: Trace, function: Callable[..., Size], row: tuple[Size, ...]) -> Size:
    # As a call of its own where one is known only later: `max(a, b)` of Proxies would ask for their truth now.
    return trace.call(function, row) if any(isinstance(item, fx.Proxy) for item in row) else function(*row)


def divide(a: Size, b: Size) -> Size:
    """ONNX's Div, which rounds integers towards zero."""
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return a // b if (a < 0) == (b < 0) or a % b == 0 else -(-a // b)


def choose(condition: Size, a: Size, b: Size) -> Size:
    return a if condition else b


def _cast(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes | None:
    to = dtype_of(node.outputs[0])
    kinds: dict[ir.DataType, type] = {
        ir.DataType.INT64: int,
        ir.DataType.INT32: int,
        ir.DataType.FLOAT: float,
        ir.DataType.DOUBLE: float,
        ir.DataType.BOOL: bool,
    }
    if to not in kinds:
        return None
    kind = kinds[to]
    if kind is int and dtype_of(node.inputs[0]).is_integer():  # type: ignore[arg-type]
        return given[0]
    return Sizes([_apply(trace, kind, (item,)) for item in given[0].items], given[0].rank)


def _gather(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes | None:
    data, indices = given
    if not indices.fixed or data.rank != 1:
        return None
    return Sizes([data.items[int(index)] for index in indices.items], indices.rank)


def _concat(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes | None:
    return Sizes([item for sizes in given for item in sizes.items], 1)


def _slice(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes | None:
    data, *bounds = given
    if not all(sizes.fixed for sizes in bounds) or len(bounds) not in (2, 3, 4):
        return None
    if len(bounds) != len([value for value in node.inputs[1:] if value is not None]):
        return None
    starts, ends = bounds[0].items[0], bounds[1].items[0]
    step = 1
    if len(bounds) == 4:
        step = bounds[3].items[0]
    elif len(bounds) == 3 and node.inputs[3] is None:
        step = bounds[2].items[0]
    if step > 0:
        return Sizes(data.items[starts:ends:step], 1)
    # Backwards a start is clamped to an element, which Python's slices do not do.
    count = len(data.items)
    first, last = (bound + count if bound < 0 else bound for bound in (starts, ends))
    first, last = min(max(first, 0), count - 1), min(max(last, -1), count - 1)
    return Sizes([data.items[i] for i in range(first, last, step)], 1)


def _unsqueeze(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes | None:
    return Sizes(given[0].items, 1) if given[0].rank == 0 and len(given[1].items) == 1 else None


def _squeeze(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes | None:
    return Sizes(given[0].items, 0) if len(given[0].items) == 1 and given[0].rank == 1 else None


def _reshape(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes | None:
    data, shape = given
    if not shape.fixed or len(shape.items) > 1:
        return None
    return Sizes(data.items, len(shape.items))


def _fold(function: Callable[..., Size]) -> Callable[[Trace, ir.Node, list[Sizes]], Sizes | None]:
    def rule(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes | None:
        items = given[0].items
        if not items:
            return None
        total = items[0]
        for item in items[1:]:
            total = _apply(trace, function, (total, item))
        return Sizes([total], node.attributes.get_int("keepdims", 1))

    return rule


def _identity(trace: Trace, node: ir.Node, given: list[Sizes]) -> Sizes:
    return given[0]


_RULES: dict[str, Callable[[Trace, ir.Node, list[Sizes]], Sizes | None]] = {
    "Shape": _shape,
    "Size": _size,
    "Cast": _cast,
    "Gather": _gather,
    "Concat": _concat,
    "Slice": _slice,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Identity": _identity,
    "Add": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "Div": _elementwise(divide),
    "Neg": _elementwise(operator.neg),
    "Abs": _elementwise(abs),
    "Max": _elementwise(max),
    "Min": _elementwise(min),
    "Equal": _elementwise(operator.eq),
    "Less": _elementwise(operator.lt),
    "LessOrEqual": _elementwise(operator.le),
    "Greater": _elementwise(operator.gt),
    "GreaterOrEqual": _elementwise(operator.ge),
    "Not": _elementwise(operator.not_),
    "Where": _elementwise(choose),
    "ReduceProd": _fold(operator.mul),
    "ReduceSum": _fold(operator.add),
    "ReduceMax": _fold(max),
    "ReduceMin": _fold(min),
}
