"""Splits of any examples over devices: at random, with labels that differ by device, or by who or what they are of."""

from __future__ import annotations

import numpy as np

from archipel.errors import DatasetError

_TRIES = 1000


def split_iid(count: int, devices: int, *, seed: int = 0) -> list[np.ndarray]:
    """Divide the examples 0 ... count - 1 at random into parts of nearly the same size.

    Returns an array of ascending indices, int64, for each device. Raises DatasetError for fewer examples than devices.

    Example:
        parts = split_iid(len(labels), 10)
        first = images[parts[0]], labels[parts[0]]
    """
    check_count(count, devices)
    order = np.random.default_rng(seed).permutation(count)
    return [np.sort(part) for part in np.array_split(order, devices)]


def split_dirichlet(labels: np.ndarray, devices: int, *, alpha: float, seed: int = 0) -> list[np.ndarray]:
    """Give each device its own mixture of labels (Hsu, Qi and Brown 2019, arXiv:1909.06335).

    Of each label the devices get shares drawn from a symmetric Dirichlet distribution.

    Arguments:
        labels: whole numbers `[examples]`.
        devices: the number of parts, each of at least one example.
        alpha: above 0; with 0.1 a device has few of the labels, with 100 nearly the mixture of all examples.
        seed: decides the shares and which examples.

    Returns an array of ascending indices, int64, for each device. Raises DatasetError for labels that are no whole
    numbers, or if some device is left without an example in each of 1000 draws.

    Example:
        parts = split_dirichlet(labels, 10, alpha=0.3)
        print(describe_parts(parts, labels))
    """
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise DatasetError(
            f"dirichlet: expected a whole number for each example, got {labels.dtype}{list(labels.shape)}; "
            "np.unique(labels, return_inverse=True)[1] makes numbers of texts"
        )
    if not alpha > 0 or not np.isfinite(alpha):
        raise DatasetError(f"dirichlet: alpha must be above 0, got {alpha}")
    check_count(len(labels), devices)
    rng = np.random.default_rng(seed)
    of_label = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    for _ in range(_TRIES):
        parts: list[list[np.ndarray]] = [[] for _ in range(devices)]
        for indices in of_label:
            shares = rng.dirichlet(np.full(devices, alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(int)
            for part, piece in zip(parts, np.split(indices, cuts), strict=True):
                part.append(piece)
        joined = [np.sort(np.concatenate(part)) for part in parts]
        if all(len(part) for part in joined):
            return joined
    raise DatasetError(
        f"dirichlet: with alpha {alpha} some of {devices} devices get none of {len(labels)} examples; "
        "choose a larger alpha or fewer devices"
    )


def split_by(groups: np.ndarray, devices: int | None = None, *, seed: int = 0) -> list[np.ndarray]:
    """Keep the examples of a group (a person, a site, a machine) on one device.

    Arguments:
        groups: the group of each example `[examples]`, numbers or text.
        devices: the number of parts; a device may have several groups, and takes the next one when it has the fewest
            examples. None: each group is on a device of its own, in the groups' order.
        seed: decides which groups come first.

    Returns an array of ascending indices, int64, for each device. Raises DatasetError for fewer groups than devices.

    Example:
        writers = np.arange(len(labels)) // 20  # who made which example
        parts = split_by(writers, 10)
        each = split_by(writers)  # a device for each of them
    """
    if groups.ndim != 1:
        raise DatasetError(f"expected one group for each example, got an array of shape {list(groups.shape)}")
    names, member = np.unique(groups, return_inverse=True)
    if devices is None:
        return [np.flatnonzero(member == group) for group in range(len(names))]
    if len(names) < devices:
        raise DatasetError(f"{len(names)} groups are too few for {devices} devices; choose fewer devices")
    parts: list[list[np.ndarray]] = [[] for _ in range(devices)]
    sizes = np.zeros(devices, np.int64)
    for group in np.random.default_rng(seed).permutation(len(names)):
        least = int(sizes.argmin())
        indices = np.flatnonzero(member == group)
        parts[least].append(indices)
        sizes[least] += len(indices)
    return [np.sort(np.concatenate(part)) for part in parts]


def check_count(count: int, devices: int) -> None:
    """Raises DatasetError for fewer examples than devices."""
    if devices < 1 or count < devices:
        raise DatasetError(f"{count} examples are too few for {devices} devices; choose fewer devices")
