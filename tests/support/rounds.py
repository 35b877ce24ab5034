"""A secure round in memory: devices, their keys, and a server that only passes messages on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.protocol import (
    Participant,
    add_masked,
    issue_identity,
    mint_token,
    plan_digest,
    public_bytes,
    seal,
    unmask_sum,
)
from archipel.protocol.identity import read_chain
from archipel.protocol.messages import (
    AdvertiseRequest,
    Chain,
    Cohort,
    Complaints,
    Confirmations,
    Confirmed,
    EncryptedShare,
    Member,
    RoundPlan,
    Shares,
    Survivors,
    Unmasking,
)
from archipel.protocol.secagg import KeyTree, hand_out_keys, merge_complaints, read_session
from archipel.protocol.secagg.envelope import sign_envelope


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
        self.requests: dict[int, AdvertiseRequest] = {}
        self.sent: dict[int, Shares] = {}
        self.complaints: dict[int, Complaints] = {}
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
            self.requests[i] = self.devices[i].advertise()
        self.cohort = Cohort(members=[self.member(i) for i in self.requests])
        return self.cohort

    def member(self, index: int) -> Member:
        return Member(chain=self.chains[index], advertisement=self.requests[index].advertisement)

    def cohort_for(self, index: int) -> Cohort:
        """The cohort as the server tells it to one of its members."""
        trees = {
            read_chain(member.chain)[0]: KeyTree(request.envelope_keys, self.plan.max_cohort)
            for member in self.cohort.members
            for request in self.requests.values()
            if request.advertisement == member.advertisement
        }
        return msgspec.structs.replace(self.cohort, keys=hand_out_keys(trees, self.ids[index]))

    def share(self, who: Iterable[int] | None = None) -> None:
        for i in self.everyone(who):
            self.sent[i] = self.devices[i].share(self.cohort_for(i))

    def spoil(self, sender: int, recipients: Iterable[int]) -> None:
        """What `sender` sent to them does not open, and carries its signature all the same."""
        session = read_session(self.cohort, self.plan)
        spoiled = {self.ids[i] for i in recipients}

        def changed(share: EncryptedShare) -> EncryptedShare:
            if share.peer not in spoiled:
                return share
            associated = session.associated(self.ids[sender], share.peer)
            ciphertext = share.ciphertext[:-1] + bytes([share.ciphertext[-1] ^ 1])
            signature = sign_envelope(self.keys[sender], ciphertext, associated)
            return EncryptedShare(peer=share.peer, ciphertext=ciphertext, signature=signature)

        self.sent[sender] = Shares(shares=[changed(share) for share in self.sent[sender].shares])

    def inbox(self, recipient: int) -> Shares:
        return Shares(
            shares=[
                msgspec.structs.replace(share, peer=self.ids[i])
                for i, shares in self.sent.items()
                for share in shares.shares
                if share.peer == self.ids[recipient]
            ]
        )

    def complain(self, who: Iterable[int] | None = None) -> Complaints:
        """Those that have not yet open their shares; the round's complaints."""
        for i in self.everyone(who):
            if i not in self.complaints:
                self.complaints[i] = self.devices[i].complain(self.inbox(i))
        return merge_complaints(self.complaints.values())

    def mask(self, who: Iterable[int] | None = None) -> None:
        complaints = self.complain(who)
        for i in self.everyone(who):
            self.masked[i] = self.devices[i].mask(self.vectors[i], complaints)

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
            self.total, plan=self.plan, cohort=self.cohort, sharers=self.sharers,
            survivors=self.survivors.devices, answers=answers,
        )  # fmt: skip

    @property
    def sharers(self) -> list[str]:
        accused = {complaint.accused for complaint in merge_complaints(self.complaints.values()).complaints}
        return [self.ids[i] for i in self.sent if self.ids[i] not in accused]

    def plain_sum(self) -> list[int]:
        """Of the survivors, in Python's integers."""
        columns = zip(*(self.vectors[i].tolist() for i in self.masked))
        return [sum(column) % 2**self.plan.modulus_bits for column in columns]

    def everyone(self, who: Iterable[int] | None) -> list[int]:
        return list(range(self.count) if who is None else who)
