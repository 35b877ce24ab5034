"""Random changes of training examples: flips, shifts, gains, noise, masked bands.

All randomness comes from Dropout, which draws in training alone: from the counter-based hash in a device's steps
(`training/dropout.py`), from PyTorch's generator in the cloud. Where it does not draw, each of these transforms gives
its input, and `optimize_for_inference` removes it; so `predict` and `evaluate` have none of it. `dropout=False` of
`step_graph` turns it off in training as well.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.constants import AUGMENTS
from archipel.graph.shapes import dims
from archipel.preprocessing.transform import Transform, finite, floating, positive, with_shape

_FLOAT = int(ir.DataType.FLOAT)
REFLECT = "reflect"
_BITS = 16  # of a random number
_TERMS = 12  # of the sum that stands for a normal number


class RandomFlip(Transform, frozen=True):
    """Reverse an axis of some training examples; of any type.

    Arguments:
        axis: 2 turns "NHWC" pictures left to right.
        probability: of an example.

    Example:
        prepare = chain([Raw("uint8", ("batch", 32, 32, 3)), RandomFlip()])
    """

    axis: int = 2
    probability: float = 0.5

    def check(self) -> None:
        self.need(0 < self.probability < 1, "probability is between 0 and 1")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        axis = self.axis_of(x, self.axis)
        kept = _dropped(op, x, 1, self.probability)  # 0: this example is turned
        turned = op.Slice(x, [-1], [np.iinfo(np.int64).min + 1], [axis], [-1])
        return _chosen(op, _wide(op, op.Equal(kept, np.float32(0)), x), with_shape(turned, dims(x)), x)


class RandomShift(Transform, frozen=True):
    """Move training examples along axes, each by as many places as it draws.

    Arguments:
        most: places, in both directions.
        axes: (1, 2) for "NHWC" pictures, (1,) for sound.
        fill: what comes in; None: the border's element; "reflect": the elements beside the border, mirrored in it.

    Example:
        prepare = chain([Raw("uint8", ("batch", 32, 32, 3)), RandomShift(most=4)])
    """

    most: int
    axes: tuple[int, ...] = (1, 2)
    fill: float | Literal["reflect"] | None = None

    def check(self) -> None:
        self.need(0 < self.most < 1 << (_BITS - 2), f"most is 1 to {(1 << (_BITS - 2)) - 1}")
        self.need(self.axes, "axes has at least one")
        is_number = isinstance(self.fill, int | float) and finite([self.fill])
        self.need(self.fill in (None, REFLECT) or is_number, 'fill is a number or "reflect"')

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        fill = self.fill_of(self.fill, x) if isinstance(self.fill, int | float) else None
        known: ir.Value | None = None  # whether a place has an element of the example, and not `fill`
        for axis in self.axes:
            place = self.axis_of(x, axis)
            drawn = op.Floor(op.Mul(_uniform(op, x), float(2 * self.most + 1)))
            # 0, 1, ... most, -most, ... -1, so that nothing moves where nothing is drawn.
            places = op.Sub(drawn, op.Mul(op.Cast(op.Greater(drawn, float(self.most)), to=_FLOAT), 2.0 * self.most + 1))
            size = op.Shape(x, start=place, end=place + 1)
            along = op.Range(op.constant(np.array(0)), op.Squeeze(size, [0]), op.constant(np.array(1)))
            sources = op.Sub(op.Unsqueeze(along, [0]), op.Cast(places, to=int(ir.DataType.INT64)))
            last = op.Sub(size, [1])
            if self.fill == REFLECT:
                known_size = dims(x)[place]
                fits = not isinstance(known_size, int) or self.most < known_size
                self.need(fits, f"most is below {known_size}, the size of axis {axis}")
                inside = op.Sub(last, op.Abs(op.Sub(last, op.Abs(sources))))  # [batch, size]
            else:
                inside = op.Max(op.Min(sources, last), [0])
            shape = [dims(x)[i] if i in (0, place) else 1 for i in range(len(dims(x)))]
            apart = [i for i, size in enumerate(shape) if i not in (0, place)]
            spread = with_shape(op.Unsqueeze(inside, apart), shape) if apart else inside
            indices = with_shape(op.Expand(spread, op.Shape(x)), dims(x))
            x = _passes(with_shape(op.GatherElements(x, indices, axis=place), dims(x)), 0)
            if fill is not None:
                there = op.Equal(sources, inside)
                there = op.Unsqueeze(there, apart) if apart else there
                known = there if known is None else op.And(known, there)
        return x if known is None or fill is None else _passes(op.Where(known, x, fill), 1)


class RandomGain(Transform, frozen=True):
    """Multiply each training example by a number between `low` and `high`, in floating point.

    Arguments:
        low, high: bounds with 1 between them.
        axis: each place of this axis has a number of its own, such as 1 for channels; None: an example has one.

    Example:
        prepare = chain([Raw("int16", ("batch", 16000)), Scale(32768.0), RandomGain(0.8, 1.25)])
    """

    low: float
    high: float
    axis: int | None = None

    def check(self) -> None:
        right = finite([self.low, self.high]) and self.low <= 1 <= self.high and self.low < self.high
        self.need(right, "low and high are numbers with 1 between them")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        y = floating(op, x, floats)
        # Once around from 1, so that the gain is 1 where nothing is drawn.
        start = (1 - self.low) / (self.high - self.low)
        place = None if self.axis is None else self.axis_of(x, self.axis)
        turned = op.Add(_uniform(op, x, place), start)
        share = op.Sub(turned, op.Cast(op.GreaterOrEqual(turned, np.float32(1)), to=_FLOAT))
        gain = op.Cast(op.Add(op.Mul(share, self.high - self.low), self.low), to=int(y.dtype or floats))
        others = [i for i in range(1, len(dims(x))) if i != place]
        wide = _wide(op, gain, y) if place is None else op.Unsqueeze(gain, others) if others else gain
        return _passes(op.Mul(y, wide), 0)


class RandomNoise(Transform, frozen=True):
    """Add noise to training examples, in floating point: nearly normal (a sum of 12 signs), of mean 0. A step holds 12
    numbers for each element for a moment.

    Arguments:
        deviation: the noise's standard deviation.

    Example:
        prepare = chain([Raw("int16", ("batch", 16000)), Scale(32768.0), RandomNoise(0.01)])
    """

    deviation: float

    def check(self) -> None:
        self.need(positive(self.deviation), "deviation is above 0")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        y = floating(op, x, floats)
        shape = op.Concat(op.Shape(y), op.constant([_TERMS]), axis=0)
        one = ir.tensor(np.ones(1, np.float32))
        ones = with_shape(op.ConstantOfShape(shape, value=one), [*dims(y), _TERMS])
        # Dropout at one half gives 0 or 2: less 1, a random sign; where it does not draw, 0.
        signs = op.Sub(op.Dropout(ones, np.float32(0.5)), 1.0)
        sums = with_shape(op.ReduceSum(signs, [-1], keepdims=0), dims(y))
        noise = op.Mul(sums, self.deviation / _TERMS**0.5)
        return _passes(op.Add(y, op.Cast(noise, to=int(y.dtype or floats))), 0)


class RandomMask(Transform, frozen=True):
    """Fill a random stretch of an axis of each training example: SpecAugment (Park et al. 2019).

    Arguments:
        axis: 1 masks bands of a spectrogram [batch, bands, frames], 2 its frames.
        width: the longest stretch; its length is drawn from 0 to this, its place from all that fit.
        count: how many stretches.
        value: what to fill with: 0 is the mean behind `Normalize`.

    Example:
        raw = Raw("int16", ("batch", 16000))
        prepare = chain([raw, Scale(32768.0), LogMel(), RandomMask(axis=1, width=8, count=2)])
    """

    axis: int
    width: int
    count: int = 1
    value: float = 0.0

    def check(self) -> None:
        self.need(0 < self.width < 1 << (_BITS - 2), f"width is 1 to {(1 << (_BITS - 2)) - 1}")
        self.need(0 < self.count <= 16, "count is 1 to 16")
        self.need(finite([self.value]), "value is a number")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        axis = self.axis_of(x, self.axis)
        size = op.Cast(op.Shape(x, start=axis, end=axis + 1), to=_FLOAT)
        stop = op.Squeeze(op.Shape(x, start=axis, end=axis + 1), [0])
        along = op.Cast(op.Range(op.constant(np.array(0)), stop, op.constant(np.array(1))), to=_FLOAT)
        fill = self.fill_of(self.value, x)
        for _ in range(self.count):
            width = op.Floor(op.Mul(_uniform(op, x), float(self.width + 1)))  # [batch, 1]; 0 where nothing is drawn
            start = op.Floor(op.Mul(_uniform(op, x), op.Add(op.Sub(size, width), 1.0)))
            inside = op.And(op.GreaterOrEqual(along, start), op.Less(along, op.Add(start, width)))  # [batch, size]
            others = [i for i in range(len(dims(x))) if i not in (0, axis)]
            mask = op.Unsqueeze(inside, others) if others else inside
            x = _chosen(op, mask, fill, x)
        return x


def _dropped(op: Builder, x: ir.Value, count: int, ratio: float, axis: int | None = None) -> ir.Value:
    """Dropout of ones, float32 [batch, count]: in training 0 with probability `ratio`, else above 1; 1 elsewhere.

    With an axis [batch, its size, count].
    """
    places = [0] if axis is None else [0, axis]
    sizes = [op.Shape(x, start=place, end=place + 1) for place in places]
    ones = op.ConstantOfShape(op.Concat(*sizes, op.constant([count]), axis=0), value=ir.tensor(np.ones(1, np.float32)))
    return op.Dropout(with_shape(ones, [*(dims(x)[place] for place in places), count]), np.float32(ratio))


def _uniform(op: Builder, x: ir.Value, axis: int | None = None) -> ir.Value:
    """A number in [0, 1) for each example, float32 [batch, 1]; 0 where Dropout does not draw. With an axis [batch, its
    size]."""
    bits = op.Cast(op.Greater(_dropped(op, x, _BITS, 0.5, axis), np.float32(1.5)), to=_FLOAT)
    weights = (0.5 ** np.arange(1, _BITS + 1)).astype(np.float32)[:, None]
    drawn = with_shape(op.MatMul(bits, weights), [*dims(bits)[:-1], 1])
    return drawn if axis is None else op.Squeeze(drawn, [2])


def _wide(op: Builder, value: ir.Value, x: ir.Value) -> ir.Value:
    """`value` [batch, 1] with axes of size 1 to be broadcast to `x`."""
    missing = len(dims(x)) - 2
    if missing < 0:
        return op.Squeeze(value, [1])
    return op.Unsqueeze(value, list(range(2, 2 + missing))) if missing else value


def _chosen(op: Builder, condition: ir.Value, changed: ir.Value | np.ndarray, x: ir.Value) -> ir.Value:
    return _passes(with_shape(op.Where(condition, changed, x), dims(x)), 2)


def _passes(value: ir.Value, index: int) -> ir.Value:
    """Mark the node that gives `value`: without random numbers that is its input `index`."""
    node = value.producer()
    if node is not None:
        node.metadata_props[AUGMENTS] = str(index)
        source = node.inputs[index]
        if source is not None:
            with_shape(value, dims(source))
    return value
