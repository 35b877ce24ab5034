"""Devices of a secure round over neighbours, in worker processes, so that the server's time and memory are its own.

They send what real participants send, with three short cuts that the server cannot tell:

- each worker verifies a member's certificates once, and not for every device that drew it; it checks sizes once;
- unless `every_mask`, a device leaves out masks that it shares with devices that stay: both leave them out, so they
  cancel as before, and its vector is still under a mask of its own;
- vectors are drawn from a seed when they are sent, and forgotten.

Devices whose time is taken take no short cut, and compute while all others wait. Whoever shares a mask with one of them
makes it, too.
"""

from __future__ import annotations

import functools
import multiprocessing
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.protocol import issue_identity, mint_token, public_bytes
from archipel.protocol.sealed import encode
from archipel.protocol.secagg_plus import participant
from archipel.protocol.secagg_plus.links import Link
from archipel.protocol.secagg_plus.messages import Inbox, Inclusions, Invitation, Neighbours, Partners, Question
from archipel.protocol.secagg_plus.messages import pack as pack_message
from archipel.protocol.secagg_plus.messages import unpack as unpack_message
from archipel.protocol.secagg_plus.participant import Participant, Terms
from archipel.protocol.vector import pack

POPULATION = "benchmark"
VALUE_BITS = 16
MESSAGES = {"draw": Invitation, "deal": Neighbours, "receive": Inbox, "confirm": Question}

Messages = dict[int, bytes]


@dataclass
class Roles:
    """Places of those that leave after dealing, and of those whose time is taken; the device's number by place."""

    leaving: frozenset[int] = frozenset()
    timed: frozenset[int] = frozenset()
    numbers: Mapping[int, int] = field(default_factory=dict)


