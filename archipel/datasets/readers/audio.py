"""Folders of sounds, read with soundfile.

Python's own `wave` reads whole numbers of 8 to 32 bits only. libsndfile also reads floating point, the extensible
header that most editors write for 24 bits, and FLAC, and its decoders are fuzzed continuously.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import INPUT, LABEL, Arrays, Field
from archipel.datasets.ragged import LENGTH, stack
from archipel.datasets.readers.class_folder import ClassFolder
from archipel.datasets.readers.extra import need
from archipel.errors import DatasetError
from archipel.library_errors import one_line

SUFFIXES = (".wav", ".flac")
_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC")
MAX_SAMPLES = 100_000_000


def open_audio(
    folder: str | os.PathLike[str],
    *,
    samples: int | None = None,
    rate: int | None = None,
    channels: int = 1,
    dtype: Literal["float32", "int16"] = "float32",
    max_samples: int = MAX_SAMPLES,
) -> AudioDataset:
    """The sounds in a folder (WAV, FLAC), decoded when they are needed.

    The field "input" is `[samples]`, or `[samples, channels]` for more than one channel. With a folder for each class,
    "label" is the number of the class among the sorted names.

    Arguments:
        folder: the folder.
        samples: how long each sound becomes: longer ones are cut, shorter ones end with zeros. By default a batch is as
            long as its longest sound, and the field "input_length" has the lengths.
        rate: samples per second that all sounds must have; by default that of the first.
        channels: 1 mixes all channels into their mean; any other number is what each file must have.
        dtype: "float32" in -1 ... 1, or "int16".
        max_samples: the longest sound that is read, over all its channels.

    Raises DatasetError for a folder without sounds, and when they are taken for a sound that is damaged, too long, or
    of another rate or number of channels: it names the file. MissingExtraError without soundfile.

    Example:
        data = open_audio("commands", samples=16_000, rate=16_000)
    """
    if (samples is not None and samples < 1) or channels < 1 or dtype not in ("float32", "int16"):
        raise DatasetError(f"samples and channels from 1, dtype float32 or int16; got {samples}, {channels}, {dtype}")
    return AudioDataset(ClassFolder(Path(folder), SUFFIXES), samples, rate, channels, dtype, max_samples)


class AudioDataset:
    """Sounds in a folder; `open_audio` makes one. `rate` is in samples per second."""

    def __init__(
        self, folder: ClassFolder, samples: int | None, rate: int | None, channels: int, dtype: str, max_samples: int
    ) -> None:
        need("soundfile")
        self.folder, self._samples, self._channels = folder, samples, channels
        self._dtype, self._max_samples, self.rate = np.dtype(dtype), max_samples, 0
        self.rate = rate or self._open(0)[0]
        shape = (samples,) if channels == 1 else (samples, channels)
        fields = {INPUT: Field(self._dtype, shape)}
        if samples is None:
            fields[INPUT + LENGTH] = Field(np.dtype(np.int64))
        if folder.classes:
            fields[LABEL] = Field(np.dtype(np.int64), (), folder.classes)
        self.fields: Mapping[str, Field] = fields

    def __len__(self) -> int:
        return len(self.folder.files)

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """The sounds of these numbers, and their labels."""
        sounds = [self._open(int(row))[1] for row in rows]
        if self._samples is not None:
            shape = (len(rows), self._samples, *self.fields[INPUT].shape[1:])
            made = np.zeros(tuple(size or 0 for size in shape), self._dtype)
            for place, sound in enumerate(sounds):
                made[place, : len(sound)] = sound
            taken: Arrays = {INPUT: made}
        else:
            taken = {INPUT: stack(sounds, len(self.fields[INPUT].shape), self._dtype)}
            taken[INPUT + LENGTH] = np.array([len(sound) for sound in sounds], np.int64)
        if self.folder.classes:
            taken[LABEL] = np.array([self.folder.labels[row] for row in rows], np.int64)
        return taken

    def locate(self, row: int) -> str:
        """The file of a sound."""
        return str(self.folder.path / self.folder.files[row])

    def _open(self, row: int) -> tuple[int, NDArray[np.float32] | NDArray[np.int16]]:
        """The rate and the sound, `[samples]` or `[samples, channels]`, cut to the number of samples."""
        soundfile = need("soundfile")
        path = self.locate(row)
        try:
            with soundfile.SoundFile(path) as file:
                if file.format not in _FORMATS:
                    raise DatasetError(f"{path}: a file of format {file.format}; convert it to WAV or FLAC")
                if self.rate and file.samplerate != self.rate:
                    raise DatasetError(
                        f"{path}: {file.samplerate} samples per second, expected {self.rate}; resample it"
                    )
                if self._channels > 1 and file.channels != self._channels:
                    raise DatasetError(f"{path}: {file.channels} channels, expected {self._channels}; mix or leave out")
                # Its header says how many there are; no more are read, so it must be right.
                if not 0 <= file.frames * file.channels <= self._max_samples:
                    raise DatasetError(
                        f"{path}: {file.frames} samples in {file.channels} channels, the limit is "
                        f"max_samples={self._max_samples}; cut it"
                    )
                frames = file.frames if self._samples is None else min(file.frames, self._samples)
                # A mean of whole numbers would be cut off, so mixing is done in floating point.
                mixes = self._channels == 1 and file.channels > 1
                sound = file.read(frames, "float32" if mixes else self._dtype.name, always_2d=True)
                if len(sound) != frames:
                    raise DatasetError(f"{path}: it announces {frames} samples and has {len(sound)}; mend it")
                rate = int(file.samplerate)
        except DatasetError:
            raise
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise DatasetError(f"{path}: {reason}; mend it or leave it out") from None
        if self._channels > 1:
            return rate, sound
        mixed = sound.mean(axis=1) if mixes else sound[:, 0]
        if mixes and self._dtype.kind == "i":
            mixed = np.clip(np.rint(mixed * 32768), -32768, 32767)
        return rate, mixed.astype(self._dtype)
