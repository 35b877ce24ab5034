"""One secure round over neighbours: `python run_archipel.py '{"clients": 100, "entries": 1000, ...}'`.

The server is this process, the devices are in others (devices.py). Prints one JSON object: seconds of the server by the
clock and of its processor, in all and by step; of a client, the median of several; the server's largest memory; and the
bytes that one surviving device sends and receives beside its vector.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import resource
import secrets
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from devices import POPULATION, VALUE_BITS, Devices, Messages, Roles, divide, join

from archipel.protocol.identity import VerifiedDevice
from archipel.protocol.messages import Chain, Protocol
from archipel.protocol.sealed import decode
from archipel.protocol.secagg.masks import add_masked
from archipel.protocol.secagg_plus.member import Distinct, RoundKeys, Session, read_member
from archipel.protocol.secagg_plus.messages import (
    Answer,
    Confirmed,
    Dealt,
    Drawn,
    Neighbours,
    Packed,
    Refused,
    pack,
    unpack,
)
from archipel.protocol.secagg_plus.participant import Terms
from archipel.protocol.secagg_plus.roster import Roster, check_answer
from archipel.protocol.secagg_plus.sizes import Assumptions, choose_sizes
from archipel.protocol.secagg_plus.terms import agreement_of
from archipel.protocol.secagg_plus.unmask import unmask_sum
from archipel.protocol.vector import unpack as unpack_vector

BATCH = 64
"""Devices that act at the same time, so that the server never has all messages at once."""
T = TypeVar("T", bound=Packed)


@dataclass(frozen=True)
class Case:
    """`server` as in `Assumptions`, `protocol` as in a plan; `timed` clients are measured; a tenth leaves after
    dealing."""

    clients: int
    entries: int
    server: str = "semi-honest"
    protocol: Protocol = "neighbours"
    timed: int = 3
    every_mask: bool = False
    profile: str = ""


class Clock:
    """Adds up what the server computes, by step."""

    def __init__(self, profile: bool) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.processor: dict[str, float] = defaultdict(float)
        self._profile = cProfile.Profile() if profile else None

    @contextmanager
    def running(self, step: str) -> Iterator[None]:
        began = time.perf_counter(), time.process_time()
        if self._profile:
            self._profile.enable()
        try:
            yield
        finally:
            if self._profile:
                self._profile.disable()
            self.seconds[step] += time.perf_counter() - began[0]
            self.processor[step] += time.process_time() - began[1]

    def write_profile(self, path: str) -> None:
        if self._profile:
            with open(path, "w") as file:
                pstats.Stats(self._profile, stream=file).sort_stats("tottime").print_stats(30)


class Server:
    def __init__(self, case: Case, terms: Terms, devices: Devices, clock: Clock) -> None:
        self._case, self._terms, self._devices, self._clock = case, terms, devices, clock
        self._bytes: dict[int, int] = defaultdict(int)

    def open(self) -> None:
        """Everybody advertises; the server verifies and fixes the cohort. It knows each since its enrolment."""
        chains = self._devices.enrol()
        members = self._devices.advertise()
        with self._clock.running("members"):
            distinct, named = Distinct(), []
            read = self._read([(member, chains[number]) for number, member in members.items()])
            for (number, member), (device, keys) in zip(members.items(), read, strict=True):
                distinct.add(device, keys)
                named.append((device.device_id, number, member))
            named.sort()
        with self._clock.running("tree"):
            self._roster = Roster([member for _, _, member in named], self._terms.sizes, self._terms.agreement)
        count = self._case.clients
        # Which places leave makes no difference: places are in the order of hashes.
        self._leaving = frozenset(range(0, count, 10))
        self._staying = [place for place in range(count) if place not in self._leaving]
        self._survivors = frozenset(self._staying)
        numbers = {place: number for place, (_, number, _) in enumerate(named)}
        self._devices.set_roles(Roles(self._leaving, frozenset(self._staying[: self._case.timed]), numbers))
        for place, (_, _, member) in enumerate(named):
            self._bytes[place] += len(member)

    def _read(self, members: Sequence[tuple[bytes, bytes]]) -> list[tuple[VerifiedDevice, RoundKeys]]:
        """All verified, in as many threads as there are cores, as a web process verifies each in its request's."""

        def read(given: tuple[bytes, bytes]) -> tuple[VerifiedDevice, RoundKeys]:
            member, kept = given
            size, key = self._terms.agreement.full_bytes, self._devices.enrolment_key
            known = decode("chain", kept, Chain)
            return read_member(member, self._terms.session, key, POPULATION, keys_bytes=size, known=known)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(read, members))

    def deal(self) -> None:
        for places in batches(range(self._case.clients), BATCH):
            drawn = self._ask("draw", places, self._roster.invite, Drawn)
            dealt = self._ask("deal", places, partial(self._introduce, drawn), Dealt)
            with self._clock.running("deal"):
                for place, message in dealt.items():
                    self._roster.take(place, message)

    def _introduce(self, drawn: dict[int, Drawn], place: int) -> Neighbours:
        return self._roster.introduce(place, drawn[place])

    def receive(self) -> None:
        refused: dict[int, Refused] = {}
        for places in batches(range(self._case.clients), BATCH):
            refused |= self._ask("receive", places, self._roster.inbox, Refused)
        with self._clock.running("settle"):
            self._sharers = self._roster.settle(refused)

    def mask(self) -> None:
        bits, entries = self._terms.modulus_bits, self._case.entries
        self._total = np.zeros(entries, np.uint32)
        # As many at a time as there are workers, so that the server has these few vectors only.
        for places in batches(self._staying, len(os.sched_getaffinity(0))):
            with self._clock.running("pair"):
                told = {place: pack(self._roster.pair(place, self._sharers)) for place in places}
            vectors = self._devices.ask("mask", told)
            with self._clock.running("add vectors"):
                for packed in vectors.values():
                    add_masked(self._total, unpack_vector(packed, entries, bits), bits)
            for place in places:
                self._bytes[place] += len(told[place])

    def answer(self) -> None:
        self._questions, self._answers, told = {}, {}, {}
        confirmed: dict[int, Confirmed] = {}
        for places in batches(self._staying, BATCH):
            with self._clock.running("ask"):
                asked = {place: self._roster.ask(place, self._survivors) for place in places}
                packed = {place: pack(question) for place, question in asked.items()}
            self._questions |= asked
            confirmed |= self._send("confirm", packed, Confirmed)
            told |= packed
        for places in batches(self._staying, BATCH):
            includes = dict.fromkeys(places, b"")
            if self._terms.assumed.server == "malicious":
                with self._clock.running("include"):
                    includes = {p: pack(self._roster.include(p, self._questions, confirmed)) for p in places}
                sent = {place: join(told[place], includes[place]) for place in places}
            else:
                sent = {place: join(told[place]) for place in places}
            self._answers |= self._send("answer", sent, Answer)
        with self._clock.running("check answers"):
            for place, answer in self._answers.items():
                check_answer(self._questions[place], answer, str(place))

    def unmask(self) -> None:
        """Raises AssertionError unless the sum is the plain sum."""
        with self._clock.running("unmask"):
            total = unmask_sum(
                self._total, session=self._terms.session, roster=self._roster, sharers=self._sharers,
                survivors=self._survivors, questions=self._questions, answers=self._answers,
                modulus_bits=self._terms.modulus_bits,
            )  # fmt: skip
        plain = self._devices.plain_sum() & np.uint32(2**self._terms.modulus_bits - 1)
        assert np.array_equal(total, plain), "the unmasked sum is not the plain sum"

    @property
    def bytes_of_a_survivor(self) -> float:
        """Of all messages of one that stays, sent and received, without its vector; the mean."""
        return statistics.mean(self._bytes[place] for place in self._staying)

    def _ask(self, step: str, places: Sequence[int], make: Callable[[int], Packed], kind: type[T]) -> dict[int, T]:
        with self._clock.running(step):
            messages = {place: pack(make(place)) for place in places}
        return self._send(step, messages, kind)

    def _send(self, step: str, messages: Messages, kind: type[T]) -> dict[int, T]:
        replies = self._devices.ask(step, messages)
        for place, reply in replies.items():
            self._bytes[place] += len(messages[place]) + len(reply)
            if step == "answer":
                # Not what `join` adds, nor a question that has come before, to be confirmed.
                self._bytes[place] -= 4 + len(divide(messages[place])[0])
        with self._clock.running(step):
            return {place: unpack(reply, kind) for place, reply in replies.items()}


