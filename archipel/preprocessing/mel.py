"""Filterbanks over mel bands, and the cosine transform of MFCC, as matrices of float64."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

MelScale = Literal["htk", "slaney"]

# Slaney's scale: linear, 200/3 Hz a mel, below 1000 Hz (15 mel); above it 27 mel for a factor of 6.4.
_HERTZ_A_MEL, _BREAK, _STEP = 200 / 3, 1000.0, np.log(6.4) / 27


def to_mel(hertz: NDArray[np.float64], scale: MelScale) -> NDArray[np.float64]:
    """Frequencies on a mel scale: of HTK (O'Shaughnessy: 2595 log10(1 + f / 700)) or of Slaney's Auditory Toolbox."""
    if scale == "htk":
        return 2595 * np.log10(1 + hertz / 700)
    above = _BREAK / _HERTZ_A_MEL + np.log(np.maximum(hertz, _BREAK) / _BREAK) / _STEP
    return np.where(hertz < _BREAK, hertz / _HERTZ_A_MEL, above)


def to_hertz(mels: NDArray[np.float64], scale: MelScale) -> NDArray[np.float64]:
    """The inverse of `to_mel`."""
    if scale == "htk":
        return 700 * (10 ** (mels / 2595) - 1)
    line = _BREAK / _HERTZ_A_MEL
    return np.where(mels < line, mels * _HERTZ_A_MEL, _BREAK * np.exp(_STEP * (np.maximum(mels, line) - line)))


def mel_filters(
    bands: int, bins: int, sample_rate: float, low: float, high: float, scale: MelScale, area: bool
) -> NDArray[np.float64]:
    """Triangles [bands, bins] over the frequencies of `bins` = 1 + n_fft / 2 bins, evenly spaced in mel.

    Arguments:
        low, high: the first triangle's beginning and the last one's end, in Hz.
        area: divide each by half its width in Hz, so that all have the area 1 (Slaney); else all have the height 1.
    """
    frequencies = np.linspace(0, sample_rate / 2, bins)
    ends = to_mel(np.array([low, high], np.float64), scale)
    edges = to_hertz(np.linspace(ends[0], ends[1], bands + 2), scale)
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    filters = np.maximum(0, np.minimum(rising, falling))
    return filters * (2 / (edges[2:] - edges[:-2]))[:, None] if area else filters


def cosine_transform(coefficients: int, bands: int) -> NDArray[np.float64]:
    """The first rows [coefficients, bands] of the orthonormal DCT-II."""
    k, n = np.arange(coefficients)[:, None], np.arange(bands)[None]
    matrix = np.cos(np.pi / bands * (n + 0.5) * k) * np.sqrt(2 / bands)
    matrix[0] /= np.sqrt(2)
    return np.asarray(matrix)
