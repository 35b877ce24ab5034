"""Human activity from a phone at the waist: windows of the raw signals of 30 people, divided by person.

Reyes-Ortiz, Oneto, Sama, Parra, Anguita 2015, "Transition-Aware Human Activity Recognition Using Smartphones"; the
windows are as in the UCI HAR data set of the same group (Anguita et al. 2013): 2.56 s at 50 Hz, half overlapping, one
activity each.
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

FILE = "hapt_raw.npz"
CLASSES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
LENGTH = 128
STEP = 64

MAX_RECORDINGS = 255
COLUMNS = {
    "signal": Column("int16", (None, 6), 5_000_000),
    "scale": Column("float64", (6,)),
    "activity": Column("uint8", (None,), 5_000_000),
    "offset": Column("int64", (None,), MAX_RECORDINGS + 1),
    "user": Column("uint8", (None,), MAX_RECORDINGS),
    "train_users": Column("uint8", (None,), MAX_RECORDINGS),
    "test_users": Column("uint8", (None,), MAX_RECORDINGS),
}
REMEDY = f"put the published {FILE} there again"


@dataclass(frozen=True, eq=False)
class HarWindows(LabelledSplits):
    """Windows float32 [n, 6, 128]: acceleration x y z, angular velocity x y z.

    mean, deviation  float64 [6]: of every channel of the training windows, in g and rad/s; what was subtracted and
                     divided by
    people           the persons of train, validation and test; no person is in two of them
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    people: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def har_windows(folder: str | os.PathLike[str], *, seed: int = 0, validation: int = 4) -> HarWindows:
    """Windows of 128 samples, float32 [n, 6, 128], normalised by the training windows, and six activities.

    `folder` has hapt_raw.npz. The test part are the 9 people of the published split; `validation` of its 21 people for
    training, drawn by `seed`, are held out. Raises DatasetError if the file is missing or damaged.
    """
    path = Path(folder) / FILE
    columns = read_npz(path, COLUMNS, REMEDY)
    _check(columns, path)
    published = sorted(set(columns["train_users"].tolist()))
    if not 1 <= validation < len(published):
        raise DatasetError(
            f"expected 1..{len(published) - 1} people for validation, of the {len(published)} for training, "
            f"got {validation}"
        )
    order = seeded_order(published, f"HAR {seed}")
    people = (
        tuple(sorted(order[validation:])),
        tuple(sorted(order[:validation])),
        tuple(sorted(set(columns["test_users"].tolist()))),
    )
    windows, labels, users = _windows(columns)
    rows = [np.flatnonzero(np.isin(users, group)) for group in people]
    for group, own in zip(people, rows, strict=True):
        if not len(own):
            raise DatasetError(f"{path}: no window of one activity for the people {list(group)}; {REMEDY}")
    mean, deviation = windows[rows[0]].mean(axis=(0, 2)), windows[rows[0]].std(axis=(0, 2))
    if not np.all(np.isfinite(deviation)) or np.any(deviation == 0):
        raise DatasetError(f"{path}: a channel is constant over all training windows; {REMEDY}")
    normalised = np.ascontiguousarray((windows - mean[:, None]) / deviation[:, None], np.float32)
    train, held_out, test = (Labelled(normalised[own], labels[own]) for own in rows)
    return HarWindows(train, held_out, test, CLASSES, mean, deviation, people)


def _windows(columns: dict[str, np.ndarray]) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.uint8]]:
    """(float64 [n, 6, 128] in g and rad/s, labels int64 [n], persons uint8 [n]), recording after recording."""
    activity, offset = columns["activity"], columns["offset"]
    starts: list[int] = []
    users: list[int] = []
    for begin, end, user in zip(offset[:-1], offset[1:], columns["user"], strict=True):
        for start in range(int(begin), int(end) - LENGTH + 1, STEP):
            own = activity[start : start + LENGTH]
            if 1 <= own[0] <= len(CLASSES) and np.all(own == own[0]):
                starts.append(start)
                users.append(int(user))
    rows = np.array(starts, np.intp)
    picked = columns["signal"][rows[:, None] + np.arange(LENGTH)]
    windows = (picked * columns["scale"]).transpose(0, 2, 1)
    return windows, activity[rows].astype(np.int64) - 1, np.array(users, np.uint8)


def _check(columns: dict[str, np.ndarray], path: Path) -> None:
    def expect(true: bool, what: str) -> None:
        if not true:
            raise DatasetError(f"{path}: expected {what}; {REMEDY}")

    samples, offset = len(columns["signal"]), columns["offset"]
    recordings = len(columns["user"])
    ascending = bool(len(offset)) and offset[0] == 0 and offset[-1] == samples and bool(np.all(np.diff(offset) >= 0))
    expect(len(columns["activity"]) == samples, f"one activity for each of its {samples} samples")
    expect(len(offset) == recordings + 1 and ascending, f"{recordings + 1} ascending offsets from 0 to {samples}")
    expect(bool(np.all(np.isfinite(columns["scale"]))), "finite scales")
    train, test = (set(columns[name].tolist()) for name in ("train_users", "test_users"))
    expect(bool(train) and bool(test) and not train & test, "people for training and other people for testing")
