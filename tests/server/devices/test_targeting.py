"""Which devices so many percent are: near their share, the same for every question, others under another key."""

from __future__ import annotations

import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.server.database.tables import Task
from archipel.server.devices.targeting import Target, place
from archipel.server.rounds.candidates import candidates, count_candidates
from tests.support.world import World

hexadecimal = st.binary(min_size=16, max_size=16).map(bytes.hex)
percentages = st.floats(min_value=0, max_value=100, exclude_min=True)
IDS = [hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in range(10_000)]
SALTS = ["00" * 16, "a7" * 16, "ff" * 16]


@given(hexadecimal, hexadecimal, percentages, percentages)
def test_who_is_in_a_stage_is_in_every_later_one(salt: str, device: str, first: float, second: float) -> None:
    earlier, later = (Target("", salt, percent) for percent in sorted((first, second)))
    assert earlier.takes(device, {}) <= later.takes(device, {})
    assert earlier.takes(device, {}) == earlier.takes(device, {})


@given(hexadecimal, hexadecimal)
def test_the_place_itself_is_not_below_it(salt: str, device: str) -> None:
    where = place(salt, device)
    assert not Target("", salt, where).takes(device, {})
    assert Target("", salt, math.nextafter(where, 200)).takes(device, {})


@given(hexadecimal, hexadecimal)
def test_everybody_is_among_a_hundred_percent(salt: str, device: str) -> None:
    assert 0 <= place(salt, device) < 100
    assert Target("", salt, 100.0).takes(device, {})


def test_the_highest_place_is_below_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    class Highest:
        def __init__(self, *arguments: object, **more: object) -> None: ...

        def digest(self) -> bytes:
            return b"\xff" * 6

    monkeypatch.setattr(hashlib, "blake2b", Highest)
    assert place(SALTS[0], IDS[0]) < 100
    assert not Target("", SALTS[0], 99.999).takes(IDS[0], {})


@pytest.mark.parametrize("salt", SALTS)
@pytest.mark.parametrize("percent", [0.5, 1, 10, 50, 99])
def test_the_share_is_near_its_percentage(salt: str, percent: float) -> None:
    found = sum(Target("", salt, percent).takes(device, {}) for device in IDS)
    expected = len(IDS) * percent / 100
    # Four standard deviations of the binomial distribution.
    assert abs(found - expected) < 4 * math.sqrt(expected * (1 - percent / 100))


def test_another_key_takes_others() -> None:
    """Of 10 percent under one key 10 percent are there under another, as if drawn anew."""
    first, second = ({device for device in IDS if place(salt, device) < 10} for salt in SALTS[:2])
    expected = len(first) / 10
    assert abs(len(first & second) - expected) < 4 * math.sqrt(expected)


def test_a_known_value() -> None:
    """Whoever is in a stage stays in it when the server is updated: the hash is that of RFC 7693, and never another."""
    hashed = hashlib.blake2b(b"0" * 32, key=bytes(16), digest_size=6, person=b"archipel/percent").hexdigest()
    assert hashed == "af0ddc781731"
    assert place("00" * 16, "0" * 32) == int(hashed, 16) / 2**48 * 100


def test_the_expression_comes_on_top() -> None:
    target = Target('app >= "2.0"', SALTS[0], 50.0)
    inside = next(device for device in IDS if place(SALTS[0], device) < 50)
    outside = next(device for device in IDS if place(SALTS[0], device) >= 50)
    assert target.takes(inside, {"app": "2.1"})
    assert not target.takes(inside, {"app": "1.9"})
    assert not target.takes(inside, {})
    assert not target.takes(outside, {"app": "2.1"})
    assert not target.everybody
    assert Target().everybody


@pytest.mark.sampled(every=3)
def test_rounds_take_the_same_devices(world: World) -> None:
    task = world.create_task()
    devices = world.add_devices(12)
    for device in devices:
        device.check_in()
    with world.services.database.write() as session:
        stored = session.get_one(Task, task["task_id"])
        stored.salt, stored.percent = SALTS[1], 40.0
    expected = sorted(device.id for device in devices if place(SALTS[1], device.id) < 40)
    with world.services.database.read() as session:
        stored = session.get_one(Task, task["task_id"])
        assert sorted(candidates(session, stored, now=world.clock.now, window=10.0, lock=False)) == expected
        assert count_candidates(session, stored, now=world.clock.now, window=10.0) == len(expected)
    assert world.task(task["task_id"])["waiting"] == len(expected)
