"""A server learns facts about one device's examples from which of the offered versions it runs.

Who: the server, which may offer any weights. What they want: one bit of a device with each offer. One that adopts
takes the version whose loss is smaller on its own examples, so whoever makes two versions that differ in one place, and
hears which of them runs, asks a question of their own about the data. What stops them: nothing that leaves the device
depends on what runs. Check-ins tell what was fetched; what is fetched follows from what was offered; and the time of
the next request follows from when the look began, not from what came of it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel.client import Agent
from archipel.client.versions.adoption import Adoption
from archipel.client.versions.offer_book import RETRY_SECONDS
from archipel.client.versions.running import RunningModels
from archipel.protocol.messages import Offer
from tests.attacks.owner_offers import LOOK, Listening, Watched, opposite_data
from tests.support.in_thread import in_thread
from tests.support.registry import MODEL

RIGHT, WRONG = (1.0, -1.0, 2.0), (-1.0, 1.0, -2.0)
"""For the first device; the other way round for the second."""


@contextmanager
def devices(tmp_path: Path) -> Iterator[list[Watched]]:
    """Two devices whose data differ, each at a server of its own that does the same."""
    watched = []
    with ExitStack() as stack:
        for number, data in enumerate(opposite_data()):
            home = tmp_path / str(number)
            home.mkdir()
            server = stack.enter_context(in_thread(Listening(home)))
            each = Watched(server, data, home / "device")
            with each.agent() as agent:
                agent.enrol(server.token())
            watched.append(each)
        yield watched


def shape(server: Listening, bundles: list[str]) -> list[tuple[str, str, bytes, str]]:
    """Every request, digests by the order in which this server made its versions: keys differ, nothing else may."""

    def plain(text: str) -> str:
        for number, digest in enumerate(bundles):
            text = text.replace(digest, f"bundle-{number}")
        return text

    return [(method, plain(path), body, rng) for method, path, body, rng in server.heard]


Script = Callable[[Watched, Agent, list[float]], list[str]]


def offers_and_clock(each: Watched, agent: Agent, now: list[float]) -> list[str]:
    """Better here and worse there; the same again; under a new serial; after a day; restarted; another one; back."""
    server = each.server
    first = server.version(1, (0.0, 0.0, 0.0), 1)
    second = server.version(2, RIGHT, 2)
    third = server.version(3, WRONG, 4)
    later = msgspec.structs.replace(second, serial=3)
    back = msgspec.structs.replace(first, serial=5)
    for offers in ([first], [second], [second], [later], [], [later], [third], [], [third], [back], []):
        server.offer(*offers)
        agent.run_once()
    now[0] += RETRY_SECONDS + 1
    server.offer()
    agent.run_once()
    # From now on nothing stays in the cache but what was fetched last.
    agent._device.cache._max_bytes = 0
    agent._device.cache.prune()
    assert not list((each.folder / "cache" / "bundles").iterdir())
    bad = server.version(4, (9.0, 9.0, 9.0), 7)
    again = msgspec.structs.replace
    # The one that is better on one of the devices alone comes once more after a bad one; and before anybody looks at it
    # the cache has lost it to another model's, whether it runs here or not.
    for offers in (
        [again(third, serial=6)], [], [bad], [], [again(third, serial=8), again(first, model="second")], [], [],
        [again(second, serial=9)], [],
    ):  # fmt: skip
        server.offer(*offers)
        agent.run_once()
        now[0] += RETRY_SECONDS + 1
    return [first.bundle, second.bundle, third.bundle, bad.bundle]


@pytest.mark.sampled(every=3)
def test_every_request_is_the_same_whatever_runs(tmp_path: Path) -> None:
    with devices(tmp_path) as watched:
        shapes, runs = [], []
        for each in watched:
            now = [1e9]
            with each.agent() as agent:
                agent._adoption = Adoption(agent._device, lambda now=now: now[0])
                bundles = offers_and_clock(each, agent, now)
                runs.append(each.names())
            shapes.append(shape(each.server, bundles))
        assert shapes[0] == shapes[1]
        assert len(shapes[0]) > 15
        assert {"adopted", "kept"} <= set(runs[0]) | set(runs[1])
        assert runs[0] != runs[1]  # on the devices themselves it was not the same


def gaps(each: Watched, offers: list[list[Offer]]) -> list[float]:
    """Seconds between the check-ins of an agent that runs by itself; the k-th is answered with `offers[k]`."""
    server, stop = each.server, threading.Event()
    asked = itertools.count()
    times: list[float] = []
    kept = server._check_in

    def check_in(body: bytes) -> msgspec.Struct:
        number = next(asked)
        times.append(time.monotonic())
        if number >= len(offers):
            stop.set()
            server.offer()
        else:
            server.offer(*offers[number])
        return kept(body)

    server._check_in = check_in  # type: ignore[method-assign]
    with each.agent() as agent:
        agent.run_forever(stop)
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.sampled(every=4)
def test_the_time_of_the_next_request_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installing a version takes a while, which is spent on one device and not on the other."""
    install = RunningModels.install

    def slowly(self: RunningModels, *arguments: Any) -> None:
        time.sleep(LOOK / 3)
        install(self, *arguments)

    monkeypatch.setattr(RunningModels, "install", slowly)
    with devices(tmp_path) as watched:
        found = []
        for each in watched:
            first, second = each.server.version(1, (0.0, 0.0, 0.0), 1), each.server.version(2, RIGHT, 2)
            found.append(gaps(each, [[first], [second], [], []]))
        names = [each.names() for each in watched]
        assert names == [["adopted", "adopted"], ["adopted", "kept"]]
        # Fetching is the same for both, and so is the silence after it; the next check-ins follow at once.
        for one, other in zip(*found, strict=True):
            assert abs(one - other) < LOOK / 4
        assert all(each[1] >= LOOK for each in found)


def test_what_is_told_is_what_was_fetched(tmp_path: Path) -> None:
    with devices(tmp_path) as watched:
        for each, runs in zip(watched, (2, 1), strict=True):
            with each.agent() as agent:
                for offer in (each.server.version(1, (0.0, 0.0, 0.0), 1), each.server.version(2, RIGHT, 2)):
                    each.server.offer(offer)
                    agent.run_once()
                agent.run_once()
                assert agent.models == {MODEL: runs}
            assert msgspec.json.decode(each.server.bodies["check-in"][-1])["versions"] == {MODEL: 2}
