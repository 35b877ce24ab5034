from __future__ import annotations

import numpy as np

from archipel.datasets import Scenes, as_dataset


def scenes(seed: int = 0, count: int = 6) -> Scenes:
    """Digits of brightness 0.5 in the middle of 4x4, clothes of 0.9 in its upper half."""
    digits, clothes = np.zeros((3, 1, 4, 4), np.float32), np.zeros((2, 1, 4, 4), np.float32)
    digits[:, :, 1:3, 1:3] = 0.5
    clothes[:, :, :2] = 0.9
    return Scenes(digits, clothes, count, size=16, seed=seed)


def test_a_pixel_has_the_class_of_what_was_drawn_on_it() -> None:
    batch = scenes(count=40).take(np.arange(40))
    inputs, labels = batch["input"][:, 0], batch["label"]
    assert (inputs.dtype, labels.dtype) == (np.float32, np.int64)
    # Noise is below both: five standard deviations are 0.5, and no pixel is that far from one of the objects.
    assert set(inputs[labels == 1].tolist()) == {0.5}
    assert set(inputs[labels == 2].tolist()) == {np.float32(0.9)}
    assert 0 <= inputs[labels == 0].min() <= inputs[labels == 0].max() < 0.5
    # At most four objects, of 4 and of 8 pixels.
    counts = (labels > 0).sum((1, 2))
    assert 0 < counts.min() <= counts.max() <= 4 * 8


def test_a_scene_follows_from_seed_and_number() -> None:
    first, again, other = scenes(), scenes(), scenes(seed=1)
    assert len(first) == 6
    np.testing.assert_array_equal(first.take(np.array([4]))["input"], again.take(np.array([1, 4]))["input"][1:])
    assert (first.take(np.arange(6))["label"] != other.take(np.arange(6))["label"]).any()
    assert as_dataset(first) is first
    assert [str(field) for field in first.fields.values()] == ["float32[1, 16, 16]", "int64[16, 16]"]
