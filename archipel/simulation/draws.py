"""What a simulation draws: who takes part, who drops out, and each device's seed.

Every draw is a hash of the run's seed and of what it is for. So a draw depends on no other one: a run that goes on
after a kill, and one with another number of workers, draw the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from archipel.permutations import permuted

_LABEL = b"archipel/simulation/1/"


def draw_cohort(population: int, size: int, seed: int, number: int, resting: Collection[int] = ()) -> NDArray[np.int64]:
    """The `size` clients of round `number`, ascending, each at most once, and none that rests.

    Takes time for the cohort and those that rest alone.
    """
    order = permuted(np.arange(min(size + len(resting), population)), population, seed, 0, number)
    if resting:
        order = order[~np.isin(order, np.fromiter(resting, np.int64, len(resting)))]
    return np.sort(order[:size])


def device_seed(seed: int, number: int, client: int) -> int:
    """The seed of a device's round, 0 to 2**32 - 1: the order of its examples, and what its graphs draw."""
    return int.from_bytes(_digest(b"device", seed, number, client)[:4], "big")


def drawn_uniform(purpose: str, seed: int, number: int, client: int) -> float:
    """A number from 0 to below 1 for this purpose, round and client."""
    return int.from_bytes(_digest(purpose.encode(), seed, number, client)[:7], "big") / (1 << 56)


def drawn_generator(purpose: str, seed: int, number: int) -> np.random.Generator:
    """A generator for this purpose and round. Its stream may differ between versions of NumPy."""
    return np.random.default_rng(int.from_bytes(_digest(purpose.encode(), seed, number, 0)[:16], "big"))


def _digest(purpose: bytes, seed: int, number: int, client: int) -> bytes:
    return hashlib.sha256(_LABEL + purpose + struct.pack(">QQQ", seed, number, client)).digest()