def batches(places: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


def modulus_bits(clients: int) -> int:
    """Of the sum of so many vectors, in whole bytes."""
    return -(-sum_bits(clients) // 8) * 8


def sum_bits(clients: int) -> int:
    return (clients * (2**VALUE_BITS - 1)).bit_length()


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    assumed = Assumptions(corrupt=0.2, dropped=0.2, server=case.server)  # type: ignore[arg-type]
    sizes = choose_sizes(case.clients, assumed)
    session = Session(secrets.token_hex(16), secrets.token_hex(32))
    agreement = agreement_of(case.protocol)
    terms = Terms(session, sizes, assumed, 3, case.clients, modulus_bits(case.clients), agreement)
    clock, workers = Clock(bool(case.profile)), len(os.sched_getaffinity(0))
    with Devices(case.clients, case.entries, terms, case.every_mask, workers) as devices:
        server = Server(case, terms, devices, clock)
        for step in (server.open, server.deal, server.receive, server.mask, server.answer, server.unmask):
            began = time.perf_counter()
            step()
            print(f"{step.__name__}: {time.perf_counter() - began:.1f} s with the devices", file=sys.stderr)
        clients = devices.seconds()
    clock.write_profile(case.profile)
    found = {
        "server": sum(clock.seconds.values()), "server_processor": sum(clock.processor.values()),
        "steps": clock.seconds, "steps_processor": clock.processor,
        "client": statistics.median(seconds for seconds, _ in clients),
        "client_processor": statistics.median(processor for _, processor in clients),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "bytes": server.bytes_of_a_survivor, "sizes": asdict(sizes),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
