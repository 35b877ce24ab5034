"""Attacks of devices that know all honest updates and agree on what they send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]
Row = NDArray[np.float64]
Rule = Callable[[Rows], Row]
"""The server's rule, which attackers know."""

_STRENGTHS = 0.125 * 2.0 ** np.arange(0, 8, 0.5)


@dataclass(frozen=True)
class UpdateAttack:
    """(honest updates, how many attackers, strength, generator, the server's rule) -> the attackers' updates.

    `strength` is the default one; what it multiplies is the attack's own.
    """

    name: str
    make: Callable[[Rows, int, float, np.random.Generator, Rule], Rows]
    strength: float = 1.0

    def __call__(
        self,
        honest: Rows,
        count: int,
        *,
        generator: np.random.Generator,
        rule: Rule,
        strength: float | None = None,
    ) -> Rows:
        """The attackers' updates, float64 `[count, d]`.

        Arguments:
            honest: float64 `[n, d]`, 1 or more.
            count: how many attackers there are.
            generator: what is drawn comes from it.
            rule: all updates, `[n + count, d]` -> the server's aggregate `[d]`.
            strength: None: the attack's default.
        """
        return self.make(honest, count, self.strength if strength is None else strength, generator, rule)


def flip_sign(honest: Rows, count: int, strength: float, generator: np.random.Generator, rule: Rule) -> Rows:
    """The opposite of the mean (Allen-Zhu et al. 2020)."""
    return _all_alike(-strength * honest.mean(axis=0), count)


def stay_near(honest: Rows, count: int, strength: float, generator: np.random.Generator, rule: Rule) -> Rows:
    """The mean and `strength` standard deviations: ALIE (Baruch et al. 2019, *A little is enough*)."""
    return _all_alike(honest.mean(axis=0) + strength * _deviation(honest), count)


def mimic(honest: Rows, count: int, strength: float, generator: np.random.Generator, rule: Rule) -> Rows:
    """The first honest update, so that this one counts for all (Karimireddy et al. 2022)."""
    return _all_alike(honest[0], count)


def draw_noise(honest: Rows, count: int, strength: float, generator: np.random.Generator, rule: Rule) -> Rows:
    """Gaussian noise, as long as `strength` times the usual honest update."""
    noise = generator.standard_normal((count, honest.shape[1]))
    usual = float(np.median(np.linalg.norm(honest, axis=1)))
    return np.asarray(noise * (strength * usual / np.sqrt(max(honest.shape[1], 1))))


def flip_best(honest: Rows, count: int, strength: float, generator: np.random.Generator, rule: Rule) -> Rows:
    """The multiple of the opposite mean that moves the server's aggregate furthest (Shejwalkar and Houmansadr 2021)."""
    return _furthest(honest, count, np.zeros(honest.shape[1]), -honest.mean(axis=0), rule)


def stay_near_best(honest: Rows, count: int, strength: float, generator: np.random.Generator, rule: Rule) -> Rows:
    """ALIE with the number of deviations that moves the server's aggregate furthest."""
    return _furthest(honest, count, honest.mean(axis=0), -_deviation(honest), rule)


def _furthest(honest: Rows, count: int, start: Row, direction: Row, rule: Rule) -> Rows:
    mean, best, furthest = honest.mean(axis=0), start, -1.0
    for strength in _STRENGTHS:
        sent = start + strength * direction
        away = float(np.linalg.norm(rule(np.concatenate([honest, _all_alike(sent, count)])) - mean))
        if away > furthest:
            best, furthest = sent, away
    return _all_alike(best, count)


def _deviation(honest: Rows) -> Row:
    return np.asarray(honest.std(axis=0, ddof=1) if len(honest) > 1 else np.zeros(honest.shape[1]))


def _all_alike(row: Row, count: int) -> Rows:
    return np.tile(row, (count, 1))


ATTACKS: dict[str, UpdateAttack] = {
    attack.name: attack
    for attack in (
        UpdateAttack("sign-flip", flip_sign),
        # Inner product manipulation (Xie et al. 2020): a small opposite, which looks like an honest update.
        UpdateAttack("ipm", flip_sign, 0.5),
        UpdateAttack("alie", stay_near, 1.5),
        UpdateAttack("mimic", mimic),
        UpdateAttack("gaussian", draw_noise),
        UpdateAttack("best-ipm", flip_best),
        UpdateAttack("best-alie", stay_near_best),
    )
}
"""By name."""
