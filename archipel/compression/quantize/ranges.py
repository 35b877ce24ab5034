"""Ranges of activations, observed on calibration data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from archipel.compression.examples import Examples, fixed_batch
from archipel.compression.quantize.histograms import Histogram, signed_grid, unsigned_grid
from archipel.compression.score import open_session
from archipel.errors import CompressionError
from archipel.graph import Builder, Model
from archipel.graph.shapes import dims

Method = Literal["minmax", "percentile", "mse"]
Kind = Literal["uint8", "int8"]

SAMPLE = 2**17
"""Elements of one value that a histogram takes from a batch; of larger ones as many, drawn at random."""


@dataclass(frozen=True)
class Range:
    """From `low` to `high`, float; 0 is always inside, so that zeros (padding, Relu) have an exact integer."""

    low: float
    high: float

    def grid(self, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
        """Scale, float32, and zero point, uint8 or int8, both []."""
        scale, zero = (unsigned_grid if kind == "uint8" else signed_grid)(self.low, self.high)
        return np.array(scale, np.float32), np.array(zero, kind)


@dataclass(frozen=True)
class Observer:
    """How ranges follow from calibration data. `percentile` counts for that method alone, in percent.

    "minmax" takes all that was seen, "percentile" cuts off the tails, "mse" has the least squared error of rounding.
    """

    method: Method = "minmax"
    percentile: float = 99.99
    kind: Kind = "uint8"
    batch_size: int = 64

    def ranges(self, model: Model, names: Sequence[str], examples: Examples) -> dict[str, Range]:
        """The range of each value, by name, in two passes. Raises CompressionError where values are not finite."""
        size = fixed_batch(model) or self.batch_size
        limits = _limits(model, names, examples, size)
        if self.method == "minmax" or not names:
            return limits
        found = {name: Histogram(seen.low, seen.high) for name, seen in limits.items()}
        run = open_session(_sampled(model, names, size))
        for batch in examples.batches(size):
            for histogram, values in zip(found.values(), run(dict(batch.fields))):
                histogram.add(values)
        return {name: self._chosen(histogram) for name, histogram in found.items()}

    def _chosen(self, seen: Histogram) -> Range:
        if self.kind == "int8":
            by_error = self.method == "mse"
            largest = seen.least_error_magnitude() if by_error else seen.magnitude_percentile(self.percentile)
            return Range(-largest, largest)
        low, high = seen.least_error() if self.method == "mse" else seen.percentile(self.percentile)
        return Range(min(low, 0.0), max(high, 0.0))


def _limits(model: Model, names: Sequence[str], examples: Examples, size: int) -> dict[str, Range]:
    """Least and largest, computed inside the graph: what it hands out stays small, whatever the batch."""
    work, values = _tapped(model, names)
    op = Builder(work.ir.graph, scope="observe")
    for index, value in enumerate(values):
        # Sums are not finite where one element is not; a maximum may pass over NaN.
        for kind in ("ReduceMin", "ReduceMax", "ReduceSum"):
            op.name_output(op(kind, value, keepdims=0), f"{kind}.{index}")
    run = open_session(work)
    low, high = np.zeros(len(names)), np.zeros(len(names))
    for batch in examples.batches(size):
        found = np.array(run(dict(batch.fields)), np.float64).reshape(-1, 3)
        if not np.isfinite(found).all():
            name = names[int(np.argmin(np.isfinite(found).all(axis=1)))]
            raise CompressionError(f"calibration: {name!r} is not finite on the calibration data")
        low, high = np.minimum(low, found[:, 0]), np.maximum(high, found[:, 1])
    return {name: Range(float(bottom), float(top)) for name, bottom, top in zip(names, low, high)}


def _sampled(model: Model, names: Sequence[str], size: int) -> Model:
    """A graph whose outputs are each value, flat, or SAMPLE elements of it drawn once."""
    work, values = _tapped(model, names)
    op = Builder(work.ir.graph, scope="sample")
    places = op.constant(np.random.default_rng(0).random(SAMPLE, dtype=np.float32))
    for index, value in enumerate(values):
        flat = op.Reshape(value, [-1])
        if _elements(value, size) > SAMPLE:
            count = op.Cast(op.Size(value), to=int(ir.DataType.FLOAT))
            # The float may round up to the count itself, which is one too far.
            drawn = op.Cast(op.Floor(op.Mul(places, count)), to=int(ir.DataType.INT64))
            flat = op.Gather(flat, op.Min(drawn, op.Sub(op.Size(value), 1)))
        op.name_output(flat, f"sample.{index}")
    return work


def _elements(value: ir.Value, size: int) -> int:
    count = 1
    for dim in dims(value):
        count *= dim if isinstance(dim, int) else size
    return count


def _tapped(model: Model, names: Sequence[str]) -> tuple[Model, list[ir.Value]]:
    """A copy without outputs, and its values of these names."""
    work = Model(model.copy().ir)
    graph = work.ir.graph
    by_name: Mapping[str, ir.Value] = {
        **{str(value.name): value for node in graph for value in node.outputs},
        **{str(value.name): value for value in graph.inputs},
    }
    graph.outputs.clear()
    return work, [by_name[name] for name in names]
