"""What mixes updates before a rule, so that honest ones differ less: nearest-neighbour mixing, and bucketing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from archipel.strategies.robust.rule import Mixer, Rows, squared_distances


def mix_nearest(updates: Rows, tolerated: int, order: NDArray[np.int64]) -> Rows:
    """Each update becomes the mean of the n - f nearest ones, itself among them.

    Source: Allouah et al. 2023, *Fixing by mixing*, NNM. With it the rules tolerate f updates at devices whose data
    differ as well as any rule can.
    """
    kept = len(updates) - tolerated
    nearest = np.argsort(squared_distances(updates), axis=1, kind="stable")[:, :kept]
    chosen = np.zeros((len(updates), len(updates)))
    np.put_along_axis(chosen, nearest, 1.0 / kept, axis=1)
    return chosen @ updates


def mix_buckets(updates: Rows, tolerated: int, order: NDArray[np.int64]) -> Rows:
    """The means of buckets of updates, in the order given: `[ceil(n / s), d]` with s = floor((n - 1) / 2f), at least 1.

    Source: Karimireddy et al. 2022, *Byzantine-robust learning on heterogeneous datasets via bucketing*. At most f
    buckets have an arbitrary update, and there are more than 2f buckets.
    """
    count = len(updates)
    # Buckets must outnumber those that may be arbitrary twice over, as every rule needs.
    size = max(1, (count - 1) // (2 * tolerated)) if tolerated else count
    return np.stack([updates[order[first : first + size]].mean(axis=0) for first in range(0, count, size)])


NEAREST = Mixer("nnm", mix_nearest)
BUCKETS = Mixer("bucketing", mix_buckets)
