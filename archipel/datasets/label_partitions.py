"""Splits in which a device has few of the labels: shards of sorted labels, or a given number of labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.partitions import check_count
from archipel.errors import DatasetError

_TRIES = 1000

Labels = NDArray[Any]
Rows = NDArray[np.int64]


def split_shards(labels: Labels, devices: int, *, shards: int = 2, seed: int = 0) -> list[Rows]:
    """Sort the examples by label, cut them into shards of nearly the same size, and give each device some at random.

    With 2 shards most devices have two labels (McMahan et al. 2017, arXiv:1602.05629, section 3).

    Arguments:
        labels: `[examples]`, numbers or text; examples of one label keep their order.
        devices: the number of parts.
        shards: how many each device gets.
        seed: decides which.

    Returns an array of ascending indices, int64, for each device. Raises DatasetError for fewer examples than shards.

    Example:
        parts = split_shards(labels, 100)
        print(describe_parts(parts, labels))
    """
    check_labels("shards", labels)
    if shards < 1:
        raise DatasetError(f"shards: each device must have 1 or more, got {shards}")
    check_count(len(labels), devices)
    if len(labels) < devices * shards:
        raise DatasetError(
            f"{len(labels)} examples are too few for {devices} devices of {shards} shards; choose fewer of either"
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), devices * shards)
    drawn = np.random.default_rng(seed).permutation(devices * shards).reshape(devices, shards)
    return [np.sort(np.concatenate([pieces[number] for number in own])).astype(np.int64) for own in drawn]


def split_labels(labels: Labels, devices: int, *, each: int = 2, seed: int = 0) -> list[Rows]:
    """Give each device exactly `each` labels, and divide a label's examples evenly among the devices that have it.

    Device i has the label of number i modulo the number of labels, and others at random (Li et al. 2022, "Federated
    Learning on Non-IID Data Silos", arXiv:2102.02079, "#C = k"); the draws are those of Flower's baseline niid_bench,
    so that a seed gives the split that it gives there.

    Arguments:
        labels: `[examples]`, numbers or text.
        devices: the number of parts.
        each: labels a device, from 1 to the number of labels.
        seed: decides the labels, and which examples.

    Returns an array of ascending indices, int64, for each device. Raises DatasetError where some label would be on no
    device, or on more devices than it has examples.

    Example:
        parts = split_labels(labels, 10, each=2)
        assert all(len(np.unique(labels[part])) == 2 for part in parts)
    """
    check_labels("labels", labels)
    names, member = np.unique(labels, return_inverse=True)
    count = len(names)
    if not 1 <= each <= count:
        raise DatasetError(f"labels: each device must have from 1 to {count} labels, as many as there are, got {each}")
    check_count(len(labels), devices)
    if devices * each < count:
        raise DatasetError(
            f"labels: {devices} devices of {each} labels leave some of {count} labels on no device; choose more of "
            "either"
        )
    rng = np.random.default_rng(seed)
    for _ in range(_TRIES):
        held = [_draw_labels(number % count, count, each, rng) for number in range(devices)]
        times = np.bincount(np.concatenate(held), minlength=count)
        if times.all():
            break
    else:
        raise DatasetError(
            f"labels: in each of {_TRIES} draws some of {count} labels is on none of {devices} devices; choose more "
            "devices, or more labels for each"
        )
    parts: list[list[Rows]] = [[] for _ in range(devices)]
    for label in range(count):
        rows = np.flatnonzero(member == label)
        if len(rows) < times[label]:
            raise DatasetError(
                f"labels: {names[label]!s} has {len(rows)} examples and {times[label]} devices; choose fewer devices"
            )
        rng.shuffle(rows)
        holders = [number for number, own in enumerate(held) if label in own]
        for number, piece in zip(holders, np.array_split(rows, len(holders)), strict=True):
            parts[number].append(piece)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def check_labels(what: str, labels: Labels) -> None:
    """Raises DatasetError for labels that are not one value an example."""
    if labels.ndim != 1:
        raise DatasetError(f"{what}: expected one label for each example, got an array of shape {list(labels.shape)}")


def _draw_labels(first: int, count: int, each: int, rng: np.random.Generator) -> list[int]:
    drawn = [first]
    while len(drawn) < each:
        label = int(rng.choice(count, 1)[0])
        if label not in drawn:
            drawn.append(label)
    return drawn
