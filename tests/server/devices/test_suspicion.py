"""Counting who spoils rounds: what the bets come to, by hand; that honest devices win nothing; whom chance draws."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from archipel.server.devices.suspicion import ALTERNATIVES, NEAR, Score, accused, bet, draw, suspects

CHANCES = some.floats(0.001, 0.999)
ROUNDS = some.lists(some.tuples(CHANCES, some.booleans(), some.booleans()), max_size=60)


def scored(*rounds: tuple[float, bool, bool]) -> Score:
    score = Score()
    for chance, present, spoiled in rounds:
        score = bet(score, chance=chance, present=present, spoiled=spoiled)
    return score


def test_what_one_round_says_by_hand() -> None:
    # Of the stake on q = 0.9, b = 0.1: a round with the device is spoiled with 0.9 + 0.1 - 0.09 = 0.91, one without it
    # with 0.1; at a chance of 1/4 that makes 0.25 x 0.91 + 0.75 x 0.1 = 0.3025 of all.
    place = ALTERNATIVES.index((0.9, 0.1))
    for present, spoiled, expected in (
        (True, True, 0.91 / 0.3025),
        (False, True, 0.1 / 0.3025),
        (True, False, 0.09 / 0.6975),
        (False, False, 0.9 / 0.6975),
    ):
        score = scored((0.25, present, spoiled))
        assert math.exp(score.logs[place]) == pytest.approx(expected)
        assert (score.rounds, score.spoiled) == (int(present), int(present and spoiled))


@given(chance=CHANCES, spoiled=some.booleans())
def test_on_average_an_honest_device_wins_nothing(chance: float, spoiled: bool) -> None:
    """Whatever came of the round: whether an honest device was in it is the dice's doing alone."""
    there, away = (scored((chance, present, spoiled)).logs for present in (True, False))
    for one, other in zip(there, away, strict=True):
        assert chance * math.exp(one) + (1 - chance) * math.exp(other) == pytest.approx(1.0)


@given(rounds=ROUNDS, data=some.data())
def test_only_what_was_seen_counts_not_in_which_order(
    rounds: list[tuple[float, bool, bool]], data: some.DataObject
) -> None:
    score, other = scored(*rounds), scored(*data.draw(some.permutations(rounds)))
    assert score.logs == pytest.approx(other.logs)
    assert (score.rounds, score.spoiled) == (other.rounds, other.spoiled)
    assert score.evidence <= max(score.logs) + 1e-9
    # One that is in every round shows nothing, whatever comes of them.
    assert scored(*((1.0, True, spoiled) for _, _, spoiled in rounds)).evidence == pytest.approx(0.0, abs=1e-9)


@pytest.mark.sampled(every=3)
@given(data=some.data())
def test_a_round_has_as_many_devices_as_it_needs_and_no_more(data: some.DataObject) -> None:
    waiting = [f"{number:03d}" for number in range(data.draw(some.integers(1, 40)))]
    known = data.draw(some.lists(some.sampled_from(waiting), unique=True))
    scores = {device: scored(*data.draw(ROUNDS.filter(lambda rounds: len(rounds) < 9))) for device in known}
    cohort = data.draw(some.integers(1, 45))
    required = data.draw(some.integers(1, min(cohort, len(waiting))))
    made = draw(waiting, scores, cohort=cohort, required=required, random=Random(data.draw(some.integers())))
    assert len(set(made.chosen)) == len(made.chosen)
    assert set(made.chosen) <= set(waiting)
    assert required <= len(made.chosen) <= cohort
    if not scores:
        assert (len(made.chosen), made.suspects) == (min(cohort, len(waiting)), ())
    # The strongest is always among the suspects, and they are within NEAR of it.
    evidence = {device: scores[device].evidence for device in scores}
    assert set(made.suspects) == {device for device in scores if evidence[device] >= max(evidence.values()) - NEAR}
    assert made.suspects == tuple(suspects(scores, waiting))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("fleet", "known", "cohort", "required"), [(12, 3, 5, 4), (12, 1, 5, 4), (8, 8, 8, 4), (9, 6, 6, 5)]
)
def test_the_stated_chances_are_those_of_the_draw(fleet: int, known: int, cohort: int, required: int) -> None:
    waiting = [f"{number:03d}" for number in range(fleet)]
    scores = {device: Score() for device in waiting[:known]}
    random, draws, seen = Random(5), 6000, Counter[str]()
    for _ in range(draws):
        made = draw(waiting, scores, cohort=cohort, required=required, random=random)
        seen.update(made.chosen)
    for device in waiting:
        chance = made.suspect_chance if device in scores else made.chance
        assert seen[device] / draws == pytest.approx(chance, abs=0.03), device  # 4.6 standard deviations at most


def search(
    random: Random, fleet: int, cohort: int, spoils: dict[str, float], by_chance: float, rounds: int
) -> list[str]:
    """Everybody who is accused within so many rounds, in which some devices and nobody (`by_chance`) spoil."""
    waiting, scores, found = [f"{number:03d}" for number in range(fleet)], {}, []
    scores = {device: Score() for device in waiting}
    for _ in range(rounds):
        made = draw(waiting, scores, cohort=cohort, required=cohort, random=random)
        spoiled = random.random() < by_chance
        spoiled |= any(random.random() < spoils.get(device, 0.0) for device in made.chosen)
        for device, score in scores.items():
            chance = made.suspect_chance if device in made.suspects else made.chance
            scores[device] = bet(score, chance=chance, present=device in made.chosen, spoiled=spoiled)
        for device in accused(scores, devices=fleet, risk=0.05):
            found.append(device)
            waiting.remove(device)
            del scores[device]
    return found


@pytest.mark.sampled(every=4)
def test_where_rounds_are_spoiled_by_nobody_hardly_anybody_is_accused() -> None:
    searches = [search(Random(seed), 12, 4, {}, by_chance=0.4, rounds=60) for seed in range(150)]
    # 0.05 of 150 is 7.5; the bound holds for searches of any length.
    assert sum(map(bool, searches)) <= 7


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("share", "rounds"), [(1.0, 60), (0.5, 160)])
def test_the_one_who_spoils_is_found(share: float, rounds: int) -> None:
    searches = [search(Random(seed), 12, 4, {"007": share}, by_chance=0.0, rounds=rounds) for seed in range(20)]
    assert sum("007" in found for found in searches) >= 18
    assert sum(set(found) > {"007"} for found in searches) <= 1


def test_who_frames_another_device_is_accused_as_much_as_it() -> None:
    """001 spoils only what 002 is in: both are in all spoiled rounds, and in as many good ones."""
    random, waiting = Random(3), [f"{number:03d}" for number in range(12)]
    scores = {device: Score() for device in waiting}
    for _ in range(400):
        made = draw(waiting, scores, cohort=5, required=5, random=random)
        spoiled = {"001", "002"} <= set(made.chosen)
        for device, score in scores.items():
            chance = made.suspect_chance if device in made.suspects else made.chance
            scores[device] = bet(score, chance=chance, present=device in made.chosen, spoiled=spoiled)
    strongest = sorted(scores, key=lambda device: -scores[device].evidence)[:2]
    assert set(strongest) == {"001", "002"}
