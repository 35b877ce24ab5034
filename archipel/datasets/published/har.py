"""Human activity recorded by a phone at the waist: windows of the raw signals of 30 people, split by person.

Reyes-Ortiz, Oneto, Sama, Parra, Anguita 2015, "Transition-Aware Human Activity Recognition Using Smartphones"; the
windows are as in the UCI HAR data set of the same group (Anguita et al. 2013): 2.56 s at 50 Hz, overlapping by half,
each of one activity.
"""

from __future__ import annotations

import os
from collections.abc import Collection
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

    mean, deviation  float64 [6]: of each channel of the training windows, in g and rad/s; the windows are normalised by
                     subtracting the mean and dividing by the deviation
    people           the persons of train, validation and test; no person is in two of them

    Example: see `archipel.datasets.har_windows`.
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    people: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class HarByPerson:
    """Windows in physical units, recording after recording, in the order of time. Row i of all arrays is one window.

    inputs      float32 [n, 6, 128]: acceleration x y z in g, angular velocity x y z in rad/s
    labels      int64 [n]: numbers of the activities, as in `har_windows`
    people      int64 [n]: number of the person
    recordings  int64 [n]: number of the recording in the file, from 0
    bouts       int64 [n]: number, from 0, of the stretch of one activity without a pause; windows of two bouts have no
                sample in common
    train_people, test_people  the published split by person

    Example: see `archipel.datasets.har_by_person`.
    """

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    people: NDArray[np.int64]
    recordings: NDArray[np.int64]
    bouts: NDArray[np.int64]
    train_people: tuple[int, ...]
    test_people: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> HarByPerson:
        """The windows at these rows: numbers in the order given, or a mask [n]."""
        return HarByPerson(
            self.inputs[rows],
            self.labels[rows],
            self.people[rows],
            self.recordings[rows],
            self.bouts[rows],
            self.train_people,
            self.test_people,
        )


def har_by_person(folder: str | os.PathLike[str], people: Collection[int] | None = None) -> HarByPerson:
    """The windows of `har_windows`, not normalised, of these people (None: of all 30).

    Raises DatasetError if the file in `folder` is missing or damaged, or one of the people has no window in it.

    Example:
        data = har_by_person("/data/hapt", people=[1, 2, 3])
    """
    path = Path(folder) / FILE
    columns = read_npz(path, COLUMNS, REMEDY)
    _check(columns, path)
    train, test = (tuple(sorted(set(columns[name].tolist()))) for name in ("train_users", "test_users"))
    wanted = (*train, *test) if people is None else people
    windows, labels, users, recordings, starts = _cut_windows(columns, wanted)
    absent = sorted(set(wanted) - set(users.tolist()))
    if absent:
        raise DatasetError(f"{path}: no window of one activity for the people {absent}; {REMEDY}")
    # Windows of one bout begin STEP samples apart. Any other distance, also into the next recording, begins a new bout.
    bouts = np.cumsum(np.diff(starts, prepend=starts[0] - STEP) != STEP)
    return HarByPerson(windows.astype(np.float32), labels, users, recordings, bouts, train, test)


def har_windows(folder: str | os.PathLike[str], *, seed: int = 0, validation: int = 4) -> HarWindows:
    """Windows of 128 samples, float32 [n, 6, 128], normalised by the training windows, of six activities.

    Arguments:
        folder: the folder with hapt_raw.npz.
        seed: determines which of the 21 training people of the published split are for validation.
        validation: the number of people for validation.

    Returns the three parts; the test part has the 9 test people of the published split.

    Raises DatasetError if the file is missing or damaged.

    Example:
        data = har_windows("/data/hapt")
        runtime.fit(data.train.inputs, data.train.labels)
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
    windows, labels, users, _, _ = _cut_windows(columns, [person for group in people for person in group])
    rows = [np.flatnonzero(np.isin(users, group)) for group in people]
    for group, own in zip(people, rows, strict=True):
        if not len(own):
            raise DatasetError(f"{path}: no window of one activity for the people {list(group)}; {REMEDY}")
    # Over the training windows only: statistics of the others would leak into what is measured.
    mean, deviation = windows[rows[0]].mean(axis=(0, 2)), windows[rows[0]].std(axis=(0, 2))
    if not np.all(np.isfinite(deviation)) or np.any(deviation == 0):
        raise DatasetError(f"{path}: a channel is constant over all training windows; {REMEDY}")
    normalised = np.ascontiguousarray((windows - mean[:, None]) / deviation[:, None], np.float32)
    train, held_out, test = (Labelled(normalised[own], labels[own]) for own in rows)
    return HarWindows(train, held_out, test, CLASSES, mean, deviation, people)


_Windows = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def _cut_windows(columns: dict[str, np.ndarray], people: Collection[int]) -> _Windows:
    """(windows float64 [n, 6, 128] in g and rad/s; int64 [n]: labels, persons, recordings, first rows in the file)."""
    activity, offset = columns["activity"], columns["offset"]
    chosen: list[tuple[int, int, int]] = []
    for recording, user in enumerate(columns["user"].tolist()):
        if user not in people:
            continue
        # Within a recording: no window spans two of them.
        for start in range(int(offset[recording]), int(offset[recording + 1]) - LENGTH + 1, STEP):
            own = activity[start : start + LENGTH]
            # 0 and numbers above 6 are unlabelled samples and transitions between activities.
            if 1 <= own[0] <= len(CLASSES) and np.all(own == own[0]):
                chosen.append((user, recording, start))
    users, recordings, rows = np.array(chosen, np.int64).reshape(-1, 3).T
    # A matrix of row numbers [n, 128] gathers all windows at once; labels in the file begin at 1.
    samples = columns["signal"][rows[:, None] + np.arange(LENGTH)]
    windows = (samples * columns["scale"]).transpose(0, 2, 1)
    return windows, activity[rows].astype(np.int64) - 1, users, recordings, rows


def _check(columns: dict[str, np.ndarray], path: Path) -> None:
    def expect(condition: bool, what: str) -> None:
        if not condition:
            raise DatasetError(f"{path}: expected {what}; {REMEDY}")

    samples, offset = len(columns["signal"]), columns["offset"]
    recordings = len(columns["user"])
    ascending = bool(len(offset)) and offset[0] == 0 and offset[-1] == samples and bool(np.all(np.diff(offset) >= 0))
    expect(len(columns["activity"]) == samples, f"one activity for each of its {samples} samples")
    expect(len(offset) == recordings + 1 and ascending, f"{recordings + 1} ascending offsets from 0 to {samples}")
    expect(bool(np.all(np.isfinite(columns["scale"]))), "finite scales")
    train, test = (set(columns[name].tolist()) for name in ("train_users", "test_users"))
    expect(bool(train) and bool(test) and not train & test, "people for training and other people for testing")
