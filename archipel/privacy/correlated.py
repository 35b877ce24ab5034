"""Correlated noise in whole numbers: what a round takes back of earlier rounds' noise, exactly.

The coefficients are whole numbers m_0, m_1, ... (m_0 stands for 1), so the matrix C m_0 of archipel.privacy.
factorization is one of whole numbers, and discrete Gaussian noise z can hide C m_0 x: released are the whole numbers

    o_t = m_0 x_t + m_1 x_t-1 + m_2 x_t-2 + ... + z_t

for sums x_t of whole numbers. That is what the account is about. From these, and from them alone, follow the sums that
the server uses: y_t = floor((o_t - m_1 y_t-1 - m_2 y_t-2 - ...) / m_0 + 1/2). With e_t = y_t - x_t that is the same as

    e_t = floor((z_t - m_1 e_t-1 - m_2 e_t-2 - ...) / m_0 + 1/2)

which needs no sum: the noise of a round follows from a fresh draw and the noise of the rounds before. So nothing is
rounded but what may be, and no floating point is near it.

Whose updates are in the sums may depend on everything that was released before: each o_t is a discrete Gaussian
mechanism of its own, given what came before, and the squares of what a device changes add up to at most the square of
the sensitivity, whichever rounds it comes to (Feldman and Zrnic 2021, "Individual privacy accounting via a Renyi
filter"; for continuous noise Denisov et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from archipel.errors import PolicyError
from archipel.privacy.events import Event, Gaussian
from archipel.privacy.factorization import best_coefficients, row_sensitivities, sensitivity, whole_coefficients
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy

UNIT = 64
"""What stands for 1 in coefficients that are made here: rounded so, the error at 200 rounds is 0.1 percent above."""
BANDS = 32
"""So many coefficients are made at most: twice as many make the error at 200 rounds less by 8 percent."""
_LARGEST = 1 << 62
_MOST_NOISE = 1e9

Noise = NDArray[np.int64]


def settle_coefficients(settings: DifferentialPrivacy, rounds: int) -> DifferentialPrivacy:
    """The settings with coefficients: their own, or the best for so many rounds.

    Raises MissingExtraError without SciPy.
    """
    if not settings.is_correlated or settings.coefficients or settings.separation is None:
        return settings
    found = best_coefficients(rounds, settings.separation, min(settings.separation, BANDS))
    return msgspec.structs.replace(settings, coefficients=whole_coefficients(found, UNIT))


def unit_of(settings: DifferentialPrivacy) -> int:
    """By how much more noise is drawn than a round gets, since it is divided by that; 1 without correlation."""
    return settings.coefficients[0] if settings.is_correlated else 1


def spread(settings: DifferentialPrivacy, rounds: int) -> float:
    """By how much more a device changes so many rounds together than one, at worst: the sensitivity of C."""
    return sensitivity(_real(settings.coefficients), rounds, _separation(settings))


def rounds_event(settings: DifferentialPrivacy, first: int, count: int) -> list[Event]:
    """What the task's sums number `first` to `first` + `count` - 1 cost, from 0 on.

    Together with those before them they cost what the worst device pays that comes at the sums 0, `separation`, and so
    on; one by which that device changes nothing is free.
    """
    if settings.noise_multiplier is None:
        raise PolicyError("noise_multiplier: is not settled yet")
    rows = _rows(settings.coefficients, first + count, _separation(settings))
    # An event of more noise than the account can hold counts as one of the most: that costs more.
    return [
        Gaussian(noise_multiplier=min(settings.noise_multiplier / row, _MOST_NOISE)) for row in rows[first:] if row > 0
    ]


def correlate(coefficients: Sequence[int], fresh: Noise, past: Iterable[Noise]) -> Noise:
    """The noise of a round, int64 `[elements]`.

    Arguments:
        coefficients: m_0, m_1, ...
        fresh: z_t, int64 `[elements]`, which is changed.
        past: e_t-1, e_t-2, ..., as this function returned them; further ones than there are coefficients are not read.

    Raises PolicyError for noise beyond 64 bits, or of another number of elements.
    """
    unit, reach = coefficients[0], _reach(fresh)
    for coefficient, before in zip(coefficients[1:], past):
        if before.shape != fresh.shape:
            raise PolicyError(f"noise: an earlier round's has {before.shape} elements, this one {fresh.shape}")
        reach += coefficient * _reach(before)
        if reach >= _LARGEST:
            raise PolicyError("noise_multiplier: noise of so many steps does not fit 64 bits; choose a smaller one")
        fresh -= coefficient * before
    return (fresh + unit // 2) // unit


def _reach(noise: Noise) -> int:
    return max(int(noise.max(initial=0)), -int(noise.min(initial=0)))


def _real(coefficients: Sequence[int]) -> tuple[float, ...]:
    return tuple(each / coefficients[0] for each in coefficients)


def _separation(settings: DifferentialPrivacy) -> int:
    if settings.separation is None or not settings.coefficients:
        raise PolicyError("separation, coefficients: are not settled yet")
    return settings.separation


@lru_cache(maxsize=256)
def _rows(coefficients: tuple[int, ...], rounds: int, separation: int) -> tuple[float, ...]:
    return tuple(row_sensitivities(_real(coefficients), rounds, separation).tolist())
