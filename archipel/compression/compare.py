"""Where two forms of one model diverge: compares every value that both compute on the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from archipel.compression.agreement import Agreement, PairedAccuracy
from archipel.compression.examples import Data, Examples, fixed_batch
from archipel.compression.instrument import Instrumented
from archipel.compression.matching import Layer, Reading, Readings, match
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.graph.functions import inline_functions

ROWS = 256
BATCH = 16
THRESHOLD = 20.0
"""dB: noise of a hundredth of the signal's power, a tenth of its amplitude.

Measured with noise in the weights of a trained digits CNN: outputs at 18 to 22 dB changed 3 to 5 % of the classes and 1
to 2 points of accuracy, at 11 to 14 dB 8 to 11 % of the classes, from 31 dB on at most 1 %.
"""


@dataclass(frozen=True)
class Row:
    """One value of graph a and the one of graph b that stands for it.

    `snr_db` is 10 log10(sum a^2 / sum (a - b)^2) over all elements of all examples: inf if they are equal, -inf if only
    one has an infinity or NaN. `cosine` is that of the two as one long vector each, None where it is not defined. Both
    are None if the shapes differ (`reason` says how). `largest` is max |a - b|. `position` counts in the order of graph
    a; `layer` is the operator that computes the value, with the name of its weight.
    """

    name: str
    counterpart: str
    layer: str
    position: int
    output: bool
    shape: tuple[int, ...]
    cosine: float | None
    snr_db: float | None
    largest: float | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: `snr_db` is null if `equal` is true, or `reason` says why."""
        finite = self.snr_db is not None and math.isfinite(self.snr_db)
        largest = self.largest if self.largest is not None and math.isfinite(self.largest) else None
        return {
            **asdict(self),
            "shape": list(self.shape),
            "snr_db": self.snr_db if finite else None,
            "largest": largest,
            "equal": self.snr_db == math.inf,
        }