class Devices:
    """So many devices in `workers` processes. Use as a context manager.

    A method raises EOFError where a device fails; its worker says on standard error why.
    """

    def __init__(self, count: int, entries: int, terms: Terms, every_mask: bool, workers: int) -> None:
        self._enrolment = Ed25519PrivateKey.generate()
        self._roles = Roles()
        forking = multiprocessing.get_context("fork")
        self._connections: list[Connection] = []
        for number in range(workers):
            here, there = forking.Pipe()
            given = (there, terms, entries, every_mask, self._enrolment, range(number, count, workers))
            forking.Process(target=_work, args=given, daemon=True).start()
            there.close()
            self._connections.append(here)

    @property
    def enrolment_key(self) -> bytes:
        return public_bytes(self._enrolment)

    def __enter__(self) -> Devices:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()

    def enrol(self) -> Messages:
        """The JSON of each device's chain of certificates, by its number, as a server keeps it after enrolment."""
        return self._all("enrol", [None] * len(self._connections))

    def advertise(self) -> Messages:
        """The member of each device, by its number."""
        return self._all("advertise", [None] * len(self._connections))

    def set_roles(self, roles: Roles) -> None:
        self._roles = roles
        for connection in self._connections:
            connection.send(("roles", roles))
            connection.recv()

    def ask(self, step: str, messages: Messages) -> Messages:
        """What the devices at these places reply. Those whose time is taken do so first, one after the other."""
        found: Messages = {}
        for place in sorted(set(messages) & self._roles.timed):
            connection = self._connections[self._worker(place)]
            connection.send((step, {place: messages[place]}))
            found |= connection.recv()
        parts: list[Messages] = [{} for _ in self._connections]
        for place in messages.keys() - self._roles.timed:
            parts[self._worker(place)][place] = messages[place]
        return found | self._all(step, parts)

    def seconds(self) -> list[tuple[float, float]]:
        """Of each timed device: by the clock, and of the processor."""
        return [*self._all("seconds", [None] * len(self._connections)).values()]

    def plain_sum(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Of the vectors that were sent, modulo 2^32."""
        sums = []
        for connection in self._connections:
            connection.send(("sum", None))
            sums.append(connection.recv())
        return sum(sums[1:], start=sums[0])

    def _worker(self, place: int) -> int:
        return self._roles.numbers[place] % len(self._connections)

    def _all(self, step: str, parts: Iterable[Any]) -> dict[int, Any]:
        asked = [(c, part) for c, part in zip(self._connections, parts) if part != {}]
        for connection, part in asked:
            connection.send((step, part))
        return functools.reduce(dict.__or__, [connection.recv() for connection, _ in asked], {})


class _Device(Participant):
    """A participant that leaves out masks which cancel, and knows what its steps took."""

    shared: frozenset[int] | None = None
    """The places with which it makes masks; None: all that it should."""
    place = -1
    seconds = processor = 0.0

    def _remaining(self, partners: Partners) -> list[Link]:
        everybody = super()._remaining(partners)
        if self.shared is None:
            return everybody
        return [link for link in everybody if link.place in self.shared]


class _Worker:
    def __init__(
        self, terms: Terms, entries: int, every_mask: bool, enrolment: Ed25519PrivateKey, numbers: Iterable[int]
    ) -> None:
        self._terms, self._entries, self._every_mask, self._enrolment = terms, entries, every_mask, enrolment
        self._numbers, self._roles = numbers, Roles()
        self._devices: dict[int, _Device] = {}
        self._sum = np.zeros(entries, np.uint32)
        self._checks = participant.read_member, participant.check_sizes
        self._cached = functools.cache(participant.read_member), functools.cache(participant.check_sizes)

    def do(self, step: str, given: Any) -> Any:
        match step:
            case "enrol":
                return {number: self._enrol(number) for number in self._numbers}
            case "advertise":
                return {number: self._advertise(self._devices[number]) for number in self._numbers}
            case "roles":
                return self._take_roles(given)
            case "seconds":
                timed = self._roles.timed & self._devices.keys()
                return {place: (self._devices[place].seconds, self._devices[place].processor) for place in timed}
            case "sum":
                return self._sum
        return {place: self._step(self._devices[place], step, message) for place, message in given.items()}

    def _enrol(self, number: int) -> bytes:
        seed, identity = secrets.token_bytes(32), Ed25519PrivateKey.generate()
        token = mint_token(self._enrolment, population=POPULATION, not_after=2**33, seed=seed)
        chain = issue_identity(seed, token, public_bytes(identity))
        began = time.perf_counter(), time.process_time()
        device = _Device(self._terms, identity, chain, public_bytes(self._enrolment), secrets.token_bytes)
        _spend(device, began)
        self._devices[number] = device
        return encode(chain)

    def _advertise(self, device: _Device) -> bytes:
        began = time.perf_counter(), time.process_time()
        member = device.advertise()
        _spend(device, began)
        return member

    def _take_roles(self, roles: Roles) -> None:
        self._roles = roles
        by_number, self._devices = self._devices, {}
        for place, number in roles.numbers.items():
            if number in by_number:
                device = self._devices[place] = by_number[number]
                device.place = place
                if not self._every_mask and place not in roles.timed:
                    device.shared = roles.leaving | roles.timed

    def _step(self, device: _Device, step: str, message: bytes) -> bytes:
        timed = device.place in self._roles.timed
        participant.read_member, participant.check_sizes = self._checks if timed else self._cached
        vector = None
        if step == "mask":
            drawn = np.random.default_rng(device.place)
            vector = drawn.integers(0, 1 << VALUE_BITS, self._entries, np.uint32)
            self._sum += vector
        began = time.perf_counter(), time.process_time()
        match step:
            case "mask":
                masked = device.mask(vector, unpack_message(message, Partners))
                reply = pack(masked, self._terms.modulus_bits)
            case "answer":
                question, inclusions = divide(message)
                given = [unpack_message(inclusions, Inclusions)] if inclusions else []
                reply = pack_message(device.answer(unpack_message(question, Question), *given))
            case _:
                reply = pack_message(getattr(device, step)(unpack_message(message, MESSAGES[step])))
        _spend(device, began)
        return reply


def join(question: bytes, inclusions: bytes = b"") -> bytes:
    """Both messages of the last step as one, for the pipe."""
    return len(question).to_bytes(4, "big") + question + inclusions


def divide(joined: bytes) -> tuple[bytes, bytes]:
    stop = 4 + int.from_bytes(joined[:4], "big")
    return joined[4:stop], joined[stop:]


def _spend(device: _Device, began: tuple[float, float]) -> None:
    device.seconds += time.perf_counter() - began[0]
    device.processor += time.process_time() - began[1]


def _work(connection: Connection, *given: Any) -> None:
    worker = _Worker(*given)
    while True:
        try:
            step, message = connection.recv()
        except EOFError:
            return
        connection.send(worker.do(step, message))
