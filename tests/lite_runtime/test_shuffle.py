"""The permutation is a contract with other runtimes, so it is checked against a second implementation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.lite_runtime.shuffle import batches
from archipel.permutations import permutation

U32 = 2**32


VECTOR = [1, 7, 9, 4, 3, 0, 6, 2, 8, 5]


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % U32
    x ^= x >> 15
    x = x * 0x846CA68B % U32
    return x ^ (x >> 16)


def reference(count: int, seed: int, phase: int, epoch: int) -> list[int]:
    def fold(words: list[int]) -> int:
        h = 0
        for word in words:
            h = mix(((h ^ word) + 0x9E3779B9) % U32)
        return h

    a, b = fold([seed, phase, epoch, 0]), fold([seed, phase, epoch, 1])
    return sorted(range(count), key=lambda i: mix(mix((i + a) % U32) ^ b))


@pytest.mark.sampled(every=3)
@settings(max_examples=50)
@given(count=st.integers(0, 300), seed=st.integers(0, U32 - 1), phase=st.integers(0, 9), epoch=st.integers(0, 1000))
def test_permutation_is_the_documented_one(count: int, seed: int, phase: int, epoch: int) -> None:
    assert permutation(count, seed, phase, epoch).tolist() == reference(count, seed, phase, epoch)


def test_vector() -> None:
    # Kept so that a change of the order, which every device must see alike, cannot pass unnoticed.
    assert permutation(10, 1, 0, 0).tolist() == reference(10, 1, 0, 0) == VECTOR


def test_positions_are_uniform() -> None:
    draws = np.stack([permutation(8, seed, 0, 0) for seed in range(4000)])
    for position in range(8):
        counts = np.bincount(draws[:, position], minlength=8)
        # Chi-square with 7 degrees of freedom: 29.9 is exceeded with probability 1e-4.
        assert ((counts - 500) ** 2 / 500).sum() < 29.9


def cut(count: int, size: int, **more: object) -> list[tuple[int, list[int], bool]]:
    options: dict[str, object] = {"epochs": None, "steps": None, "shuffle": False, "seed": 0, "phase": 0}
    options.update({"whole": False, **more})
    return [(b.epoch, b.indices.tolist(), b.last_of_epoch) for b in batches(count, size, **options)]  # type: ignore[arg-type]


def test_epochs_keep_the_rest() -> None:
    assert cut(5, 2, epochs=2) == [
        (0, [0, 1], False), (0, [2, 3], False), (0, [4], True),
        (1, [0, 1], False), (1, [2, 3], False), (1, [4], True),
    ]  # fmt: skip


def test_whole_batches_leave_the_rest_out() -> None:
    assert cut(5, 2, epochs=1, whole=True) == [(0, [0, 1], False), (0, [2, 3], True)]


def test_steps_run_over_as_many_epochs_as_they_need() -> None:
    assert [indices for _, indices, _ in cut(3, 2, steps=5)] == [[0, 1], [2], [0, 1], [2], [0, 1]]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_every_epoch_has_every_example_once_in_its_own_order(epoch: int) -> None:
    parts = [i for e, i, _ in cut(20, 6, epochs=3, shuffle=True, seed=5) if e == epoch]
    order = [index for part in parts for index in part]
    assert sorted(order) == list(range(20))
    assert order == reference(20, 5, 0, epoch)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 8}])
@pytest.mark.parametrize(("count", "size"), [(7, 3), (6, 3), (2, 2)])
def test_what_is_skipped_changes_nothing_of_the_rest(count: int, size: int, length: dict, whole: bool) -> None:
    """As a fit that goes on from a checkpoint: the batches after the first ones, in whichever pass that is."""
    everything = cut(count, size, shuffle=True, seed=3, whole=whole, **length)
    for skip in range(len(everything) + 1):
        assert cut(count, size, shuffle=True, seed=3, whole=whole, skip=skip, **length) == everything[skip:]
