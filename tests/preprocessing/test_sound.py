"""Transforms of sound against a second implementation in float64, and against librosa and torchaudio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.signal
import torch

from archipel.preprocessing import Average, Frames, LogMel, Mfcc, Preemphasis, Raw, Scale, Spectrogram, chain
from tests.preprocessing.cases import FREE_SOUND, SOUND, run

VECTORS = Path(__file__).parent / "vectors" / "sound.npz"
"""What librosa and torchaudio compute; make_vectors.py wrote it."""


def spectrum(points: int, window: int, hop: int) -> np.ndarray:
    """Powers by NumPy's FFT over frames cut one by one, float64 [batch, bins, frames]."""
    sound = SOUND.astype(np.float64) / 32768
    before = (points - window) // 2
    shape = np.zeros(points)
    shape[before : before + window] = np.sin(np.pi * np.arange(window) / window) ** 2  # the periodic Hann window
    frames = [np.fft.rfft(sound[:, i : i + points] * shape) for i in range(0, sound.shape[1] - points + 1, hop)]
    return np.stack([np.abs(frame) ** 2 for frame in frames], axis=-1)


def bands_of(power: np.ndarray, count: int, high: float) -> np.ndarray:
    """HTK mel bands, by linear interpolation of each triangle."""
    mel = 2595 * np.log10(1 + np.array([0, high]) / 700)
    edges = 700 * (10 ** (np.linspace(*mel, count + 2) / 2595) - 1)
    bins = np.arange(power.shape[1]) * 8000 / (power.shape[1] - 1)
    weights = [np.interp(bins, edges[i : i + 3], [0, 1, 0], left=0, right=0) for i in range(count)]
    return np.einsum("kb,nbf->nkf", np.array(weights), power)


@pytest.mark.parametrize(("points", "window", "hop"), [(256, 200, 80), (256, 256, 128), (254, 201, 77)])
def test_a_second_implementation(points: int, window: int, hop: int) -> None:
    power = spectrum(points, window, hop)
    how: dict[str, Any] = {"points": points, "window": window, "hop": hop}
    answer = run(chain([FREE_SOUND, Scale(32768), Spectrogram(**how)]), SOUND)
    np.testing.assert_allclose(answer, power, atol=1e-6 * power.max())
    logarithm = np.log(np.maximum(bands_of(power, 20, 7000), 1e-6))
    answer = run(chain([FREE_SOUND, Scale(32768), LogMel(**how, bands=20, high=7000)]), SOUND)
    np.testing.assert_allclose(answer, logarithm, atol=1e-5)
    answer = run(chain([FREE_SOUND, Scale(32768), Mfcc(**how, bands=20, high=7000)]), SOUND)
    np.testing.assert_allclose(answer, scipy.fft.dct(logarithm, axis=1, norm="ortho")[:, :13], atol=5e-5)


def test_pytorch_s_stft() -> None:
    sound = torch.tensor(SOUND.astype(np.float64) / 32768)
    for center in (False, True):
        wanted = torch.stft(
            sound, 256, 80, 200, torch.hann_window(200, dtype=torch.float64), center, return_complex=True
        )
        parts = [FREE_SOUND, Scale(32768), Spectrogram(256, 200, 80, power=1, center=center)]
        np.testing.assert_allclose(run(chain(parts), SOUND), wanted.abs().numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("torchaudio/log_mel", LogMel(400, 0, 160, center=True, bands=24, log="db", floor=1e-10)),
        ("torchaudio/mfcc", Mfcc(400, 0, 160, center=True, bands=24, coefficients=12, floor=1e-6)),
        ("librosa/log_mel", LogMel(512, 400, 160, center=True, fill="zeros", bands=24, low=50, high=7000, log="db",
                                   scale="slaney", norm="area", floor=1e-10)),
        ("librosa/mfcc", Mfcc(512, 400, 160, center=True, fill="zeros", bands=24, coefficients=12, low=50,
                              high=7000, log="db", scale="slaney", norm="area", floor=1e-10)),
    ],
)  # fmt: skip
def test_other_libraries(name: str, part: LogMel) -> None:
    with np.load(VECTORS) as vectors:
        sound, wanted = vectors["sound"], vectors[name]
    answer = run(chain([Raw("int16", ("batch", "samples")), Scale(32768), part]), sound)
    np.testing.assert_allclose(answer, wanted, atol=1e-5 * np.abs(wanted).max() + 1e-4)


def test_kernels_are_not_stored() -> None:
    """129 x 2 x 200 numbers: not in the graph, nor where sizes are fixed later and what follows is computed."""
    program = chain([FREE_SOUND, Scale(32768), Spectrogram(256, 200, 80)])
    for each in (program, program.fix(sizes={"samples": 4000})):
        assert len(each.to_bytes()) < 20_000
    np.testing.assert_array_equal(run(each, SOUND), run(program, SOUND))


def test_preemphasis_is_a_filter() -> None:
    wanted = scipy.signal.lfilter([1, -0.9], [1], SOUND.astype(np.float64), axis=1)
    np.testing.assert_allclose(run(chain([FREE_SOUND, Preemphasis(0.9)]), SOUND), wanted, rtol=1e-5, atol=1e-2)


def test_channels_are_mixed() -> None:
    stereo = np.stack([SOUND, -SOUND // 2], axis=2)
    answer = run(chain([Raw("int16", ("batch", "samples", 2)), Average()]), stereo)
    np.testing.assert_allclose(answer, stereo.mean(axis=2), rtol=1e-6)


def test_frames() -> None:
    windows = np.random.default_rng(0).normal(size=(2, 50, 3)).astype(np.float32)
    wanted = np.lib.stride_tricks.sliding_window_view(windows, 20, axis=1)[:, ::7].transpose(0, 1, 3, 2)
    for raw in (Raw("float32", ("batch", "samples", 3)), Raw("float32", ("batch", 50, 3))):
        np.testing.assert_array_equal(run(chain([raw, Frames(20, 7)]), windows), wanted)
