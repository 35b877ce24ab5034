from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel.datasets import har_by_person, har_windows
from archipel.datasets.published.har import FILE
from archipel.errors import DatasetError

USERS = (1, 2, 3, 4, 3)
SAMPLES = 400


def columns(**changes: np.ndarray) -> dict[str, np.ndarray]:
    """Five recordings of 400 samples: 60 without activity, 200 of activity user + 1, 140 of a short transition."""
    rng = np.random.default_rng(0)
    activity = np.concatenate([np.repeat([0, user + 1, 8], [60, 200, 140]) for user in USERS])
    return {
        "signal": rng.integers(-1000, 1000, (SAMPLES * len(USERS), 6)).astype(np.int16),
        "scale": np.array([0.5, 1.0, 2.0, 0.1, 0.2, 0.3]),
        "activity": activity.astype(np.uint8),
        "offset": np.arange(len(USERS) + 1, dtype=np.int64) * SAMPLES,
        "user": np.array(USERS, np.uint8),
        "train_users": np.array([1, 2, 3], np.uint8),
        "test_users": np.array([4], np.uint8),
    } | changes


def write(folder: Path, **changes: np.ndarray) -> Path:
    np.savez(folder / FILE, **columns(**changes))
    return folder


def test_windows_have_one_activity_each_and_people_stay_together(tmp_path: Path) -> None:
    splits = har_windows(write(tmp_path), seed=1, validation=1)
    raw = columns()
    assert splits.people[2] == (4,)
    assert sorted(splits.people[0] + splits.people[1]) == [1, 2, 3]
    # Starts are multiples of 64 from each recording's own; 64 and 128 alone lie within 60..260.
    for part, people in zip((splits.train, splits.validation, splits.test), splits.people, strict=True):
        starts = [400 * i + s for i, user in enumerate(USERS) if user in people for s in (64, 128)]
        assert part.labels.tolist() == [raw["activity"][start] - 1 for start in starts]
        windows = part.inputs * splits.deviation[:, None] + splits.mean[:, None]
        expected = np.stack([(raw["signal"][s : s + 128] * raw["scale"]).T for s in starts])
        np.testing.assert_allclose(windows, expected, rtol=1e-4, atol=1e-2)
    train = splits.train.inputs.astype(np.float64)
    np.testing.assert_allclose(train.mean(axis=(0, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(train.std(axis=(0, 2)), 1, atol=1e-6)


def test_the_seed_draws_who_is_held_out(tmp_path: Path) -> None:
    write(tmp_path)
    drawn = {har_windows(tmp_path, seed=seed, validation=1).people[1] for seed in range(12)}
    assert drawn == {(1,), (2,), (3,)}
    assert len({har_windows(tmp_path, seed=seed, validation=1).people[2] for seed in range(12)}) == 1


def test_a_person_has_windows_of_own_recordings_in_their_order(tmp_path: Path) -> None:
    raw, own = columns(), har_by_person(write(tmp_path), [3])
    starts = [400 * 2 + 64, 400 * 2 + 128, 400 * 4 + 64, 400 * 4 + 128]
    expected = np.stack([(raw["signal"][s : s + 128] * raw["scale"]).T for s in starts])
    np.testing.assert_array_equal(own.inputs, expected.astype(np.float32))
    assert own.labels.tolist() == [3] * 4
    assert own.people.tolist() == [3] * 4
    assert own.recordings.tolist() == [2, 2, 4, 4]
    assert own.bouts.tolist() == [0, 0, 1, 1]
    assert (own.train_people, own.test_people) == ((1, 2, 3), (4,))
    assert len(har_by_person(tmp_path)) == 10
    with pytest.raises(DatasetError, match=r"no window of one activity for the people \[7\]"):
        har_by_person(tmp_path, [3, 7])


def test_a_pause_begins_a_new_bout(tmp_path: Path) -> None:
    activity = columns()["activity"].copy()
    activity[:400] = np.repeat([1, 0, 1], [150, 1, 249])  # windows begin at 0, 192 and 256
    own = har_by_person(write(tmp_path, activity=activity), [1])
    assert own.labels.tolist() == [0, 0, 0]
    assert own.bouts.tolist() == [0, 1, 1]


SOUND = columns()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activity": SOUND["activity"][:-1]}, "one activity for each of its 2000 samples"),
        ({"offset": SOUND["offset"][:-1]}, "6 ascending offsets from 0 to 2000"),
        ({"offset": SOUND["offset"] * 2}, "ascending offsets"),
        ({"offset": np.zeros(0, np.int64), "user": np.zeros(0, np.uint8)}, "ascending offsets"),
        ({"scale": SOUND["scale"] * np.nan}, "finite scales"),
        ({"test_users": np.array([3, 4], np.uint8)}, "people for training and other people for testing"),
        ({"test_users": np.zeros(0, np.uint8)}, "people for training and other people for testing"),
        ({"test_users": np.array([9], np.uint8)}, r"no window of one activity for the people \[9\]"),
        ({"activity": SOUND["activity"] * np.uint8(0)}, "no window of one activity"),
        ({"signal": SOUND["signal"] * np.int16(0)}, "a channel is constant"),
        ({"signal": SOUND["signal"].astype(np.float64)}, r"array 'signal' as int16 \[n, 6\]"),
    ],
)
def test_a_damaged_file_is_named_with_its_reason_and_remedy(
    tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        har_windows(write(tmp_path, **changes), validation=1)
    assert FILE in str(caught.value)
    assert "put the published" in str(caught.value)


@pytest.mark.parametrize("validation", [0, 3, -1])
def test_a_part_without_people_is_an_error(tmp_path: Path, validation: int) -> None:
    with pytest.raises(DatasetError, match=rf"expected 1\.\.2 people for validation, .* got {validation}"):
        har_windows(write(tmp_path), validation=validation)


def test_one_person_for_training_leaves_nobody_to_hold_out(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="people for validation"):
        har_windows(write(tmp_path, train_users=np.array([1], np.uint8)), validation=1)
