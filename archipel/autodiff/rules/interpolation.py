"""Resize along one axis as a matrix: how much each output element takes of each input element (ONNX Resize-19)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interpolation:
    """The attributes of Resize that are the same for every axis."""

    mode: str
    coordinates: str
    nearest: str
    cubic_a: float
    exclude_outside: bool
    antialias: bool

    def matrix(self, size: int, length: int, scale: float, roi: tuple[float, float] | None = None) -> np.ndarray:
        """[length, size] in float64, for an axis of `size` elements that becomes one of `length`.

        `roi` is start and end as fractions, for tf_crop_and_resize: rows that lie outside of the input are zero.
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
        """Where output elements lie in the input. In float32, as runtimes compute it: what is nearest hangs on it."""
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
            # The input is longer than the output needs by a fraction of an element: leave out as much on both sides.
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
        """The filter around each position; what falls outside of the input counts for its ends."""
        shrink = min(scale, 1.0) if self.antialias else 1.0
        reach = 1 if self.mode == "linear" else 2
        if self.mode == "linear" and not self.antialias:
            position = np.clip(position, 0, size - 1)
        span = int(np.ceil(reach / shrink))
        taken = np.floor(position)[:, None].astype(np.int64) + np.arange(1 - span, span + 1)
        distance = np.abs(taken - position[:, None]) * shrink
        part = np.maximum(1 - distance, 0) if self.mode == "linear" else self._cubic(distance)
        if self.exclude_outside:
            part = np.where((taken >= 0) & (taken < size), part, 0)
        if self.exclude_outside or self.antialias:
            part = part / part.sum(1, keepdims=True)
        weights = np.zeros((len(position), size))
        np.add.at(weights, (np.arange(len(position))[:, None], np.clip(taken, 0, size - 1)), part)
        return weights

    def _cubic(self, d: np.ndarray) -> np.ndarray:
        """Keys, Cubic convolution interpolation for digital image processing (1981), equation 4 with any `a`."""
        a = self.cubic_a
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0))
