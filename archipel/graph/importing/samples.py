"""Pseudo-random inputs for a model: of its shapes and types, with indices inside the tables that they look up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from archipel.graph.shapes import constant_array, dims, dtype_of
from archipel.graph.walk import final_readers

MAX_BYTES = 2**28
"""Limit for all inputs of one sample together."""

KINDS = ("normal", "unit", "byte")
"""How floats are drawn: standard normal, uniform in [0, 1), uniform in [0, 255) as pixels are."""

# Symbolic sizes that are not the batch are tried in this order: usual sizes of windows, pictures and sequences.
_SIZES = (16, 32, 64, 8, 128, 224, 256, 28, 4, 3, 2, 1)
_FEW = 3  # of so many sizes all combinations are tried
_HAND_ON = frozenset({"Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze", "Transpose"})
_COMPARISONS = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_INTEGERS = {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT32, ir.DataType.UINT64}


def sizes(model: ir.Model, batch: int = 2) -> Iterator[dict[str, int]]:
    """Choices of the inputs' symbolic sizes: first axes have size `batch`, all others one size, which varies.

    If there are few, some of the others have size `batch` next: states of recurrent layers have the batch behind.
    """
    shapes = [dims(value) for value in model.graph.inputs]
    names = {d for shape in shapes for d in shape if isinstance(d, str)}
    first = {shape[0] for shape in shapes if shape and isinstance(shape[0], str)}
    # One size for all: sizes that must agree with each other then do.
    others = sorted(names - first)
    for count in range(len(others) if len(others) <= _FEW else min(len(others), 1)):
        for batched in itertools.combinations(others, count):
            for size in _SIZES:
                yield {name: batch if name in first or name in batched else size for name in names}
    yield dict.fromkeys(names, batch)


def sample(model: ir.Model, kind: str, chosen: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """An array for every input, with `chosen` for symbolic sizes; `kind` is one of KINDS. The same seed gives the same
    arrays. Raises ValueError, with the reason, if there can be none."""
    shapes = {
        value: [d if isinstance(d, int) else chosen[d or ""] for d in dims(value)] for value in model.graph.inputs
    }
    total = sum(math.prod(shape) * max(1, dtype_of(value).itemsize) for value, shape in shapes.items())
    if total > MAX_BYTES:
        raise ValueError(f"its inputs have {total:.0f} bytes, more than the {MAX_BYTES} of a sample")
    # A stream for each kind, so that they do not depend on the order in which they are drawn.
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    return {value.name or "": _array(value, shape, kind, rng) for value, shape in shapes.items()}


def _array(value: ir.Value, shape: list[int], kind: str, rng: np.random.Generator) -> np.ndarray:
    dtype = dtype_of(value)
    if dtype == ir.DataType.STRING:
        raise ValueError(f"its input {value.name!r} is text")
    if dtype == ir.DataType.BOOL:
        return rng.random(shape) < 0.5
    if dtype.is_floating_point():
        drawn = rng.standard_normal(shape) if kind == "normal" else rng.random(shape) * (255 if kind == "byte" else 1)
        return drawn.astype(dtype.numpy())
    if dtype in _INTEGERS:
        # A number that the graph compares with, such as a sampling rate, decides which branch runs: not in every kind.
        if (known := compared(value)) and kind != "unit":
            return np.full(shape, known[KINDS.index(kind) % len(known)], dtype.numpy())
        # Without a table 2, which suits most others (masks, token types).
        return rng.integers(0, min(index_bound(value) or 2, 2**31), shape).astype(dtype.numpy())
    # Integers of 8 and 16 bits are data, such as pixels or quantized values: any number will do.
    try:
        low, high = np.iinfo(dtype.numpy()).min, np.iinfo(dtype.numpy()).max
    except ValueError:
        raise ValueError(f"its input {value.name!r} is {dtype.name.lower()}") from None
    return rng.integers(low, high, shape, endpoint=True).astype(dtype.numpy())


def compared(value: ir.Value) -> list[int]:
    """The integers that the graph compares a graph input with, where they fit its type, in order."""
    found: set[int] = set()
    for node, index in final_readers(value, lambda node: node.op_type in _HAND_ON or node.op_type == "Gather"):
        if node.op_type in _COMPARISONS and node.domain == "" and len(node.inputs) == 2:
            other = constant_array(node.inputs[1 - index])
            if other is not None and other.size == 1 and other.dtype.kind in "iu":
                found.add(int(other.reshape(())))
    limits = np.iinfo(dtype_of(value).numpy())
    return sorted(number for number in found if limits.min <= number <= limits.max)


def index_bound(value: ir.Value) -> int | None:
    """The rows of the smallest table that a graph input looks up, above all of its numbers; None if it looks up none.

    A table that only the body of a loop or branch reads does not count.
    """
    limits = []
    for node, index in final_readers(value, lambda node: node.op_type in _HAND_ON):
        table = node.inputs[0] if node.op_type == "Gather" and index == 1 and node.graph is value.graph else None
        if table is not None and table.shape:
            axis = node.attributes.get("axis")
            rows = dims(table)[0 if axis is None else axis.as_int()]
            limits.append(rows if isinstance(rows, int) and rows > 0 else 1)
    return min(limits, default=None)