@dataclass(frozen=True)
class Comparison:
    """`rows`: the graph's outputs first (over all `examples`), then every other value in the order of graph a (over the
    first `compared` examples). `unmatched` are values of a without a counterpart in b: folded away, or not recognized.

    `agreement` is the share of equal predicted classes of the first output with classes, `accuracy` that of both
    against the labels; None without classes or labels. `threshold` is in decibels (`first_divergence`).

    Example:
        small, _ = archipel.compress(model, [StaticInt8()], data=data)
        found = compare(model, small, data)
        print(found.agreement, found.accuracy, found.first_divergence)
    """

    rows: tuple[Row, ...]
    unmatched: tuple[str, ...]
    examples: int
    compared: int
    threshold: float
    agreement: float | None
    accuracy: PairedAccuracy | None

    @property
    def outputs(self) -> tuple[Row, ...]:
        """The rows of the graph's outputs."""
        return tuple(row for row in self.rows if row.output)

    @property
    def first_divergence(self) -> Row | None:
        """The first value, in the order of graph a, whose signal-to-noise ratio is below the threshold."""
        below = [row for row in self.rows if row.snr_db is not None and row.snr_db < self.threshold]
        return min(below, key=lambda row: row.position, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        first = self.first_divergence
        return {
            "examples": self.examples,
            "compared": self.compared,
            "threshold_db": self.threshold,
            "agreement": self.agreement,
            "accuracy": None if self.accuracy is None else self.accuracy.to_dict(),
            "first_divergence": None if first is None else first.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "unmatched": list(self.unmatched),
        }


def compare(
    a: Model,
    b: Model,
    data: Data | Examples,
    *,
    rows: int = ROWS,
    threshold: float = THRESHOLD,
    batch_size: int = BATCH,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run both graphs on `data` and compare every float value that both compute.

        print(compare(model, small.deployed(), {"input": images, "label": labels}).first_divergence)

    Values are matched by name, layers by the names of their weights, and integers are compared as the float numbers
    that they stand for (`matching.match`). Outputs, agreement and accuracy are those of the graphs as devices run them.
    Inner values come from a run in which ONNX Runtime fuses nothing, so that they exist. The measure is that of Lin et
    al. 2016 ("Fixed point quantization of deep convolutional networks", section 3) and of
    onnxruntime.quantization.qdq_loss_debug.

    Arguments:
        a, b: two forms of one model; `b` is typically made from `a`: quantized, pruned or converted.
        data: an array for every input of `a`; labels (under "label") give the accuracy of both.
        rows: inner values are compared on so many examples, the first ones; 0: outputs only.
        threshold: in dB; values with a lower signal-to-noise ratio have diverged.
        batch_size: examples whose values, of both graphs, are in memory at a time.
        progress: called with the number of examples done, and of all.

    Raises CompressionError for data that does not fit, or a graph that does not run.

    Example:
        small, _ = archipel.compress(model, [StaticInt8()], data=data)
        print(compare(model, small, data))
    """
    if rows < 0 or batch_size < 1:
        raise CompressionError(f"compare: rows must be at least 0 and batch_size at least 1, got {rows}, {batch_size}")
    a, b = _inline(a), _inline(b)
    examples = data if isinstance(data, Examples) else Examples.of(data, a, "data", labelled=False)
    size = _batch_size(a, b, batch_size, len(examples))
    readings_a, readings_b = Readings(a), Readings(b)
    matched = [(r, other) for r, other in match(readings_a, readings_b) if not r.output]
    pairs = [(reading, other) for reading, other in matched if other is not None]
    outputs = _output_pairs(a, b)
    plain_a, plain_b = Instrumented(a, "a"), Instrumented(b, "b")
    # Two sessions for each graph: one as devices run it, one that is not optimized and returns the inner values.
    inside_a = Instrumented(a, "a", [reading for reading, _ in pairs])
    inside_b = Instrumented(b, "b", [other for _, other in pairs])
    # Sums and not values are kept, so that memory does not grow with the examples.
    output_sums = [_Sums() for _ in outputs]
    inside_sums = [_Sums() for _ in pairs]
    agreement = Agreement()
    done = compared = 0
    for batch in examples.batches(size):
        feed = dict(batch.fields)
        answers_a, answers_b = plain_a.run(feed), plain_b.run(feed)
        for sums, (x, y) in zip(output_sums, outputs):
            sums.add(answers_a[x], answers_b[y])
        _count(agreement, [(answers_a[x], answers_b[y]) for x, y in outputs], batch)
        if pairs and compared < rows:
            wanted = (
                # A graph of a fixed batch takes no part of one.
                len(batch) if size == fixed_batch(a) or size == fixed_batch(b) else min(len(batch), rows - compared)
            )
            part = {name: array[:wanted] for name, array in feed.items()}
            for sums, first, second in zip(inside_sums, inside_a.run(part), inside_b.run(part)):
                sums.add(first, second)
            compared += wanted
        done += len(batch)
        if progress is not None:
            progress(done, len(examples))
    place = {reading: number for number, reading in enumerate(readings_a.all)}
    layers = {r: layer for layer in readings_a.layers() for _, r in (*layer.affine, *layer.clipped)}
    table = []
    for sums, (x, y) in zip(output_sums, outputs):
        value, other_value = a.ir.graph.outputs[x], b.ir.graph.outputs[y]
        reading = readings_a.of.get(value)
        position = len(place) + x if reading is None else place[reading]
        layer = "" if reading is None else _title(reading, layers)
        table.append(sums.row(str(value.name), str(other_value.name), layer, position, True))
    for sums, (reading, other) in zip(inside_sums, pairs):
        table.append(sums.row(reading.name, other.name, _title(reading, layers), place[reading], False))
    unmatched = tuple(reading.name for reading, other in matched if other is None)
    return Comparison(
        tuple(table), unmatched, len(examples), compared, threshold, agreement.share, agreement.accuracy()
    )


class _Sums:
    """Running sums over the batches of one pair of values, in float64."""

    def __init__(self) -> None:
        self._shape: tuple[int, ...] = ()
        self._aa = self._bb = self._ab = self._noise = self._largest = 0.0
        self._odd = 0
        self._reason = ""

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        self._shape = a.shape
        if _without_ones(a.shape) != _without_ones(b.shape):
            self._reason = _shape_reason(a.shape, b.shape)
            return
        x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            # Only elements that differ count: the minus infinity of an attention mask is the same in both.
            self._odd += int((~finite & (x != y) & ~(np.isnan(x) & np.isnan(y))).sum())
            x, y = x[finite], y[finite]
        self._aa += float(x @ x)
        self._bb += float(y @ y)
        self._ab += float(x @ y)
        x -= y
        self._noise += float(x @ x)
        if x.size:
            self._largest = max(self._largest, float(np.abs(x).max()))

    def row(self, name: str, counterpart: str, layer: str, position: int, output: bool) -> Row:
        cosine: float | None = None
        snr: float | None = None
        largest: float | None = None
        reason = self._reason
        if not reason and self._odd:
            snr, largest, reason = -math.inf, math.inf, f"not finite in one of the two: {self._odd} elements"
        elif not reason:
            snr, largest = _decibels(self._aa, self._noise), self._largest
            if self._aa and self._bb:
                cosine = max(-1.0, min(1.0, self._ab / math.sqrt(self._aa) / math.sqrt(self._bb)))
        return Row(name, counterpart, layer, position, output, self._shape, cosine, snr, largest, reason)


def _decibels(signal: float, noise: float) -> float:
    if not noise:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    # Converters write a convolution along one axis as one along two, of which one has the size 1.
    return tuple(size for size in shape if size != 1)


def _shape_reason(a: Sequence[int], b: Sequence[int]) -> str:
    if len(a) == len(b) > 1 and a[1] != b[1] and a[0] == b[0] and tuple(a[2:]) == tuple(b[2:]):
        return f"not comparable: {a[1]} against {b[1]} channels"
    return f"not comparable: {list(a)} against {list(b)}"


def _inline(model: Model) -> Model:
    if not model.ir.functions:
        return model
    model = model.copy()
    inline_functions(model.ir)
    return model


def _batch_size(a: Model, b: Model, wanted: int, count: int) -> int:
    fixed = {name: size for name, size in (("a", fixed_batch(a)), ("b", fixed_batch(b))) if size is not None}
    if len(set(fixed.values())) > 1:
        raise CompressionError(f"compare: a takes batches of {fixed['a']} and b of {fixed['b']}; convert one again")
    size = next(iter(fixed.values()), wanted)
    if fixed and count % size:
        raise CompressionError(f"compare: {count} examples, but the graph takes {size} at a time; give a multiple")
    return size


def _output_pairs(a: Model, b: Model) -> list[tuple[int, int]]:
    names_a, names_b = [info.name for info in a.outputs], [info.name for info in b.outputs]
    if set(names_a) & set(names_b):
        pairs = [(i, names_b.index(name)) for i, name in enumerate(names_a) if name in names_b]
    else:
        pairs = list(zip(range(len(names_a)), range(len(names_b)))) if len(names_a) == len(names_b) else []
    if not pairs:
        raise CompressionError(
            f"compare: no output of a ({', '.join(names_a)}) is one of b ({', '.join(names_b)}); are they two forms of "
            "one model?"
        )
    return pairs


def _count(agreement: Agreement, outputs: Sequence[tuple[np.ndarray, np.ndarray]], batch: Examples) -> None:
    """Add the first output that has classes."""
    for x, y in outputs:
        classes = x.ndim > 1 and x.shape == y.shape and len(x) == len(batch) and x.dtype.kind == "f"
        if classes and max(x.shape[1], x.shape[-1]) > 1:
            class_labels = batch.labels is not None and batch.labels.dtype.kind in "iu"
            agreement.add(x, y, batch.labels if class_labels else None)
            return


def _title(reading: Reading, layers: Mapping[Reading, Layer]) -> str:
    layer = layers.get(reading)
    if layer is None:
        return f"{reading.node.op_type} {reading.node.name or reading.name}"
    title = f"{layer.node.op_type} {', '.join(sorted(layer.weights))}"
    return title if layer.node is reading.node else f"{title} + {reading.node.op_type}"
