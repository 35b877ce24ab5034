"""Finds devices that spoil rounds by counting: pure functions over rounds, without a database.

An invalid sum shows that some device in the round sent something else than an update, but not which one. So the server
draws the devices of each round at random, and counts. For every device it keeps a bet against the hypothesis that the
device is honest, on whether rounds with it are spoiled. Each round multiplies the bet's capital by

    P(outcome | whether the device was in the round) / P(outcome),

under the alternative that the device spoils a share `q` of its rounds and others spoil a share `b` of all rounds. An
honest device does not choose its rounds, so on average its bet wins nothing. The probability that its capital ever
reaches 1 / risk is at most `risk`, however often it is checked (Ville's inequality; Shafer 2021, "Testing by betting").
That holds however often and whenever spoilers spoil, on one assumption: that it does not depend on whether this very
device is in the round. A device that spoils only the rounds of one other device puts both under the same suspicion.

Devices with the most evidence are suspects. A round has few of them and many other devices. Then most rounds are good,
which clears the devices in them, and a spoiled round says much about its few suspects.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random

ALTERNATIVES = tuple((q, b) for q in (0.1, 0.3, 0.9) for b in (0.01, 0.1, 0.5))
"""Pairs (q, b) that are bet on with equal stakes: the shares of rounds that the device and that others spoil."""
SHARE = 0.25
"""The share of the waiting suspects that a round takes, and at most of its seats that suspects get."""
NEAR = math.log(10.0)
"""A device is a suspect if its evidence is within this of the strongest evidence."""
PATIENCE = 30
"""After so many good rounds in a row suspects are drawn like all other devices, until the next spoiled round."""
_MOST = math.log(1e15)


@dataclass(frozen=True)
class Score:
    """What is known about one device. `logs`: natural logarithms of its bets, one for each of ALTERNATIVES.

    `rounds` and `spoiled` count the rounds that it was in since the search began.
    """

    logs: tuple[float, ...] = (0.0,) * len(ALTERNATIVES)
    rounds: int = 0
    spoiled: int = 0

    @property
    def evidence(self) -> float:
        """Natural logarithm of the mean of the bets; 0 before the first round."""
        # Log-sum-exp with the largest term taken out, so that no exponential overflows.
        most = max(self.logs)
        return most + math.log(sum(math.exp(each - most) for each in self.logs) / len(self.logs))

    @property
    def odds(self) -> float:
        """`evidence` as a number: an honest device reaches it in at most one of so many searches."""
        return math.exp(min(self.evidence, _MOST))


@dataclass(frozen=True)
class Draw:
    """The devices of a round. A waiting suspect was taken with probability `suspect_chance`, others with `chance`.

    `suspects` are all suspects that waited, whether they were taken or not.
    """

    chosen: tuple[str, ...]
    chance: float
    suspects: tuple[str, ...] = ()
    suspect_chance: float = 0.0


def bet(score: Score, *, chance: float, present: bool, spoiled: bool) -> Score:
    """The score after a round for which the device was drawn with probability `chance`. `present`: it was in it."""
    logs = tuple(log + _gain(chance, present, spoiled, q, b) for log, (q, b) in zip(score.logs, ALTERNATIVES))
    return Score(logs, score.rounds + present, score.spoiled + (present and spoiled))


def _gain(chance: float, present: bool, spoiled: bool, q: float, b: float) -> float:
    # Of independent events: a round with the device is good only if neither it nor others spoil it.
    with_device = q + b - q * b
    whole = chance * with_device + (1 - chance) * b
    this = with_device if present else b
    return math.log(this / whole) if spoiled else math.log((1 - this) / (1 - whole))


def accused(scores: Mapping[str, Score], *, devices: int, risk: float) -> list[str]:
    """The devices whose evidence is beyond what chance explains, strongest evidence first.

    `risk` (0 to 1) is the probability that a search accuses any honest one of so many `devices`.
    """
    # Bonferroni: each device may reach its threshold with probability risk / devices.
    needed = math.log(max(devices, 1) / risk)
    spoilers = [device for device, score in scores.items() if score.evidence >= needed]
    return sorted(spoilers, key=lambda device: (-scores[device].evidence, device))


def suspects(scores: Mapping[str, Score], waiting: Collection[str]) -> list[str]:
    """The waiting devices that are to be mixed with others: those within NEAR of the one with the most evidence.

    The limit is relative, because a bet need not have won: in a fleet hardly larger than a round all bets lose, and the
    spoiler's loses least.
    """
    known = {device: scores[device].evidence for device in waiting if device in scores}
    if not known:
        return []
    least = max(known.values()) - NEAR
    return sorted(device for device, evidence in known.items() if evidence >= least)


def draw(waiting: Sequence[str], scores: Mapping[str, Score], *, cohort: int, required: int, random: Random) -> Draw:
    """Choose the devices of a round, with few suspects among them.

    Arguments:
        waiting: Ids of the devices that wait.
        scores: What is known about devices; empty: all are drawn alike.
        cohort: The largest number of devices. If too few others wait, the round is smaller, down to half way between
            `cohort` and `required`, which leaves a reserve for devices that drop out.
        required: The smallest number of devices.
        random: A cryptographic generator, if nobody shall be able to predict the choice.

    Returns:
        The devices, and the exact probabilities with which they were drawn, for `bet`.
    """
    cohort = min(cohort, len(waiting))
    pool = suspects(scores, waiting)
    if not pool:
        return Draw(tuple(random.sample(list(waiting), cohort)), _ratio(cohort, len(waiting)))
    others = sorted(set(waiting) - set(pool))
    least = min(required + (cohort - required + 1) // 2, cohort)
    lowest, highest = max(least - len(others), 0), min(len(pool), cohort)
    share = SHARE * min(len(pool), cohort)
    # A share that is no whole number is rounded at random. Else a single suspect would be in all rounds or in none, and
    # nothing could be learned about it.
    up = share - math.floor(share)
    cases = [(min(max(math.floor(share) + more, lowest), highest), p) for more, p in ((0, 1 - up), (1, up))]
    seats = cases[random.random() < up][0]
    chosen = random.sample(pool, seats) + random.sample(others, min(len(others), cohort - seats))
    # The probabilities are averages over both cases, because the bets must not depend on which of them came out.
    return Draw(
        chosen=tuple(chosen),
        chance=_ratio(sum(p * min(len(others), cohort - taken) for taken, p in cases), len(others)),
        suspects=tuple(pool),
        suspect_chance=_ratio(sum(p * taken for taken, p in cases), len(pool)),
    )


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
