"""Statistics of values that devices compute, as the `analyze` program of a bundle: sums, means, histograms, quantiles.

Each device uploads sums over its own examples, in fixed point, and nothing else; docs/queries.md says how a task
asks for them. Values are clipped to their bounds, and at most `max_examples` examples of a device count, so that no
single device can decide the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import onnx_ir as ir

from archipel.bundle import Program, Statistic
from archipel.bundle.roles import DType, Example, Update
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.graph.build import Builder
from archipel.graph.shapes import dims

PROGRAM = "analyze"
_LONGEST = 240  # "<name>/histogram" must fit the 256 characters of a manifest's names


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The sum of an output's values over the examples that count, of all devices.

        Sum(name="seconds", low=0, high=60)

    Arguments:
        name: of the statistic, 1 to 240 printable characters.
        low, high: each value is clipped to [low, high] before it is added; `low` is below `high`.
        of: the name of the model's output. "" where the model has only one.

    Example:
        Analysis([Sum(name="rain", low=0, high=100)])
    """

    name: str
    low: float
    high: float
    of: str = ""


@dataclass(frozen=True, kw_only=True)
class Mean(Sum):
    """The mean of an output's values, each clipped to [low, high]; arguments as of `Sum`.

    Example:
        Analysis([Mean(name="light", low=0, high=1)])
    """


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many of an output's values lie in each bin.

    Arguments:
        name: of the statistic, 1 to 240 printable characters.
        edges: finite numbers in ascending order. They make len(edges) + 1 bins: the values below the first edge,
            those from each edge up to the next, and those from the last edge on.
        of: the name of the model's output. "" where the model has only one.

    Example:
        Analysis([Histogram(name="peak", edges=[0.2, 0.4])])
    """

    name: str
    edges: Sequence[float]
    of: str = ""


@dataclass(frozen=True, kw_only=True)
class Quantiles(Histogram):
    """Quantiles of an output's values, interpolated within the bins of a histogram.

    Arguments are those of `Histogram`, and `probabilities`: different numbers from 0 to 1, such as 0.5 for the median.

    Example:
        Analysis([Quantiles(name="peak", edges=[0.2, 0.4, 0.8])])
    """

    probabilities: Sequence[float] = (0.25, 0.5, 0.75)


AnyStatistic = Sum | Histogram


def check_statistics(statistics: Sequence[AnyStatistic]) -> None:
    """Refuse statistics that no model could have. Raises ConversionError that names the statistic."""
    if isinstance(statistics, str) or not isinstance(statistics, Sequence) or not statistics:  # a text is a Sequence
        raise ConversionError(f"statistics: expected a list of one or more, got {statistics!r}")
    names: set[str] = set()
    for wanted in statistics:
        if not isinstance(wanted, AnyStatistic):
            raise ConversionError(f"statistics: expected converter.Sum, Mean, Histogram or Quantiles, got {wanted!r}")
        if not isinstance(wanted.name, str) or not 0 < len(wanted.name) <= _LONGEST or not wanted.name.isprintable():
            raise ConversionError(f"statistic {wanted.name!r}: a name is text of 1 to {_LONGEST} printable characters")
        if wanted.name in names:
            raise ConversionError(f"statistic {wanted.name!r}: there are two of that name")
        names.add(wanted.name)
        try:
            _check_bounds(wanted)
        except (TypeError, ValueError):
            raise ConversionError(f"statistic {wanted.name!r}: a bound that is no number, in {wanted!r}") from None


def _check_bounds(wanted: AnyStatistic) -> None:
    if isinstance(wanted, Sum):
        if not (math.isfinite(wanted.low) and math.isfinite(wanted.high) and wanted.low < wanted.high):
            raise ConversionError(f"statistic {wanted.name!r}: low {wanted.low} is not below high {wanted.high}")
        return
    edges = tuple(float(edge) for edge in wanted.edges)
    if not edges or not all(map(math.isfinite, edges)) or any(a >= b for a, b in pairwise(edges)):
        raise ConversionError(f"statistic {wanted.name!r}: edges must be finite and grow, got {edges[:8]}")
    if isinstance(wanted, Quantiles):
        shares = tuple(float(share) for share in wanted.probabilities)
        if not shares or not all(0 <= share <= 1 for share in shares) or len(set(shares)) != len(shares):
            raise ConversionError(
                f"statistic {wanted.name!r}: probabilities must be from 0 to 1, each once, got {shares}"
            )


def check_counts(max_examples: int, bits: int) -> None:
    """Refuse counts that need more than `bits` of the fixed-point encoding. Raises ConversionError."""
    if (needed := _counter_bits(max_examples)) > bits:
        raise ConversionError(
            f"max_examples {max_examples}: counts need {needed} bits, the privacy policy allows {bits} (max_bits)"
        )


def _counter_bits(max_examples: int) -> int:
    # The encoding is signed: counts from 0 to max_examples, and one bit for the sign.
    return math.ceil(math.log2(max_examples + 1)) + 1


def _values_per_example(name: str, output: ir.Value) -> int:
    """How many values of an output [n, ...] belong to one example. Raises ConversionError if that is not fixed."""
    sizes = None if output.shape is None else dims(output)[1:]
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        axes = "unknown axes" if sizes is None else list(sizes)
        raise ConversionError(
            f"statistic {name!r}: output {output.name!r} has {axes} for each example, so it is not known how many "
            "values a device counts; reduce it to a fixed number of values"
        )
    return math.prod(size for size in sizes if isinstance(size, int))


def analyze_program(
    values: Model, statistics: Sequence[AnyStatistic], *, max_examples: int, bits: int
) -> tuple[Model, tuple[Statistic, ...]]:
    """The program and what the manifest says of it.

    `values` is a model whose outputs have one or more values for each example; `bits` is the width of the fixed-point
    encoding of sums, while counts are exact. The caller has called `check_statistics` and `check_counts`. Raises
    ConversionError for a statistic of an output that the model does not have.
    """
    model = values.copy()
    graph = model.ir.graph
    outputs = {str(value.name): value for value in graph.outputs}
    inputs = tuple(Example(name=info.name, dtype=cast(DType, info.dtype), shape=info.shape) for info in model.inputs)
    graph.outputs.clear()  # the values themselves do not leave the device
    builder = _Statistics(Builder(graph), bits, max_examples)
    for wanted in statistics:
        builder.add(wanted, outputs)
    signature = Program(kind="analyze", inputs=inputs, outputs=tuple(builder.ports))
    return Model(model.ir, signature=signature), tuple(builder.described)


class _Statistics:
    """The statistics added to the graph so far, with the ports and the manifest's entries that they need."""

    def __init__(self, op: Builder, bits: int, max_examples: int) -> None:
        self._op = op
        self._bits, self._max_examples = bits, max_examples
        self.ports: list[Update] = []
        self.described: list[Statistic] = []

    def add(self, wanted: AnyStatistic, outputs: dict[str, ir.Value]) -> None:
        of = wanted.of or (next(iter(outputs)) if len(outputs) == 1 else "")
        if of not in outputs:
            raise ConversionError(
                f"statistic {wanted.name!r}: of={of!r}, but the model's outputs are {sorted(outputs)}"
            )
        most = self._max_examples * _values_per_example(wanted.name, outputs[of])
        check_counts(most, self._bits)
        values = self._op.Cast(self._op.Reshape(outputs[of], [-1]), to=ir.DataType.FLOAT.value)
        self.described.append(
            self._histogram(wanted, values, most)
            if isinstance(wanted, Histogram)
            else self._total(wanted, values, most)
        )

    def _total(self, wanted: Sum, values: ir.Value, most: int) -> Statistic:
        clipped = self._op.Clip(values, np.float32(wanted.low), np.float32(wanted.high))
        # The bound of the fixed-point encoding: the largest sum of as many clipped values as a device may have.
        largest = max(abs(wanted.low), abs(wanted.high)) * most
        total = self._op.ReduceSum(clipped, keepdims=0)
        self._upload(f"{wanted.name}/sum", total, (), float(largest), self._bits)
        if not isinstance(wanted, Mean):
            return Statistic(name=wanted.name, kind="sum", program=PROGRAM)
        self._upload_count(f"{wanted.name}/count", self._op.Squeeze(self._size(values), [0]), (), most)
        return Statistic(name=wanted.name, kind="mean", program=PROGRAM)

    def _histogram(self, wanted: Histogram, values: ir.Value, most: int) -> Statistic:
        op, edges = self._op, tuple(float(edge) for edge in wanted.edges)
        # A bin's count is the number of values that reach its lower edge, less those that reach its upper edge.
        above = op.GreaterOrEqual(op.Unsqueeze(values, [1]), np.array(edges, np.float32))
        reached = op.ReduceSum(op.Cast(above, to=ir.DataType.FLOAT.value), [0], keepdims=0)
        upper = op.Concat(self._size(values), reached, axis=0)
        lower = op.Concat(reached, np.zeros(1, np.float32), axis=0)
        self._upload_count(f"{wanted.name}/histogram", op.Sub(upper, lower), (len(edges) + 1,), most)
        if not isinstance(wanted, Quantiles):
            return Statistic(name=wanted.name, kind="histogram", program=PROGRAM, edges=edges)
        shares = tuple(float(share) for share in wanted.probabilities)
        return Statistic(name=wanted.name, kind="quantiles", program=PROGRAM, edges=edges, probabilities=shares)

    def _size(self, values: ir.Value) -> ir.Value:
        """The number of values, float32 [1]."""
        return self._op.Cast(self._op.Shape(values), to=ir.DataType.FLOAT.value)

    def _upload_count(self, name: str, value: ir.Value, shape: tuple[int, ...], most: int) -> None:
        # One step of the encoding is 1: counts are exact.
        bits = _counter_bits(most)
        self._upload(name, value, shape, float((1 << (bits - 1)) - 1), bits)

    def _upload(self, name: str, value: ir.Value, shape: tuple[int, ...], bound: float, bits: int) -> None:
        self._op.free_name(name)
        self._op.name_output(value, name)
        self.ports.append(
            Update(
                name=name,
                tensor=name,
                dtype="float32",
                shape=shape,
                kind="value",
                weighting="uniform",
                range=bound,
                bits=bits,
            )
        )
