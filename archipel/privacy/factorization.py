"""Correlated noise: the factorization that decides how the noise of a round makes up for that of earlier ones.

A server that adds up the sums x_1, x_2, ... of its rounds releases A x, where A is lower triangular and all ones. With
A = B C it can release B (C x + z) = A (x + C^-1 z): the round t gets the noise (C^-1 z)_t, in which z_t is new and the
rest takes back a part of the noise of earlier rounds. Here C is a lower triangular Toeplitz matrix with few bands: the
column (c_0, c_1, ..., c_m-1), shifted (Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization: a unified
approach to private training"; McMahan et al. 2024, "A hassle-free algorithm for private learning in practice").

What a device can change of C x depends on how often it comes, and how far apart: that is the sensitivity. For
coefficients that are not negative and never grow, the worst device comes at the rounds 0, b, 2b and so on (Kalinin and
Lampert 2024, "Banded square root matrix factorization for differentially private model training", theorem 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from archipel.errors import MissingExtraError, PolicyError

Column = NDArray[np.float64]
_LEAST_RATIO = 1e-6


def first_inverse_column(coefficients: Sequence[float] | Column, rounds: int) -> Column:
    """The first column of C^-1, `[rounds]`; it is lower triangular and Toeplitz as well.

    `coefficients`: c_0, which is not 0, and those that follow; further ones are 0. Raises MissingExtraError without
    SciPy.
    """
    impulse = np.zeros(rounds)
    impulse[0] = 1
    return _divide(impulse, np.asarray(coefficients, np.float64))


def row_sensitivities(coefficients: Sequence[float] | Column, rounds: int, separation: int) -> Column:
    """By how much the worst device changes each row of C x, `[rounds]`; the L2 norm of all is the sensitivity of C.

    Arguments:
        coefficients: none negative, none larger than the one before.
        rounds: how many.
        separation: a device that was in a round is in none of the `separation` - 1 that follow; 1 or more.

    Raises PolicyError for coefficients of which that would not hold.
    """
    given = np.asarray(coefficients, np.float64)
    if len(given) == 0 or not (given[0] > 0 and (given >= 0).all() and (np.diff(given) <= 0).all()):
        raise PolicyError("coefficients: expected numbers of 0 or more, the first above 0, none above the one before")
    if rounds < 1 or separation < 1:
        raise PolicyError(f"rounds, separation: {rounds}, {separation} are below 1")
    return _add_columns(given, rounds, separation)


def sensitivity(coefficients: Sequence[float] | Column, rounds: int, separation: int) -> float:
    """The most by which a device changes C x, in the L2 norm, if it changes each x by at most 1. As above."""
    return float(np.linalg.norm(row_sensitivities(coefficients, rounds, separation)))


def prefix_error(coefficients: Sequence[float] | Column, rounds: int, separation: int) -> float:
    """The root mean square, over the rounds, of the error of a model that has added up all sums so far.

    It is that of one element, for a noise on C x of the size of its sensitivity: so what a multiplier of 1 for all
    rounds together gives. `coefficients=[1.0]` is independent noise. As above.
    """
    decoder = np.cumsum(first_inverse_column(coefficients, rounds))
    squares = np.cumsum(decoder**2)
    return sensitivity(coefficients, rounds, separation) * math.sqrt(float(squares.mean()))


def best_coefficients(rounds: int, separation: int, bands: int) -> Column:
    """The coefficients `[at most bands]`, the first of which is 1, with the least `prefix_error`.

    It takes time in proportion to the rounds. Raises PolicyError for numbers out of bounds, MissingExtraError without
    SciPy.
    """
    bands = min(bands, rounds)
    if bands < 1:
        raise PolicyError(f"bands, rounds: expected 1 or more, got {bands}")
    # The square root of A, which is nearly the best for devices that come once (Fichtenberger et al. 2022).
    start: Column = np.cumprod(np.array([1.0, *((2 * j - 1) / (2 * j) for j in range(1, bands))]))
    row_sensitivities(start, rounds, separation)
    if bands == 1:
        return start
    try:
        from scipy.optimize import minimize
    except ModuleNotFoundError:
        raise MissingExtraError("scipy", "privacy") from None

    def loss(ratios: Column) -> tuple[float, Column]:
        given = np.cumprod(np.concatenate([[1.0], ratios]))
        value, gradient = _loss(given, rounds, separation)
        # A ratio scales all coefficients from its own on.
        return value, np.cumsum((gradient * given)[::-1])[::-1][1:] / ratios

    # Over the ratios of neighbours, so that none grows on the way: of those that grow the inverse may have no bound.
    bounds = [(_LEAST_RATIO, 1.0)] * (bands - 1)
    found = minimize(loss, start[1:] / start[:-1], jac=True, method="L-BFGS-B", bounds=bounds).x
    return np.cumprod(np.concatenate([[1.0], found]))


def whole_coefficients(coefficients: Sequence[float] | Column, unit: int) -> tuple[int, ...]:
    """The coefficients as whole numbers of which the first is `unit`, without zeros at the end.

    As such they are exact data of a task: whoever has them computes the same sensitivity.
    """
    given = np.asarray(coefficients, np.float64)
    whole = np.minimum.accumulate(np.rint(given / given[0] * unit).astype(np.int64))
    return tuple(int(each) for each in whole if each > 0)


def _add_columns(coefficients: Column, rounds: int, separation: int) -> Column:
    """The sum of the columns 0, `separation`, 2 `separation` and so on of C, `[rounds]`."""
    total = np.zeros(rounds)
    for lag, coefficient in enumerate(coefficients[:rounds]):
        total[lag::separation] += coefficient
    return total


def _divide(series: Column, coefficients: Column) -> Column:
    """The power series over that of the coefficients, as far as the first reaches."""
    try:
        from scipy.signal import lfilter
    except ModuleNotFoundError:
        raise MissingExtraError("scipy", "privacy") from None
    return np.asarray(lfilter([1.0], coefficients, series))


def _loss(coefficients: Column, rounds: int, separation: int) -> tuple[float, Column]:
    """The logarithm of the square of `prefix_error` times `rounds`, and its gradient."""
    lags = range(len(coefficients))
    rows = _add_columns(coefficients, rounds, separation)
    inverse = first_inverse_column(coefficients, rounds)
    decoder = np.cumsum(inverse)
    # Column j of B has the first rounds - j elements of the decoder.
    weights = np.arange(rounds, 0, -1)
    size, error = float(rows @ rows), float(weights @ decoder**2)
    of_size = 2 * np.array([rows[lag::separation].sum() for lag in lags])
    # d inverse = -inverse * inverse * d coefficients, where * multiplies power series.
    of_inverse = np.cumsum((2 * weights * decoder)[::-1])[::-1]
    square = _divide(inverse, coefficients)
    of_error = -np.array([of_inverse[lag:] @ square[: rounds - lag] for lag in lags])
    return math.log(size) + math.log(error), of_size / size + of_error / error
