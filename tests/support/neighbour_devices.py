"""Devices that speak the protocol of rounds over neighbours, each step of a round one call."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from archipel.bundle import open_bundle
from archipel.bundle.manifest import PrivacyPolicy
from archipel.protocol import messages
from archipel.protocol.policy import plan_digest
from archipel.protocol.sealed import public_bytes, unseal
from archipel.protocol.secagg_plus import messages as packed
from archipel.protocol.secagg_plus.choosing import spoken
from archipel.protocol.secagg_plus.participant import Participant
from archipel.protocol.secagg_plus.terms import Terms, terms_of
from tests.support.devices import Device
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World

M = TypeVar("M", bound=packed.Packed)


def policy_of(server: str) -> dict[str, Any]:
    """For cohorts of eight to twelve, of which a quarter may leave."""
    return {"protocols": ("complete", "neighbours", "neighbours-mlkem"), "server": server, "dropouts": 0.25}


class NeighbourDevice(Device):
    """Takes part in rounds over neighbours. `policy` is the one of the bundle."""

    policy: PrivacyPolicy
    over: Participant
    terms: Terms
    question: packed.Question

    def join(self) -> bool:
        sealed = self.check_in()
        if sealed is None:
            return False
        self.plan = unseal("plan", sealed, self.server_key, messages.RoundPlan)
        self.terms = terms_of(self.plan, plan_digest(sealed), self.policy)
        self.over = Participant(
            self.terms, self.key, self.chain, public_bytes(self.keys.enrolment), secrets.token_bytes
        )
        return True

    def fetch(self, method: str, path: str, kind: type[M], body: packed.Packed | None = None) -> M:
        status, data = self.try_fetch(method, path, body)
        assert status == 200, (method, path, status, data)
        return packed.unpack(data, kind)

    def try_fetch(self, method: str, path: str, body: packed.Packed | None = None) -> tuple[int, bytes]:
        sent = None if body is None else packed.pack(body)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/msgpack"}
        return self.transport(method, f"{self.round}/{path}", sent, headers)

    def send(self, path: str, body: packed.Packed | bytes) -> tuple[int, Any]:
        """The status and the JSON of the answer."""
        data = body if isinstance(body, bytes) else packed.pack(body)
        return self.call("PUT", f"{self.round}/{path}", data, {"Content-Type": "application/msgpack"})

    def put(self, path: str, body: packed.Packed | bytes) -> None:
        status, answer = self.send(path, body)
        assert status == 200, (path, status, answer)

    def advertising(self) -> None:
        self.put("member", self.over.advertise())

    def draw(self) -> packed.Neighbours:
        drawn = self.over.draw(self.fetch("GET", "invitation", packed.Invitation))
        return self.fetch("POST", "neighbours", packed.Neighbours, drawn)

    def sharing(self) -> None:
        self.put("dealt", self.over.deal(self.draw()))

    def complaining(self) -> None:
        self.put("refused", self.over.receive(self.fetch("GET", "inbox", packed.Inbox)))

    def masking(self) -> None:
        partners = self.fetch("GET", "partners", packed.Partners)
        assert self.plan is not None
        self.masked = self.pack(self.over.mask(self.vector, partners))
        self.upload(self.masked)

    def confirming(self) -> None:
        self.question = self.fetch("GET", "question", packed.Question)
        self.put("inclusions", self.over.confirm(self.question))

    def unmasking(self) -> None:
        self.put("answer", self.last_answer())

    def last_answer(self) -> packed.Answer:
        return self.over.answer(self.question, self.fetch("GET", "inclusions", packed.Inclusions))


def use_bundle(world: World, folder: Path, server: str = "malicious") -> PrivacyPolicy:
    """Have the world publish a bundle whose policy allows these rounds; returns the policy."""
    world.bundle_file = make_bundle(folder, world.keys.publisher, name=f"over-{server}", policy=policy_of(server))
    return open_bundle(world.bundle_file, world.settings.trusted_keys).manifest.privacy


def create_task(
    world: World, folder: Path, server: str = "malicious", **settings: Any
) -> tuple[dict[str, Any], PrivacyPolicy]:
    """A task over neighbours with a bundle of its own, and the bundle's policy."""
    policy = use_bundle(world, folder, server)
    return world.create_task(**{"cohort": 10, "threshold": None, "protocol": "neighbours", **settings}), policy


def add_devices(world: World, count: int, policy: PrivacyPolicy) -> list[NeighbourDevice]:
    """Enrolled, with a session, and a vector of small numbers each."""
    generator, added = np.random.default_rng(7), []
    for _ in range(count):
        device = NeighbourDevice(world.transport, world.keys, world.settings.public_key)
        device.enrol().open_session()
        device.policy, device.protocols = policy, spoken()
        update = np.append(generator.integers(-3000, 3000, 8), 4096)
        # Modulo the plan's 24 bits.
        device.vector = (update.astype(np.int64) % 2**24).astype(np.uint32)
        added.append(device)
    world.devices += added
    return added
