"""Heart beats of the MIT-BIH arrhythmia recordings, split by person, from one file with ten minutes of each recording.

Moody and Mark 2001, "The impact of the MIT-BIH Arrhythmia Database". The split is the one of de Chazal, O'Dwyer and
Reilly 2004 ("Automatic classification of heartbeats using ECG morphology and heartbeat interval features", table III)
but for recording 202, which is of the person of 201 and is left out here. The classes are those of Llamedo and Martínez
2011 ("Heartbeat classification using feature selection driven by database generalization criteria"): fusions of a
normal and a ventricular beat count as ventricular, and the few beats that nobody could classify are left out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.labelled import Labelled, LabelledSplits
from archipel.datasets.npz import Column, read_npz
from archipel.datasets.splits import seeded_order
from archipel.errors import DatasetError

FILE = "mitbih_lead1_10min.npz"
CLASSES = ("normal", "supraventricular ectopic", "ventricular ectopic")
RATE = 360
"""Samples a second."""
LENGTH = 720
"""Samples of a window: two seconds, the beat in the middle, so that the beats beside it are mostly in it."""
TRAIN = (101, 106, 108, 109, 112, 114, 115, 116, 118, 119, 122, 124, 201, 203, 205, 207, 208, 209, 215, 220, 223, 230)
TEST = (100, 103, 105, 111, 113, 117, 121, 123, 200, 210, 212, 213, 214, 219, 221, 222, 228, 231, 232, 233, 234)
"""Neither has 102, 104, 107 and 217, whose people have a pacemaker."""

SYMBOLS = ("NLRej", "AaJS", "VEF")
"""PhysioNet's codes of the beats of each class."""
ZERO, STEPS = 1024, 200
"""The converter's value for 0 mV, and its steps a millivolt."""
COLUMNS = {
    "delta": Column("int16", (None, None), 1_000_000),
    "record": Column("int16", (None,), 255),
    "ann_record": Column("uint8", (None,), 1_000_000),
    "ann_sample": Column("int32", (None,), 1_000_000),
    "ann_symbol": Column("<U1", (None,), 1_000_000),
}
REMEDY = f"put the published {FILE} there again"


@dataclass(frozen=True, eq=False)
class EcgBeats(LabelledSplits):
    """Windows float32 [n, 720] of one lead in millivolts, 360 samples a second, the beat in the middle.

    recordings  the numbers of the recordings of train, validation and test; no person is in two of them

    Example: see `archipel.datasets.ecg_beats`.
    """

    recordings: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def ecg_beats(folder: str | os.PathLike[str], *, seed: int = 0, validation: int = 4) -> EcgBeats:
    """Heart beats, float32 [n, 720] in mV, in three classes: normal, supraventricular and ventricular ectopic.

    The classes are very uneven, and differently so for each person.

    Arguments:
        folder: the folder with mitbih_lead1_10min.npz.
        seed: determines which of the 22 training recordings are for validation.
        validation: the number of recordings for validation.

    Returns the three parts; the test part has the 21 test recordings.

    Raises DatasetError if the file is missing or damaged.

    Example:
        beats = ecg_beats("/data/mitbih_ecg")
        print(beats.classes, len(beats.train), beats.recordings[2])
    """
    if not 1 <= validation < len(TRAIN):
        raise DatasetError(
            f"expected 1..{len(TRAIN) - 1} recordings for validation, of the {len(TRAIN)} for training, "
            f"got {validation}"
        )
    path = Path(folder) / FILE
    columns = read_npz(path, COLUMNS, REMEDY)
    _check(columns, path)
    order = seeded_order(TRAIN, f"ECG {seed}")
    recordings = (tuple(sorted(order[validation:])), tuple(sorted(order[:validation])), TEST)
    # The sum of the differences wraps as the file's writer did: int16, and the converter has 11 bits.
    samples = np.cumsum(columns["delta"], axis=1, dtype=np.int16)
    parts = [_cut(samples, columns, own, path) for own in recordings]
    return EcgBeats(parts[0], parts[1], parts[2], CLASSES, recordings)


def _cut(
    samples: NDArray[np.int16], columns: dict[str, np.ndarray], recordings: tuple[int, ...], path: Path
) -> Labelled:
    rows, middles = columns["ann_record"].astype(np.intp), columns["ann_sample"].astype(np.intp)
    labels = np.full(len(rows), -1, np.int64)
    for number, symbols in enumerate(SYMBOLS):
        labels[np.isin(columns["ann_symbol"], list(symbols))] = number
    first = middles - LENGTH // 2
    whole = (first >= 0) & (first + LENGTH <= samples.shape[1])
    chosen = np.flatnonzero((labels >= 0) & whole & np.isin(columns["record"][rows], recordings))
    if not len(chosen):
        raise DatasetError(f"{path}: no beat of the recordings {list(recordings)}; {REMEDY}")
    windows = samples[rows[chosen][:, None], first[chosen][:, None] + np.arange(LENGTH)]
    return Labelled((windows.astype(np.float32) - np.float32(ZERO)) / np.float32(STEPS), labels[chosen])


def _check(columns: dict[str, np.ndarray], path: Path) -> None:
    recordings, samples = columns["delta"].shape
    beats = {len(columns[name]) for name in ("ann_record", "ann_sample", "ann_symbol")}
    if len(columns["record"]) != recordings:
        raise DatasetError(f"{path}: {len(columns['record'])} numbers for {recordings} recordings; {REMEDY}")
    if len(beats) != 1:
        raise DatasetError(f"{path}: record, sample and symbol of the beats are {sorted(beats)}, not as many; {REMEDY}")
    row, sample = columns["ann_record"], columns["ann_sample"]
    if len(row) and (row.max() >= recordings or sample.min() < 0 or sample.max() >= samples):
        raise DatasetError(f"{path}: a beat is outside its {recordings} recordings of {samples} samples; {REMEDY}")
