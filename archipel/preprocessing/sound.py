"""Transforms of sound [batch, samples]: pre-emphasis, spectrogram, log-mel spectrogram, MFCC.

The windowed Fourier transform is one Conv whose kernels are the window times cosines and sines. On this CPU that takes
a third of the time of ONNX's STFT in ONNX Runtime, it keeps lengths that are known only at run time, and every engine
has it. The kernels are not stored: they are looked up in one table of a cosine's period when a runtime opens the graph.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.constants import UNPACK
from archipel.graph.shapes import Dim, dims
from archipel.preprocessing.mel import MelScale, cosine_transform, mel_filters
from archipel.preprocessing.transform import Transform, floating, number_type, positive, with_shape
from archipel.preprocessing.windows import frames_of

_MAX_BANDS = 1024
_MAX_POINTS = 1 << 13  # of a Fourier transform: its kernels have as many elements squared, here 268 MB


class Preemphasis(Transform, frozen=True):
    """Raise the high frequencies of sound [batch, samples]: x[i] - coefficient * x[i - 1], with x[-1] of 0.

    Arguments:
        coefficient: from 0, which changes nothing, to 1.

    Example:
        prepare = chain([Raw("int16", ("batch", 16000)), Scale(32768.0), Preemphasis()])
    """

    coefficient: float = 0.97

    def check(self) -> None:
        self.need(0 <= self.coefficient <= 1, "coefficient is 0 to 1")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        shape = self.need_rank(x, 2, "sound [batch, samples]")
        y = floating(op, x, floats)
        before = op.Pad(op.Slice(y, [0], [-1], [1]), np.array([1, 0]), None, [1])
        return with_shape(op.Sub(y, op.Mul(before, float(self.coefficient))), shape)


class Spectrogram(Transform, frozen=True):
    """The short-time Fourier transform's magnitude of sound [batch, samples], as [batch, bins, frames].

    Frame i has the `points` samples from i * hop on, of which the Hann window (periodic) covers the middle ones; there
    are 1 + (samples - points) // hop frames and 1 + points / 2 bins, as in PyTorch's and librosa's.

    Arguments:
        points: of each Fourier transform (n_fft), an even number.
        window: samples of the Hann window, `points` at most; 0: `points`.
        hop: samples from one frame to the next; 0: half a window.
        power: 2 for the power, 1 for the magnitude.
        center: fill half of `points` on both sides, so that frame i has its middle at sample i * hop.
        fill: with what: "reflect" the sound (PyTorch's default) or "zeros" (librosa's).

    Example:
        prepare = chain([Raw("int16", ("batch", 16000)), Scale(32768.0), Spectrogram(points=512, hop=256)])
    """

    points: int = 512
    window: int = 0
    hop: int = 0
    power: float = 2.0
    center: bool = False
    fill: Literal["reflect", "zeros"] = "reflect"

    def check(self) -> None:
        self.need(0 < self.points <= _MAX_POINTS and self.points % 2 == 0, f"points is even, at most {_MAX_POINTS}")
        self.need(0 <= self.window <= self.points and self.window != 1, f"window is 2 to {self.points} (points)")
        self.need(self.hop >= 0, "hop is above 0")
        self.need(self.power in (1, 2), f"power is 1 or 2, is {self.power!r}")
        self.need(self.fill in ("reflect", "zeros"), f"fill is reflect or zeros, is {self.fill!r}")

    @property
    def width(self) -> int:
        """Samples of the window."""
        return self.window or self.points

    @property
    def step(self) -> int:
        """Samples from one frame to the next."""
        return self.hop or self.width // 2

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        batch, samples = self.need_rank(x, 2, "sound [batch, samples]")
        x = self._trimmed(op, floating(op, x, floats), samples)
        kernels = _kernels(op, self.points, self.width, x)
        if x.dtype == ir.DataType.DOUBLE:  # ONNX Runtime has no Conv of float64
            parts = op.swap_last(op.MatMul(frames_of(op, x, self.width, self.step), op.swap_last(kernels)))
        else:
            parts = op.Conv(op.Unsqueeze(x, [1]), _unfolded(op.Unsqueeze(kernels, [1])), strides=[self.step])
        bins, frames = self.points // 2 + 1, self._frames(samples)
        with_shape(parts, [batch, 2 * bins, frames])
        real, imaginary = op.emit("Split", op.Mul(parts, parts), outputs=2, axis=1, num_outputs=2)
        power = op.Add(real, imaginary)
        return op.Sqrt(power) if self.power == 1 else power

    def _trimmed(self, op: Builder, x: ir.Value, samples: Dim) -> ir.Value:
        """The samples that windows cover: those outside the first and last windows are left out of the Conv."""
        least = self.points // 2 + 1 if self.center else self.points
        if isinstance(samples, int):
            self.need(samples >= least, f"needs {least} samples or more, got {samples}")
        outside = self.points - self.width
        before, after = outside // 2, outside - outside // 2
        if self.center:
            half = self.points // 2
            pads = np.array([half - before, half - after])
            return op.Pad(x, pads, None, [1], mode="reflect" if self.fill == "reflect" else "constant")
        return op.Slice(x, [before], [-after if after else np.iinfo(np.int64).max], [1]) if outside else x

    def _frames(self, samples: Dim) -> Dim:
        if not isinstance(samples, int):
            return None
        covered = samples + (2 * (self.points // 2) if self.center else 0)
        return 1 + (covered - self.points) // self.step


class LogMel(Spectrogram, frozen=True):
    """The logarithm of a spectrogram in mel bands: sound [batch, samples] -> [batch, bands, frames].

    Beside the arguments of `Spectrogram` it has

    Arguments:
        sample_rate: of the sound, in Hz.
        bands: how many mel bands.
        low, high: the bands' first and last frequency, in Hz; `high` of 0: half the sample rate.
        scale: "htk" (PyTorch's default) or "slaney" (librosa's).
        norm: "area" divides each band by half its width in Hz (librosa's default), "none" leaves triangles of height 1
            (PyTorch's).
        log: "natural", or "db" for 10 log10.
        floor: the least power of which the logarithm is taken.

    Example:
        prepare = chain([Raw("int16", ("batch", 16000)), Scale(32768.0), LogMel(bands=40, hop=160)])
    """

    sample_rate: float = 16000.0
    bands: int = 40
    low: float = 0.0
    high: float = 0.0
    scale: MelScale = "htk"
    norm: Literal["area", "none"] = "none"
    log: Literal["natural", "db"] = "natural"
    floor: float = 1e-6

    def check(self) -> None:
        super().check()
        self.need(positive(self.sample_rate), "sample_rate is above 0 Hz")
        most = min(self.points // 2 + 1, _MAX_BANDS)
        self.need(0 < self.bands <= most, f"bands is 1 to {most} of {self.points} points")
        self.need(0 <= self.low < self.top <= self.sample_rate / 2, "0 <= low < high <= half the sample rate")
        self.need(self.scale in ("htk", "slaney"), f"scale is htk or slaney, is {self.scale!r}")
        self.need(self.norm in ("area", "none"), f"norm is area or none, is {self.norm!r}")
        self.need(self.log in ("natural", "db"), f"log is natural or db, is {self.log!r}")
        self.need(positive(self.floor), "floor is above 0")
        empty = np.flatnonzero(self.filters().max(axis=1) == 0)
        self.need(
            not empty.size,
            f"band {empty[0] if empty.size else 0} has no bin of {self.points} points; take fewer bands, more points",
        )

    @property
    def top(self) -> float:
        """The last band's end in Hz."""
        return self.high or self.sample_rate / 2

    def filters(self) -> np.ndarray:
        """The bands' weights, float64 [bands, bins]."""
        bins = self.points // 2 + 1
        area = self.norm == "area"
        return mel_filters(self.bands, bins, self.sample_rate, self.low, self.top, self.scale, area)

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        spectrum = super().emit(op, x, floats)
        batch, _, frames = dims(spectrum)
        bands = op.MatMul(self.filters().astype(number_type(spectrum)), spectrum)
        logarithm = op.Log(op.Max(bands, float(self.floor)))
        if self.log == "db":
            logarithm = op.Mul(logarithm, 10 / float(np.log(10)))
        return with_shape(logarithm, [batch, self.bands, frames])


class Mfcc(LogMel, frozen=True):
    """Mel-frequency cepstral coefficients: sound [batch, samples] -> [batch, coefficients, frames].

    The orthonormal DCT-II over the bands of `LogMel`, whose arguments it has, too.

    Arguments:
        coefficients: how many, from the 0th on.

    Example:
        prepare = chain([Raw("int16", ("batch", 16000)), Scale(32768.0), Mfcc(coefficients=10, hop=320)])
    """

    coefficients: int = 13

    def check(self) -> None:
        super().check()
        self.need(0 < self.coefficients <= self.bands, f"coefficients is 1 to {self.bands} (bands)")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        bands = super().emit(op, x, floats)
        batch, _, frames = dims(bands)
        matrix = cosine_transform(self.coefficients, self.bands).astype(number_type(bands))
        return with_shape(op.MatMul(matrix, bands), [batch, self.coefficients, frames])


def _kernels(op: Builder, points: int, width: int, x: ir.Value) -> ir.Value:
    """Cosines and negative sines times the Hann window, [2 * bins, width], from tables of one period."""
    bins, n, dtype = points // 2 + 1, np.arange(width), number_type(x)
    period = 2 * np.pi * np.arange(points) / points
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * n / width)
    # cos(2 pi k m / points) is entry k m mod points.
    places = _unfolded(op.Mul(np.arange(bins)[:, None], n + (points - width) // 2))
    places = _unfolded(op.Mod(places, [points]))
    waves = [_unfolded(op.Gather(table.astype(dtype), places)) for table in (np.cos(period), -np.sin(period))]
    return _unfolded(op.Mul(_unfolded(op.Concat(*waves, axis=0)), hann.astype(dtype)))


def _unfolded(value: ir.Value) -> ir.Value:
    # Passes fold no node with this mark: the kernels would be the largest part of many a model's file.
    node = value.producer()
    if node is not None:
        node.metadata_props[UNPACK] = ""
    return value
