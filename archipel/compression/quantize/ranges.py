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
"""Most elements of one value that a histogram takes from a batch; from a larger value it takes a random sample."""


@dataclass(frozen=True)
class Range:
    """From `low` to `high`; 0 is always inside, so that zeros (padding, Relu) have an exact integer."""

    low: float
    high: float

    def grid(self, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
        """Scale, float32, and zero point, uint8 or int8, both []."""
        scale, zero = (unsigned_grid if kind == "uint8" else signed_grid)(self.low, self.high)
        return np.array(scale, np.float32), np.array(zero, kind)


@dataclass(frozen=True)
class Observer:
    """How ranges follow from calibration data. `percentile`, in percent, is for that method alone.

    "minmax" takes all values, "percentile" cuts off the tails, "mse" has the least squared error of rounding.
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
        # The first pass gives the ends of the histograms that the second one fills.
        histograms = {name: Histogram(seen.low, seen.high) for name, seen in limits.items()}
        run = open_session(_with_samples(model, names, size))
        for batch in examples.batches(size):
            for histogram, values in zip(histograms.values(), run(dict(batch.fields))):
                histogram.add(values)
        return {name: self._clipped_range(histogram) for name, histogram in histograms.items()}

    def _clipped_range(self, seen: Histogram) -> Range:
        if self.kind == "int8":
            by_error = self.method == "mse"
            largest = seen.least_error_magnitude() if by_error else seen.magnitude_percentile(self.percentile)
            return Range(-largest, largest)
        low, high = seen.least_error() if self.method == "mse" else seen.percentile(self.percentile)
        return Range(min(low, 0.0), max(high, 0.0))


def _limits(model: Model, names: Sequence[str], examples: Examples, size: int) -> dict[str, Range]:
    """Least and largest, computed inside the graph, so that its outputs stay small whatever the batch."""
    work, values = _without_outputs(model, names)
    op = Builder(work.ir.graph, scope="observe")
    for index, value in enumerate(values):
        # The sum shows NaN and infinities, which a maximum may pass over.
        for kind in ("ReduceMin", "ReduceMax", "ReduceSum"):
            op.name_output(op(kind, value, keepdims=0), f"{kind}.{index}")
    run = open_session(work)
    # From 0, which every range includes.
    low, high = np.zeros(len(names)), np.zeros(len(names))
    for batch in examples.batches(size):
        extremes = np.array(run(dict(batch.fields)), np.float64).reshape(-1, 3)
        if not np.isfinite(extremes).all():
            name = names[int(np.argmin(np.isfinite(extremes).all(axis=1)))]
            raise CompressionError(f"calibration: {name!r} is not finite on the calibration data")
        low, high = np.minimum(low, extremes[:, 0]), np.maximum(high, extremes[:, 1])
    return {name: Range(float(bottom), float(top)) for name, bottom, top in zip(names, low, high)}


def _with_samples(model: Model, names: Sequence[str], size: int) -> Model:
    """A graph whose outputs are the values, flat; of a larger value, SAMPLE elements at random places, fixed here."""
    work, values = _without_outputs(model, names)
    op = Builder(work.ir.graph, scope="sample")
    # Shares of a value's length, the same for all: a batch may have any size.
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


def _without_outputs(model: Model, names: Sequence[str]) -> tuple[Model, list[ir.Value]]:
    """A copy without outputs, and its values of these names."""
    work = Model(model.copy().ir)
    graph = work.ir.graph
    by_name: Mapping[str, ir.Value] = {
        **{str(value.name): value for node in graph for value in node.outputs},
        **{str(value.name): value for value in graph.inputs},
    }
    graph.outputs.clear()
    return work, [by_name[name] for name in names]
