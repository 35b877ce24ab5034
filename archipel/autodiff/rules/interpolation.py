"""Resize along one axis as a matrix: the weight of each input element in each output element (ONNX Resize-19)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interpolation:
    """The attributes of Resize that all axes share."""

    mode: str
    coordinates: str
    nearest: str
    cubic_a: float
    exclude_outside: bool
    antialias: bool

    def matrix(self, size: int, length: int, scale: float, roi: tuple[float, float] | None = None) -> np.ndarray:
        """[length, size] in float64, for an axis of `size` elements that becomes one of `length`.

        `roi`, for tf_crop_and_resize, is start and end as fractions of the axis; rows whose position lies outside
        of the input are zero.
        """
        position = self._positions(size, length, scale, roi)
        if self.mode == "nearest":
            index = np.clip(self._rounded(position), 0, size - 1)
            weights = np.zeros((length, size))
            weights[np.arange(length), index] = 1
        else:
            weights = self._weights(position.astype(np.float64), size, scale)
        if roi is not None:
            weights[(position < 0) | (position > size - 1)] = 0
        return weights

    def _positions(self, size: int, length: int, scale: float, roi: tuple[float, float] | None) -> np.ndarray:
        """The input position of each output element, in float32 as runtimes compute it: rounding to the nearest element
        depends on the last bit."""
        x, factor = np.arange(length, dtype=np.float32), np.float32(scale)
        half = np.float32(0.5)
        if self.coordinates == "asymmetric":
            return np.asarray(x / factor)
        if self.coordinates == "align_corners":
            return np.asarray(x * np.float32(size - 1) / np.float32(max(length - 1, 1)))
        if roi is not None:
            start, end = (np.float32(bound) for bound in roi)
            if length == 1:
                return np.full(1, half * (start + end) * np.float32(size - 1), np.float32)
            return start * np.float32(size - 1) + x * (end - start) * np.float32(size - 1) / np.float32(length - 1)
        if self.coordinates == "pytorch_half_pixel" and length == 1:
            return np.zeros(1, np.float32)
        position = (x + half) / factor
        if self.coordinates == "half_pixel_symmetric":
            # Lengths are rounded down, so the output may need a fraction of an element less than there is: center it.
            needed = np.float32(length) / (factor * np.float32(size))
            position = np.float32(size) * half * (np.float32(1) - needed) + position
        return np.asarray(position - half)

    def _rounded(self, position: np.ndarray) -> np.ndarray:
        below = np.floor(position)
        fraction = position - below
        up = {
            "floor": 0,
            "ceil": fraction > 0,
            "round_prefer_floor": fraction > 0.5,
            "round_prefer_ceil": fraction >= 0.5,
        }[self.nearest]
        return np.asarray(below + up, np.int64)

    def _weights(self, position: np.ndarray, size: int, scale: float) -> np.ndarray:
        """The filter's weights around each position; those outside of the input go to its first or last element."""
        # antialias: the filter is 1 / scale times as wide where the axis shrinks.
        shrink = min(scale, 1.0) if self.antialias else 1.0
        reach = 1 if self.mode == "linear" else 2
        if self.mode == "linear" and not self.antialias:
            position = np.clip(position, 0, size - 1)
        span = int(np.ceil(reach / shrink))
        # The elements that the filter may reach, `span` on either side of each position: [length, 2 span].
        taken = np.floor(position)[:, None].astype(np.int64) + np.arange(1 - span, span + 1)
        distance = np.abs(taken - position[:, None]) * shrink
        part = np.maximum(1 - distance, 0) if self.mode == "linear" else self._cubic(distance)
        if self.exclude_outside:
            part = np.where((taken >= 0) & (taken < size), part, 0)
        # The plain filters sum to 1; cut off or widened ones have to be brought back to that.
        if self.exclude_outside or self.antialias:
            part = part / part.sum(1, keepdims=True)
        weights = np.zeros((len(position), size))
        # add.at, not assignment: several elements outside may share one end.
        np.add.at(weights, (np.arange(len(position))[:, None], np.clip(taken, 0, size - 1)), part)
        return weights

    def _cubic(self, d: np.ndarray) -> np.ndarray:
        """Keys, Cubic convolution interpolation for digital image processing (1981), equation 4 with any `a`."""
        a = self.cubic_a
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0))
