"""Splits with few labels a device, of different sizes and by features: every example once, and the skew asked for."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest

from archipel.datasets import (
    describe_parts,
    shift_by_noise,
    split_labels,
    split_power_law,
    split_shards,
    split_sizes,
    split_sorted,
)
from archipel.errors import DatasetError

LABELS = np.arange(2000) % 10


def complete(parts: list[np.ndarray], count: int) -> None:
    assert all((np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(count))


def test_a_device_has_so_many_shards_of_the_sorted_examples() -> None:
    parts = split_shards(LABELS, 10, shards=2, seed=3)
    complete(parts, len(LABELS))
    # Example i of label l is number 10 i + l, so it lies at 200 l + i among the sorted ones, in shards of 100.
    for part in parts:
        shards, sizes = np.unique((200 * (part % 10) + part // 10) // 100, return_counts=True)
        assert len(shards) == 2
        assert sizes.tolist() == [100, 100]
    assert not np.array_equal(parts[0], split_shards(LABELS, 10, shards=2, seed=4)[0])


@pytest.mark.parametrize(
    ("each", "seed", "expected"),
    [
        (2, 42, "8f0c885766a5f5eb3b339db5efaeb0b80689ad8d2470a6fb30b225a12d13cba5"),
        (3, 7, "de6de01d5c87acfb04b22b12e2d30b34fd97811d1350941532c38666092287e3"),
    ],
)
def test_labels_are_dealt_as_flowers_baseline_deals_them(each: int, seed: int, expected: str) -> None:
    # The digests are of `partition_data_label_quantity` in Flower's baselines/niid_bench, run on these labels.
    labels = np.random.default_rng(5).integers(0, 10, 3000)
    parts = split_labels(labels, 30, each=each, seed=seed)
    complete(parts, len(labels))
    assert {len(np.unique(labels[part])) for part in parts} == {each}
    assert hashlib.sha256(np.concatenate(parts).astype("<i8").tobytes()).hexdigest() == expected


def test_every_label_is_somewhere_with_fewer_devices_than_labels() -> None:
    names = np.array(["a", "b", "c", "d", "e"])[np.arange(100) % 5]
    complete(split_labels(names, 3, each=2, seed=0), 100)


def test_sizes_follow_a_power_of_the_rank() -> None:
    parts = split_power_law(10_000, 20, exponent=1.5, seed=1)
    complete(parts, 10_000)
    shares = np.arange(1, 21) ** -1.5
    expected = 1 + (10_000 - 20) * shares / shares.sum()
    np.testing.assert_allclose(sorted(map(len, parts), reverse=True), expected, atol=1)
    assert {len(part) for part in split_power_law(10_000, 20, exponent=0)} == {500}
    assert min(map(len, split_power_law(100, 90, exponent=40.0))) == 1


def test_sizes_vary_as_their_distribution_does() -> None:
    devices, alpha = 10, 2.0
    found = []
    for seed in range(40):
        parts = split_sizes(5000, devices, alpha=alpha, seed=seed)
        complete(parts, 5000)
        found.append([len(part) / 5000 for part in parts])
    # A share of a symmetric Dirichlet distribution over k has the variance (k - 1) / k^2 (k alpha + 1).
    assert np.var(found) == pytest.approx((devices - 1) / (devices**2 * (devices * alpha + 1)), rel=0.2)


def test_devices_have_neighbouring_values_of_a_feature() -> None:
    values = np.random.default_rng(0).integers(0, 40, 1000)
    parts = split_sorted(values, 7, seed=0)
    complete(parts, 1000)
    assert {len(part) for part in parts} == {142, 143}
    for lower, higher in itertools.pairwise(parts):
        assert values[lower].max() <= values[higher].min()


def test_noise_grows_from_device_to_device() -> None:
    array = np.zeros((4000, 5), np.float32)
    parts = split_power_law(4000, 4, exponent=0.0)
    noisy = shift_by_noise(array, parts, variance=2.0, seed=1)
    assert noisy.dtype == np.float32
    assert not array.any()
    found = [float(noisy[part].var()) for part in parts]
    np.testing.assert_allclose(found, [0.5, 1.0, 1.5, 2.0], rtol=0.08)


@pytest.mark.sampled(every=4)
def test_a_split_is_described_and_drawn(tmp_path: Path) -> None:
    labels = np.array(["cat", "cat", "dog", "dog", "dog", "dog"])
    summary = describe_parts([np.array([0, 1]), np.array([2, 3]), np.array([4, 5])], labels)
    assert summary.counts.tolist() == [[2, 0], [0, 2], [0, 2]]
    # All together have 1/3 and 2/3: two cats are 2/3 from it, two dogs 1/3.
    np.testing.assert_allclose(summary.distances, [2 / 3, 1 / 3, 1 / 3])
    assert summary.mean_distance == pytest.approx(4 / 9)
    lines = str(summary).splitlines()
    assert lines[0] == "3 devices, 6 examples, 2 labels"
    assert lines[2].split() == ["examples", "2", "2", "2.0", "2"]
    assert lines[4].split()[-4:] == ["0.333", "0.333", "0.444", "0.667"]
    summary.plot(tmp_path / "parts.svg")
    assert b"mean distance" in (tmp_path / "parts.svg").read_bytes()
    with pytest.raises(DatasetError, match="must end in"):
        summary.plot(tmp_path / "parts.txt")


def test_what_cannot_be_split_is_told() -> None:
    with pytest.raises(DatasetError, match="too few for 10 devices of 3 shards"):
        split_shards(np.zeros(20), 10, shards=3)
    with pytest.raises(DatasetError, match="leave some of 10 labels"):
        split_labels(LABELS, 3, each=2)
    with pytest.raises(DatasetError, match="from 1 to 10 labels"):
        split_labels(LABELS, 3, each=11)
    with pytest.raises(DatasetError, match="0 has 1 examples and 4 devices"):
        split_labels(np.array([0, 1, 1, 1, 1]), 4, each=2)
    with pytest.raises(DatasetError, match="exponent must be 0 or more"):
        split_power_law(10, 2, exponent=-1)
    with pytest.raises(DatasetError, match="alpha must be above 0"):
        split_sizes(10, 2, alpha=0)
    with pytest.raises(DatasetError, match="example 1 is not finite"):
        split_sorted(np.array([0.0, np.nan]), 2)
    with pytest.raises(DatasetError, match="floating point"):
        shift_by_noise(np.zeros(4, np.uint8), [np.arange(4)], variance=1.0)
    with pytest.raises(DatasetError, match="device 1 has a row"):
        describe_parts([np.array([0]), np.array([2])], np.array([0, 1]))
