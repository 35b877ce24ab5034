"""Who spoils rounds, found by counting: pure functions over rounds, without a database.

A sum that makes no sense says that somebody in the round sent something else than an update, not who. So the server
lets chance decide who is in which round, and counts. For every device it keeps a bet, against the assumption that the
device is honest, on whether a round with it is spoiled. A round multiplies what was staked by

    P(outcome | the device was in it, or not) / P(outcome),

under the alternative that the device spoils a share `q` of its rounds and others spoil a share `b` of all. An honest
device does not choose its rounds, the server's dice do, so on average its bet wins nothing: the chance that it ever
grows to 1 / risk is at most `risk`, however often one looks (Ville's inequality; Shafer 2021, "Testing by betting").
No assumption on how often, or when, spoilers spoil enters into that, but one: that it does not depend on whether this
very device is there. Who spoils only the rounds of one other device accuses both, by the same evidence.

Devices with the most evidence are suspects. Few of them come into a round, the rest of it are others: most rounds are
then good ones, which clear those that were in them, and one that is spoiled says much.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random

ALTERNATIVES = tuple((q, b) for q in (0.1, 0.3, 0.9) for b in (0.01, 0.1, 0.5))
"""What is bet on, with equal stakes: the share of its own rounds that a device spoils, and of all that others do."""
SHARE = 0.25
"""Of the suspects that wait, and of the seats of a round, so much is given to suspects."""
NEAR = math.log(10.0)
"""Suspects are those whose evidence is within this of the strongest."""
PATIENCE = 30
"""After so many good rounds in a row suspects are drawn like all others, until the next one that is spoiled."""
_MOST = math.log(1e15)


@dataclass(frozen=True)
class Score:
    """What is known of one device. `logs`: natural logarithms of its bets, one for each of ALTERNATIVES.

    `rounds` and `spoiled` count those that it was in since the search began.
    """

    logs: tuple[float, ...] = (0.0,) * len(ALTERNATIVES)
    rounds: int = 0
    spoiled: int = 0

    @property
    def evidence(self) -> float:
        """Natural logarithm of the mean of the bets; 0 before the first."""
        most = max(self.logs)
        return most + math.log(sum(math.exp(each - most) for each in self.logs) / len(self.logs))

    @property
    def odds(self) -> float:
        """`evidence` as a number: an honest device comes to it, or beyond, at most once in so many searches."""
        return math.exp(min(self.evidence, _MOST))


@dataclass(frozen=True)
class Draw:
    """Who is in a round. A waiting suspect was taken with probability `suspect_chance`, any other device with `chance`.

    `suspects` are those that waited, taken or not.
    """

    chosen: tuple[str, ...]
    chance: float
    suspects: tuple[str, ...] = ()
    suspect_chance: float = 0.0


def bet(score: Score, *, chance: float, present: bool, spoiled: bool) -> Score:
    """The score after a round that the device was in (`present`), or could have been with probability `chance`."""
    logs = tuple(log + _gain(chance, present, spoiled, q, b) for log, (q, b) in zip(score.logs, ALTERNATIVES))
    return Score(logs, score.rounds + present, score.spoiled + (present and spoiled))


def _gain(chance: float, present: bool, spoiled: bool, q: float, b: float) -> float:
    in_it = q + b - q * b
    whole = chance * in_it + (1 - chance) * b
    this = in_it if present else b
    return math.log(this / whole) if spoiled else math.log((1 - this) / (1 - whole))


def accused(scores: Mapping[str, Score], *, devices: int, risk: float) -> list[str]:
    """Those whose evidence is beyond what chance explains, strongest first.

    `risk` (0 to 1): the chance that a search accuses an honest one of so many `devices` at all.
    """
    needed = math.log(max(devices, 1) / risk)
    found = [device for device, score in scores.items() if score.evidence >= needed]
    return sorted(found, key=lambda device: (-scores[device].evidence, device))


def suspects(scores: Mapping[str, Score], waiting: Collection[str]) -> list[str]:
    """Of the devices that wait those to be mixed with others: within NEAR of the one with the most evidence.

    Not only those whose bets have won: in a fleet hardly larger than a round all of them lose, the spoiler least.
    """
    known = {device: scores[device].evidence for device in waiting if device in scores}
    if not known:
        return []
    least = max(known.values()) - NEAR
    return sorted(device for device, evidence in known.items() if evidence >= least)


def draw(waiting: Sequence[str], scores: Mapping[str, Score], *, cohort: int, required: int, random: Random) -> Draw:
    """Choose up to `cohort` of the `waiting` devices, with few suspects among them, and `required` of them at least.

    Where there are too few others the round is smaller, as long as half of what the cohort has above `required` is left
    for devices that drop out. Nobody can foretell the choice if `random` is a cryptographic generator.
    """
    cohort = min(cohort, len(waiting))
    pool = suspects(scores, waiting)
    if not pool:
        return Draw(tuple(random.sample(list(waiting), cohort)), _ratio(cohort, len(waiting)))
    others = sorted(set(waiting) - set(pool))
    least = min(required + (cohort - required + 1) // 2, cohort)
    lowest, highest = max(least - len(others), 0), min(len(pool), cohort)
    wanted = SHARE * min(len(pool), cohort)
    # A share that is no whole number is rounded by chance, or a single suspect would be in all rounds or in none.
    up = wanted - math.floor(wanted)
    cases = [(min(max(math.floor(wanted) + more, lowest), highest), p) for more, p in ((0, 1 - up), (1, up))]
    seats = cases[random.random() < up][0]
    chosen = random.sample(pool, seats) + random.sample(others, min(len(others), cohort - seats))
    return Draw(
        chosen=tuple(chosen),
        chance=_ratio(sum(p * min(len(others), cohort - taken) for taken, p in cases), len(others)),
        suspects=tuple(pool),
        suspect_chance=_ratio(sum(p * taken for taken, p in cases), len(pool)),
    )


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
