"""Groups of nodes for which PyTorch has one function: linear layers, attention and splits, as exporters write them out.

The function is faster, and attention then never holds a tensor of [batch, heads, query, key].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from torch.nn import functional

from archipel.graph.shapes import Dim, constant_array, dims, is_float, rank, same_dim
from archipel.graph.walk import only_use
from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.recurrent.exported import find_exported
from archipel.training.cloud.ops.recurrent.native import lower_recurrent

if TYPE_CHECKING:
    from archipel.training.cloud.graphs.tracing import Trace

_HIDDEN = -1e30
"""At most this a mask adds to what must not be seen: minus infinity, or the lowest number, of which exp is 0 too."""


@dataclass(frozen=True)
class Fusion:
    """Nodes that are computed at once, where the last of them stands.

    Attributes:
        last: the node whose first output is the result.
        covered: the nodes before it, whose outputs nothing else reads.
        lower: emits the result.
    """

    last: ir.Node
    covered: frozenset[ir.Node]
    lower: Callable[[Trace], Any]


def find_fusions(graph: ir.Graph) -> dict[ir.Node, Fusion]:
    """The groups of a graph, without those of its bodies, by their last nodes."""
    found: dict[ir.Node, Fusion] = {}
    for node in graph:
        if node in found:
            continue  # of a split
        fusion = _attention(node) or _linear(node) or _recurrent(node)
        if fusion is not None:
            found[node] = fusion
        elif _is(node, "Slice"):
            found.update(_split(node.inputs[0]))
    return found


# Linear layers: Add(MatMul(x, Transpose(weight)), bias)


def _linear(node: ir.Node) -> Fusion | None:
    if not _is(node, "Add"):
        return None
    for product_value, bias in (node.inputs, reversed(node.inputs)):
        product = _only_producer(product_value, "MatMul", node)
        if product is None or bias is None or bias.shape is None or rank(bias) != 1:
            continue
        x, turned = product.inputs
        transpose = None if turned is None else turned.producer()
        if transpose is None or not _is(transpose, "Transpose") or x is None or rank(x) < 2:
            continue
        weight = transpose.inputs[0]
        if weight is None or rank(weight) != 2 or not same_dim(dims(weight)[0], dims(bias)[0]):
            continue
        covered = frozenset({product} | ({transpose} if only_use(transpose.outputs[0]) else set()))
        return Fusion(node, covered, _Linear(x, weight, bias))
    return None


@dataclass(frozen=True)
class _Linear:
    x: ir.Value
    weight: ir.Value
    bias: ir.Value

    def __call__(self, trace: Trace) -> torch.Tensor:
        return functional.linear(*(trace.tensor(value) for value in (self.x, self.weight, self.bias)))


# Attention: MatMul(Softmax(MatMul(a q, b k^T) + mask), v)


def _attention(node: ir.Node) -> Fusion | None:
    if not _is(node, "MatMul"):
        return None
    weights, values = node.inputs
    softmax = _only_producer(weights, "Softmax", node)
    if softmax is None or values is None or rank(values) != 4:
        return None
    if softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    covered = {softmax}
    scores, mask, scale = softmax.inputs[0], None, 1.0
    reader = softmax
    added = _only_producer(scores, "Add", reader)
    if added is not None:
        covered.add(added)
        scores, mask = added.inputs
        if _only_producer(scores, "MatMul", added) is None and _only_producer(scores, "Mul", added) is None:
            scores, mask = mask, scores
        reader = added
    scores, factor, scaling = _unscaled(scores, reader)
    covered |= scaling
    product = _only_producer(scores, "MatMul", next(iter(scaling), reader))
    if product is None or scores is None or rank(scores) != 4:
        return None
    covered.add(product)
    queries, factor_q, scaling = _unscaled(product.inputs[0], product)
    covered |= scaling
    turned, factor_k, scaling = _unscaled(product.inputs[1], product)
    covered |= scaling
    keys = _turned_back(turned)
    if queries is None or keys is None or rank(queries) != 4 or rank(keys) != 4:
        return None
    if mask is not None and (mask.shape is None or rank(mask) > 4):
        return None
    scale = factor * factor_q * factor_k
    return Fusion(node, frozenset(covered), _Attention(queries, keys, values, mask, scale))


@dataclass(frozen=True)
class _Attention:
    queries: ir.Value
    keys: ir.Value
    values: ir.Value
    mask: ir.Value | None
    scale: float

    def __call__(self, trace: Trace) -> torch.Tensor:
        q, k, v = (trace.tensor(value) for value in (self.queries, self.keys, self.values))
        causal = self.mask is not None and _is_causal(self.mask, trace, dims(self.queries), dims(self.keys))
        mask = None if self.mask is None or causal else trace.tensor(self.mask)
        return functional.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=self.scale)


# LSTM and GRU that were PyTorch's: with PyTorch's own weights


# Splits: Slices of one value that follow each other along an axis


def _split(value: ir.Value | None) -> dict[ir.Node, Fusion]:
    """The Slices of a value, if they cut all of it into parts and nothing else reads it."""
    if value is None or not is_float(value):
        return {}  # Others have no gradient, and those of a shape are no tensors.
    readers = list(dict.fromkeys(use.node for use in value.uses()))
    ranges = [_range(node) for node in readers if _is(node, "Slice") and node.inputs[0] is value]
    if value.is_graph_output() or len(ranges) < max(len(readers), 2) or None in ranges:
        return {}
    ordered = sorted(zip(ranges, readers), key=lambda pair: pair[0])  # type: ignore[arg-type, return-value]
    axis, end, sizes = ordered[0][0][0], 0, []  # type: ignore[index]
    for (along, start, until), _ in ordered:  # type: ignore[misc]
        if along != axis or start != end:
            return {}
        sizes.append(until - start)
        end = until
    if end != dims(value)[axis]:
        return {}
    split = _Split(value, axis, sizes)
    return {node: Fusion(node, frozenset(), partial(split, number)) for number, (_, node) in enumerate(ordered)}


def _range(node: ir.Node) -> tuple[int, int, int] | None:
    """Axis, start and end of a Slice along one axis of known size, from the front."""
    source, *rest = node.inputs
    numbers = [_number(value, default) for value, default in zip_longest(rest, (None, None, 0, 1))]
    if source is None or source.shape is None or None in numbers or numbers[3] != 1:
        return None
    start, end, axis, _ = (int(number) for number in numbers if number is not None)
    axis += rank(source) if axis < 0 else 0
    size = dims(source)[axis]
    if not isinstance(size, int):
        return None
    start, end = (min(max(number + size if number < 0 else number, 0), size) for number in (start, end))
    return (axis, start, end) if start < end else None


def _number(value: ir.Value | None, default: int | None) -> int | None:
    """A constant of one element, or what an input that is left out means."""
    if value is None:
        return default
    content = constant_array(value)
    return int(content.item()) if content is not None and content.size == 1 else None


class _Split:
    """Its gradient puts the parts together in one pass; that of each slice would be as large as the whole."""

    def __init__(self, value: ir.Value, axis: int, sizes: list[int]) -> None:
        self._value, self._axis, self._sizes = value, axis, sizes
        self._parts: Any = None

    def __call__(self, number: int, trace: Trace) -> torch.Tensor:
        if self._parts is None:
            self._parts = torch.split(trace.tensor(self._value), self._sizes, self._axis)
        return self._parts[number]  # type: ignore[no-any-return]


def _recurrent(node: ir.Node) -> Fusion | None:
    found = find_exported(node)
    if found is None:
        return None
    weights, covered = found
    return Fusion(node, covered, lambda trace: lower_recurrent(NodeContext(trace, node), weights))


def _unscaled(value: ir.Value | None, reader: ir.Node) -> tuple[ir.Value | None, float, set[ir.Node]]:
    """What a product or quotient with one number was made of, the factor, and that node."""
    for op_type in ("Mul", "Div"):
        node = _only_producer(value, op_type, reader)
        if node is None:
            continue
        for index, inner in enumerate(node.inputs):
            number = constant_array(node.inputs[1 - index])
            if number is not None and number.size == 1 and number.ndim <= 1 and (op_type == "Mul" or index == 0):
                factor = float(number.reshape(-1)[0])
                return inner, factor if op_type == "Mul" else 1.0 / factor, {node}
    return value, 1.0, set()


def _turned_back(value: ir.Value | None) -> ir.Value | None:
    """The keys whose last two axes `value` has in the other order; the nodes between are views, and may stay."""
    node = None if value is None else value.producer()
    if node is None or value is None:
        return None
    if _is(node, "Transpose") and list(node.attributes.get_ints("perm", ())) == [0, 1, 3, 2]:
        return node.inputs[0]
    # [b, h, n, d] -> [b h, n, d] -> [b h, d, n] -> [b, h, d, n]
    if not _is(node, "Reshape") or node.inputs[0] is None:
        return None
    transpose = node.inputs[0].producer()
    if transpose is None or not _is(transpose, "Transpose") or transpose.inputs[0] is None:
        return None
    before = transpose.inputs[0].producer()
    if list(transpose.attributes.get_ints("perm", ())) != [0, 2, 1] or before is None or not _is(before, "Reshape"):
        return None
    whole = before.inputs[0]
    if whole is None or rank(whole) != 4 or rank(value) != 4:
        return None
    b, h, n, d = dims(whole)
    lines = dims(transpose.inputs[0])[1:]
    expected: tuple[Dim, ...] = (b, h, d, n)
    fits = all(map(same_dim, dims(value), expected)) and all(map(same_dim, lines, (n, d)))
    return whole if fits else None


def _is_causal(mask: ir.Value, trace: Trace, queries: tuple[Dim, ...], keys: tuple[Dim, ...]) -> bool:
    """Whether the mask lets each of n queries see the keys up to its own place, of n keys."""
    if not same_dim(queries[2], keys[2]):
        return False
    content = trace.values.get(mask)
    if isinstance(content, torch.Tensor):
        size = content.shape[-1]
        if content.ndim < 2 or content.numel() != size * size:
            return False
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        hidden = content.reshape(size, size) <= _HIDDEN
        return bool((hidden == later).all() and (content.reshape(size, size)[~later] == 0).all())
    # Where(Equal(Trilu(ones), 0), -inf, 0), for sizes that are known when the module runs
    where = mask.producer()
    if where is None or not _is(where, "Where"):
        return False
    low, zero = (constant_array(value) for value in where.inputs[1:])
    equal = where.inputs[0].producer() if where.inputs[0] is not None else None
    if low is None or zero is None or not (low <= _HIDDEN).all() or (zero != 0).any():
        return False
    if equal is None or not _is(equal, "Equal") or equal.inputs[0] is None:
        return False
    against, trilu = constant_array(equal.inputs[1]), equal.inputs[0].producer()
    if against is None or (against != 0).any() or trilu is None or not _is(trilu, "Trilu") or len(trilu.inputs) > 1:
        return False
    expand = trilu.inputs[0].producer() if trilu.inputs[0] is not None else None
    ones = None if expand is None or not _is(expand, "Expand") else constant_array(expand.inputs[0])
    return trilu.attributes.get_int("upper", 1) == 0 and ones is not None and bool((ones == 1).all())


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain == ""


def _only_producer(value: ir.Value | None, op_type: str, reader: ir.Node) -> ir.Node | None:
    """The node of this type that makes `value`, if nothing but `reader` reads it, in the same graph."""
    node = None if value is None else value.producer()
    if node is None or value is None or not _is(node, op_type) or node.graph is not reader.graph:
        return None
    use = only_use(value)
    return node if use is not None and use[0] is reader else None
