from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel.datasets import ecg_beats
from archipel.datasets.published.ecg import FILE, TEST, TRAIN
from archipel.errors import DatasetError

SAMPLES = 2000
RECORDS = (*TRAIN, *TEST, 202, 217)


def columns(**changes: np.ndarray) -> dict[str, np.ndarray]:
    """Recordings that rise by one step a sample, and have beats at 300 (cut off), 500, 700, 900 and 1900 (cut off)."""
    delta = np.ones((len(RECORDS), SAMPLES), np.int16)
    delta[:, 0] = np.arange(len(RECORDS))
    beats = [(row, sample, symbol) for row in range(len(RECORDS))
             for sample, symbol in zip((300, 500, 600, 700, 900, 1900), "NLQSFV")]  # fmt: skip
    rows, samples, symbols = zip(*beats)
    return {
        "delta": delta,
        "record": np.array(RECORDS, np.int16),
        "ann_record": np.array(rows, np.uint8),
        "ann_sample": np.array(samples, np.int32),
        "ann_symbol": np.array(symbols),
    } | changes


def write(folder: Path, **changes: np.ndarray) -> Path:
    np.savez(folder / FILE, **columns(**changes))
    return folder


def test_whole_beats_of_known_classes_in_millivolts(tmp_path: Path) -> None:
    beats = ecg_beats(write(tmp_path), seed=3)
    assert set(beats.recordings[0]) | set(beats.recordings[1]) == set(TRAIN)
    assert len(beats.recordings[1]) == 4
    assert beats.recordings[2] == TEST
    for part, recordings in zip((beats.train, beats.validation, beats.test), beats.recordings):
        # Q has no class here, and the windows of the first and the last beat are cut off.
        assert part.labels.tolist() == [0, 1, 2] * len(recordings)
        rows = [row for row, record in enumerate(RECORDS) if record in recordings]
        firsts = [row + sample - 360 for row in rows for sample in (500, 700, 900)]
        expected = [(np.arange(first, first + 720) - 1024) / 200 for first in firsts]
        np.testing.assert_allclose(part.inputs, expected, atol=1e-6)


def test_the_seed_draws_what_is_held_out(tmp_path: Path) -> None:
    write(tmp_path)
    assert ecg_beats(tmp_path, seed=1).recordings[1] != ecg_beats(tmp_path, seed=2).recordings[1]
    assert ecg_beats(tmp_path, seed=1).recordings == ecg_beats(tmp_path, seed=1).recordings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"record": np.array(RECORDS[:-1], np.int16)}, r"44 numbers for 45 recordings"),
        ({"ann_sample": np.zeros(3, np.int32)}, r"record, sample and symbol of the beats are \[3, 270\], not as many"),
        ({"ann_record": np.full(270, 45, np.uint8)}, r"a beat is outside its 45 recordings of 2000 samples"),
        ({"ann_sample": np.full(270, -1, np.int32)}, r"a beat is outside its 45 recordings"),
        ({"ann_symbol": np.full(270, "+")}, r"no beat of the recordings \[101, "),
        ({"delta": np.ones((45, SAMPLES), np.int32)}, r"expected array 'delta' as int16 \[n, n\]"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, changes: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(DatasetError, match=rf"{FILE}: {words}.*; put the published"):
        ecg_beats(write(tmp_path, **changes))


def test_how_many_are_held_out(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"expected 1\.\.21 recordings for validation"):
        ecg_beats(tmp_path, validation=22)
