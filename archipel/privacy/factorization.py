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


def first_inverse_column(coefficients: Sequence[float] | Column, rounds: int) -> Column:
    """The first column of C^-1, `[rounds]`; it is lower triangular and Toeplitz as well.

    `coefficients`: c_0, which is not 0, and those that follow; further ones are 0.
    """
    given = np.asarray(coefficients, np.float64)
    found = np.zeros(rounds)
    found[0] = 1 / given[0]
    for row in range(1, rounds):
        reach = min(row, len(given) - 1)
        found[row] = -(given[1 : reach + 1] @ found[row - 1 :: -1][:reach]) / given[0]
    return found


def row_sensitivities(
    coefficients: Sequence[float] | Column, rounds: int, separation: int, participations: int | None = None
) -> Column:
    """By how much the worst device changes each row of C x, `[rounds]`; the L2 norm of all is the sensitivity of C.

    Arguments:
        coefficients: none negative, none larger than the one before.
        rounds: how many.
        separation: a device that was in a round is in none of the `separation` - 1 that follow; 1 or more.
        participations: in at most so many rounds a device is. None: in as many as the separation allows.

    Raises PolicyError for coefficients of which that would not hold.
    """
    given = np.asarray(coefficients, np.float64)
    if len(given) == 0 or not (given[0] > 0 and (given >= 0).all() and (np.diff(given) <= 0).all()):
        raise PolicyError("coefficients: expected numbers of 0 or more, the first above 0, none above the one before")
    if rounds < 1 or separation < 1 or (participations is not None and participations < 1):
        raise PolicyError(f"rounds, separation, participations: {rounds}, {separation}, {participations} are below 1")
    return _add_columns(given, rounds, range(0, rounds, separation)[:participations])


def sensitivity(
    coefficients: Sequence[float] | Column, rounds: int, separation: int, participations: int | None = None
) -> float:
    """The most by which a device changes C x, in the L2 norm, if it changes each x by at most 1. As above."""
    return float(np.linalg.norm(row_sensitivities(coefficients, rounds, separation, participations)))


def prefix_error(
    coefficients: Sequence[float] | Column, rounds: int, separation: int, participations: int | None = None
) -> float:
    """The root mean square, over the rounds, of the error of a model that has added up all sums so far.

    It is that of one element, for a noise on C x of the size of its sensitivity: so what a multiplier of 1 for all
    rounds together gives. `coefficients=[1.0]` is independent noise. As above.
    """
    decoder = np.cumsum(first_inverse_column(coefficients, rounds))
    squares = np.cumsum(decoder**2)
    return sensitivity(coefficients, rounds, separation, participations) * math.sqrt(float(squares.mean()))


def best_coefficients(rounds: int, separation: int, bands: int, participations: int | None = None) -> Column:
    """The coefficients `[at most bands]`, the first of which is 1, with the least `prefix_error`.

    Raises PolicyError for numbers out of bounds, MissingExtraError without SciPy.
    """
    try:
        from scipy.optimize import minimize
    except ModuleNotFoundError:
        raise MissingExtraError("scipy", "privacy") from None
    bands = min(bands, rounds)
    if bands < 1:
        raise PolicyError(f"bands, rounds: expected 1 or more, got {bands}")
    # The square root of A, which is nearly the best for devices that come once (Fichtenberger et al. 2022).
    start: Column = np.cumprod(np.array([1.0, *((2 * j - 1) / (2 * j) for j in range(1, bands))]))
    row_sensitivities(start, rounds, separation, participations)
    if bands == 1:
        return start

    def loss(rest: Column) -> tuple[float, Column]:
        value, gradient = _loss(np.concatenate([[1.0], rest]), rounds, separation, participations)
        return value, gradient[1:]

    found = minimize(loss, start[1:], jac=True, method="L-BFGS-B", bounds=[(0.0, 1.0)] * (bands - 1)).x
    # The optimum never grows; this takes away what rounding may have left.
    return np.minimum.accumulate(np.concatenate([[1.0], found]))


def whole_coefficients(coefficients: Sequence[float] | Column, unit: int) -> tuple[int, ...]:
    """The coefficients as whole numbers of which the first is `unit`, without zeros at the end.

    As such they are exact data of a task: whoever has them computes the same sensitivity.
    """
    given = np.asarray(coefficients, np.float64)
    whole = np.minimum.accumulate(np.rint(given / given[0] * unit).astype(np.int64))
    return tuple(int(each) for each in whole if each > 0)


def _add_columns(coefficients: Column, rounds: int, starts: range) -> Column:
    """The sum of these columns of C, `[rounds]`."""
    total = np.zeros(rounds)
    for start in starts:
        total[start : start + len(coefficients)] += coefficients[: rounds - start]
    return total


def _loss(coefficients: Column, rounds: int, separation: int, participations: int | None) -> tuple[float, Column]:
    """The logarithm of the square of `prefix_error` times `rounds`, and its gradient."""
    bands = len(coefficients)
    starts = range(0, rounds, separation)[:participations]
    rows = _add_columns(coefficients, rounds, starts)
    inverse = first_inverse_column(coefficients, rounds)
    decoder = np.cumsum(inverse)
    # Column j of B has the first rounds - j elements of the decoder.
    weights = np.arange(rounds, 0, -1)
    size, error = float(rows @ rows), float(weights @ decoder**2)
    of_size = np.zeros(bands)
    for start in starts:
        part = rows[start : start + bands]
        of_size[: len(part)] += 2 * part
    # d inverse = -inverse * inverse * d coefficients, where * multiplies power series.
    of_inverse = np.cumsum((2 * weights * decoder)[::-1])[::-1]
    square = np.convolve(inverse, inverse)[:rounds]
    of_error = -np.array([of_inverse[j:] @ square[: rounds - j] for j in range(bands)])
    return math.log(size) + math.log(error), of_size / size + of_error / error
