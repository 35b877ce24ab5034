"""A secure round in memory: devices, their keys, and a server that only passes messages on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.protocol import (
    Participant,
    Sealed,
    add_masked,
    issue_identity,
    mint_token,
    plan_digest,
    public_bytes,
    seal,
    unmask_sum,
)
from archipel.protocol.messages import (
    Chain,
    Cohort,
    Confirmations,
    Confirmed,
    EncryptedShare,
    Member,
    RoundPlan,
    Shares,
    Survivors,
    Unmasking,
)


def fixed(name: str, count: int = 32) -> bytes:
    return hashlib.shake_256(b"archipel tests: " + name.encode()).digest(count)


def signing_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(fixed(name))


def stream(name: str) -> Callable[[int], bytes]:
    calls = iter(range(1 << 30))
    return lambda count: fixed(f"{name}/{next(calls)}", count)


def make_plan(**changes: object) -> RoundPlan:
    fields: dict[str, object] = {
        "round_id": fixed("round", 16).hex(), "task_id": fixed("task", 16).hex(), "number": 1,
        "bundle": fixed("bundle").hex(), "weights": fixed("weights").hex(), "privacy": "secure", "min_cohort": 2,
        "max_cohort": 5, "threshold": 3, "modulus_bits": 24,
    }  # fmt: skip
    return RoundPlan(**{**fields, **changes})  # type: ignore[arg-type]


class Round:
    """`count` devices with one vector each. Methods take the indexes of the devices that act."""

    def __init__(self, count: int = 5, *, length: int = 20, name: str = "round", **plan: object) -> None:
        self.count = count
        self.enrolment = signing_key("enrolment")
        self.enrolment_key = public_bytes(self.enrolment)
        self.plan = make_plan(**{"max_cohort": count, "threshold": count // 2 + 1, **plan})
        self.sealed_plan = seal("plan", self.plan, signing_key("server"))
        self.digest = plan_digest(self.sealed_plan)
        self.keys = [signing_key(f"device {i}") for i in range(count)]
        self.chains = [self.chain(i) for i in range(count)]
        self.devices = [self.participant(i, name) for i in range(count)]
        self.ids = [device.device_id for device in self.devices]
        bits = self.plan.modulus_bits
        self.vectors = [
            np.frombuffer(fixed(f"{name} vector {i}", 4 * length), "<u4").astype(np.uint32) & np.uint32(2**bits - 1)
            for i in range(count)
        ]
        self.advertisements: dict[int, Sealed] = {}
        self.sent: dict[int, Shares] = {}
        self.masked: dict[int, np.ndarray] = {}

    def chain(self, index: int, *, enrolment: str = "enrolment", token: int | None = None, **certificate: str) -> Chain:
        seed = fixed(f"token {index if token is None else token}")
        fields = {"population": "pupils", "kind": "device", **certificate}
        sealed = mint_token(signing_key(enrolment), not_after=2_000_000_000, seed=seed, **fields)  # type: ignore[arg-type]
        return issue_identity(seed, sealed, public_bytes(signing_key(f"device {index}")))

    def participant(self, index: int, name: str) -> Participant:
        return Participant(
            self.plan, self.digest, self.keys[index], self.chains[index], self.enrolment_key, stream(f"{name} {index}")
        )

    def advertise(self, who: Iterable[int] | None = None) -> Cohort:
        for i in self.everyone(who):
            self.advertisements[i] = self.devices[i].advertise()
        self.cohort = Cohort(
            members=[Member(chain=self.chains[i], advertisement=ad) for i, ad in self.advertisements.items()]
        )
        return self.cohort

    def share(self, who: Iterable[int] | None = None) -> None:
        for i in self.everyone(who):
            self.sent[i] = self.devices[i].share(self.cohort)

    def inbox(self, recipient: int) -> Shares:
        return Shares(
            shares=[
                EncryptedShare(peer=self.ids[i], ciphertext=share.ciphertext)
                for i, shares in self.sent.items()
                for share in shares.shares
                if share.peer == self.ids[recipient]
            ]
        )

    def mask(self, who: Iterable[int] | None = None) -> None:
        for i in self.everyone(who):
            self.masked[i] = self.devices[i].mask(self.vectors[i], self.inbox(i))

    @property
    def survivors(self) -> Survivors:
        return Survivors(devices=sorted(self.ids[i] for i in self.masked))

    def confirm(self, who: Iterable[int] | None = None) -> Confirmations:
        return Confirmations(
            confirmations=[
                Confirmed(device=self.ids[i], confirmation=self.devices[i].confirm(self.survivors))
                for i in self.everyone(who)
            ]
        )

    def unmask(self, confirmations: Confirmations, who: Iterable[int] | None = None) -> dict[str, Unmasking]:
        return {self.ids[i]: self.devices[i].unmask(confirmations) for i in self.everyone(who)}

    @property
    def total(self) -> np.ndarray:
        total = np.zeros_like(self.vectors[0])
        for masked in self.masked.values():
            add_masked(total, masked, self.plan.modulus_bits)
        return total

    def sum(self, answers: dict[str, Unmasking]) -> np.ndarray:
        return unmask_sum(
            self.total, plan=self.plan, cohort=self.cohort, sharers=[self.ids[i] for i in self.sent],
            survivors=self.survivors.devices, answers=answers,
        )  # fmt: skip

    def plain_sum(self) -> list[int]:
        """Of the survivors, in Python's integers."""
        columns = zip(*(self.vectors[i].tolist() for i in self.masked))
        return [sum(column) % 2**self.plan.modulus_bits for column in columns]

    def everyone(self, who: Iterable[int] | None) -> list[int]:
        return list(range(self.count) if who is None else who)


@pytest.fixture
def make_round() -> type[Round]:
    return Round


@pytest.fixture(name="make_plan")
def _make_plan() -> Callable[..., RoundPlan]:
    return make_plan


@pytest.fixture(name="fixed")
def _fixed() -> Callable[..., bytes]:
    return fixed


@pytest.fixture(name="signing_key")
def _signing_key() -> Callable[[str], Ed25519PrivateKey]:
    return signing_key
