"""Folders of sounds, against files that Python's `wave` wrote."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets import as_dataset, open_audio
from archipel.errors import DatasetError


def wav(samples: np.ndarray, rate: int = 8000) -> bytes:
    """int16 `[samples, channels]` as a file."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()


def sound(seed: int, samples: int, channels: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(-32768, 32768, (samples, channels), np.int16)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_sounds_and_labels(tmp_path: Path) -> None:
    one, two = sound(1, 50), sound(2, 30)
    write(tmp_path, {"no/a.wav": wav(one), "yes/b.wav": wav(two)})
    data = as_dataset(tmp_path)
    taken = data.take(np.array([1, 0]))
    assert taken["label"].tolist() == [1, 0]
    assert taken["input_length"].tolist() == [30, 50]
    assert np.array_equal(taken["input"][1], (one[:, 0] / 32768).astype(np.float32))
    assert np.array_equal(taken["input"][0, :30], (two[:, 0] / 32768).astype(np.float32))
    assert not taken["input"][0, 30:].any()
    whole = open_audio(tmp_path, samples=40, dtype="int16").take(np.arange(2))["input"]
    assert np.array_equal(whole[0], one[:40, 0])
    assert whole[1].tolist() == [*two[:, 0].tolist(), *[0] * 10]
    assert open_audio(tmp_path).rate == 8000


def test_channels(tmp_path: Path) -> None:
    stereo = sound(3, 20, 2)
    write(tmp_path, {"a.wav": wav(stereo)})
    mixed = open_audio(tmp_path, samples=20).take(np.array([0]))["input"][0]
    np.testing.assert_allclose(mixed, stereo.astype(np.float64).mean(axis=1) / 32768, atol=1e-7)
    data = open_audio(tmp_path, channels=2, dtype="int16")
    assert str(data.fields["input"]) == "int16[n, 2]"
    assert np.array_equal(data.take(np.array([0]))["input"][0], stereo)
    with pytest.raises(DatasetError, match=r"a\.wav: 2 channels, expected 3"):
        open_audio(tmp_path, channels=3)


def test_sounds_that_are_refused(tmp_path: Path) -> None:
    sound_wav = wav(sound(1, 50))
    huge = sound_wav[:40] + struct.pack("<I", 2**31 - 2) + sound_wav[44:]
    for content, message in (
        (wav(sound(1, 50), 16000), "16000 samples per second, expected 8000; resample it"),
        (b"", r"b\.wav"),
        (b"RIFF" + bytes(60), r"b\.wav"),
        (wav(sound(1, 2000)), "2000 samples in 1 channels, the limit is max_samples=1000"),
    ):
        write(tmp_path, {"a.wav": sound_wav, "b.wav": content})
        with pytest.raises(DatasetError, match=message) as caught:
            open_audio(tmp_path, max_samples=1000).take(np.array([1]))
        assert str(tmp_path / "b.wav") in str(caught.value)
    write(tmp_path, {"a.wav": sound_wav, "b.wav": huge})
    # libsndfile believes the file, not its header: there is no more to read than it has.
    assert open_audio(tmp_path).take(np.array([1]))["input"].shape == (1, 50)


@settings(max_examples=60)
@given(st.data())
def test_mutated_sounds_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(wav(sound(1, 40, 2)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 60))] ^= data.draw(st.integers(1, 255))
    folder = tmp_path_factory.getbasetemp() / "mutated sounds"
    folder.mkdir(exist_ok=True)
    (folder / "x.wav").write_bytes(content)
    try:
        taken = open_audio(folder, max_samples=10_000).take(np.array([0]))
    except DatasetError:
        return
    assert taken["input"].size == taken["input_length"][0] <= 10_000
