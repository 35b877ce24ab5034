"""Splits in which devices differ by how many examples they have, or by what these look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.partitions import check_count
from archipel.errors import DatasetError

Rows = NDArray[np.int64]


def split_power_law(count: int, devices: int, *, exponent: float = 1.0, seed: int = 0) -> list[Rows]:
    """Divide the examples 0 ... count - 1 at random into parts whose sizes fall as a power of their rank.

    Arguments:
        count: the number of examples.
        devices: the number of parts, each of at least one example.
        exponent: the k-th largest part has about k**-exponent times the size of the largest; 0: all the same.
        seed: decides which device has which rank, and which examples.

    Returns an array of ascending indices, int64, for each device. Raises DatasetError for fewer examples than devices.

    Example:
        parts = split_power_law(len(labels), 10, exponent=1.2)
        print(sorted(len(part) for part in parts))
    """
    check_count(count, devices)
    if not exponent >= 0 or not np.isfinite(exponent):
        raise DatasetError(f"power law: the exponent must be 0 or more, got {exponent}")
    rng = np.random.default_rng(seed)
    # Divided by the largest first: the sum then holds for any exponent.
    shares = np.exp(-exponent * np.log(1 + rng.permutation(devices).astype(np.float64)))
    return _divided(count, shares / shares.sum(), rng)


def split_sizes(count: int, devices: int, *, alpha: float, seed: int = 0) -> list[Rows]:
    """Divide the examples 0 ... count - 1 at random into parts of sizes drawn from a symmetric Dirichlet distribution.

    It is the quantity skew of Li et al. 2022, "Federated Learning on Non-IID Data Silos" (arXiv:2102.02079).

    Arguments:
        count: the number of examples.
        devices: the number of parts, each of at least one example.
        alpha: above 0; with 0.1 a few devices have nearly all, with 100 all have nearly the same.
        seed: decides the sizes and which examples.

    Returns an array of ascending indices, int64, for each device. Raises DatasetError for fewer examples than devices.

    Example:
        parts = split_sizes(len(labels), 10, alpha=0.5)
        print(sorted(len(part) for part in parts))
    """
    check_count(count, devices)
    if not alpha > 0 or not np.isfinite(alpha):
        raise DatasetError(f"sizes: alpha must be above 0, got {alpha}")
    rng = np.random.default_rng(seed)
    return _divided(count, rng.dirichlet(np.full(devices, alpha)), rng)


def split_sorted(values: NDArray[Any], devices: int, *, seed: int = 0) -> list[Rows]:
    """Sort the examples by a feature and give each device the next ones, so that devices differ by the feature.

    Arguments:
        values: the feature of each example `[examples]`, such as the brightness of a picture or an age.
        devices: the number of parts, of nearly the same size; device 0 has the smallest values.
        seed: decides among equal values.

    Returns an array of ascending indices, int64, for each device. Raises DatasetError for values that are not finite,
    and for fewer examples than devices.

    Example:
        brightness = images.mean(axis=1)
        parts = split_sorted(brightness, 10)
    """
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise DatasetError(f"sorted: expected one number for each example, got {values.dtype}{list(values.shape)}")
    if not np.isfinite(values).all():
        raise DatasetError(f"sorted: the value of example {int(np.argmin(np.isfinite(values)))} is not finite")
    check_count(len(values), devices)
    ties = np.random.default_rng(seed).permutation(len(values))
    return [np.sort(part).astype(np.int64) for part in np.array_split(np.lexsort((ties, values)), devices)]


def shift_by_noise(
    array: NDArray[Any], parts: Sequence[NDArray[np.integer[Any]]], *, variance: float, seed: int = 0
) -> NDArray[Any]:
    """Add Gaussian noise to each device's examples, at a level of its own.

    The noise of device i of n has the variance `variance * i / n` (i from 1 on), as in Li et al. 2022, "Federated
    Learning on Non-IID Data Silos" (arXiv:2102.02079), "noise-based feature imbalance".

    Arguments:
        array: a field of the examples, floating point `[examples, ...]`.
        parts: the rows of each device.
        variance: 0 or more, of the last device.
        seed: decides the noise.

    Returns a copy with the noise. Raises DatasetError for other dtypes and variances.

    Example:
        parts = split_iid(len(images), 10)
        noisy = shift_by_noise(images, parts, variance=0.1)
    """
    if array.dtype.kind != "f":
        raise DatasetError(f"noise: expected floating point, got {array.dtype}; convert the field first")
    if not variance >= 0 or not np.isfinite(variance):
        raise DatasetError(f"noise: the variance must be 0 or more, got {variance}")
    noisy = np.array(array)
    for number, rows in enumerate(parts):
        rng = np.random.default_rng([seed, number])
        deviation = np.sqrt(variance * (number + 1) / len(parts))
        noisy[rows] += (rng.standard_normal((len(rows), *array.shape[1:])) * deviation).astype(array.dtype)
    return noisy


def _divided(count: int, shares: NDArray[np.float64], rng: np.random.Generator) -> list[Rows]:
    """Parts of at least one example; the others are divided by the shares, to the largest remainders first."""
    free = count - len(shares)
    wanted = shares * free
    sizes = np.floor(wanted).astype(np.int64)
    left = free - int(sizes.sum())
    sizes[np.argsort(sizes - wanted, kind="stable")[:left]] += 1
    cuts = np.cumsum(sizes + 1)[:-1]
    return [np.sort(part).astype(np.int64) for part in np.split(rng.permutation(count), cuts)]
