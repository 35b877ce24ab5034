"""One secure round in full, and every message in it that must be refused: what vectors/protocol/round.json holds."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from vector_inputs import Json, Stream, fixed, flip, plain, signing_key

from archipel.protocol import (
    Participant,
    add_masked,
    cohort_digest,
    issue_identity,
    mint_token,
    plan_digest,
    public_bytes,
    seal,
    survivors_digest,
    unmask_sum,
)
from archipel.protocol.messages import (
    Advertisement,
    Chain,
    Cohort,
    Confirmation,
    Confirmations,
    Confirmed,
    EncryptedShare,
    Member,
    RevealedShare,
    RoundPlan,
    Shares,
    Survivors,
    Unmasking,
)
from archipel.protocol.secagg import shamir


class Session:
    """One secure round of five devices with threshold 3: the last sends its shares, but no vector."""

    bits = 24
    length = 6

    def __init__(self) -> None:
        self.enrolment, self.server = signing_key("enrolment"), signing_key("server")
        self.plan = RoundPlan(
            round_id=fixed("round", 16).hex(), task_id=fixed("task", 16).hex(), number=1, bundle=fixed("bundle").hex(),
            weights=fixed("weights").hex(), privacy="secure", min_cohort=3, max_cohort=5, threshold=3,
            modulus_bits=self.bits,
        )  # fmt: skip
        self.sealed_plan = seal("plan", self.plan, self.server)
        self.digest = plan_digest(self.sealed_plan)
        self.streams = [Stream(f"randomness {i}") for i in range(5)]
        self.chains = [self.chain(i) for i in range(5)]
        self.members = [
            Participant(
                self.plan, self.digest, signing_key(f"device {i}"), self.chains[i], public_bytes(self.enrolment),
                self.streams[i],
            )
            for i in range(5)
        ]  # fmt: skip
        self.ids = [member.device_id for member in self.members]
        self.vectors = [
            np.frombuffer(fixed(f"vector {i}", 4 * self.length), "<u4").astype(np.uint32) & np.uint32(0xFFFF)
            for i in range(5)
        ]
        self.advertisements = [member.advertise() for member in self.members]
        self.cohort = Cohort(
            members=[Member(chain=c, advertisement=a) for c, a in zip(self.chains, self.advertisements)]
        )
        self.shares = [member.share(self.cohort) for member in self.members]
        self.inboxes = [self.inbox(device) for device in self.ids]
        self.masked = [self.members[i].mask(self.vectors[i], self.inboxes[i]) for i in range(4)]
        self.survivors = Survivors(devices=sorted(self.ids[:4]))
        signed = [member.confirm(self.survivors) for member in self.members[:4]]
        self.confirmations = Confirmations(
            confirmations=[Confirmed(device=d, confirmation=s) for d, s in zip(self.ids, signed)]
        )
        self.answers = {self.ids[i]: self.members[i].unmask(self.confirmations) for i in range(4)}
        self.total = np.zeros(self.length, np.uint32)
        for masked in self.masked:
            add_masked(self.total, masked, self.bits)
        self.sum = self.unmask(self.answers)

    def chain(self, index: int, enrolment: str = "enrolment", token: int | None = None) -> Chain:
        seed = fixed(f"token {index if token is None else token}")
        certificate = mint_token(signing_key(enrolment), population="pupils", not_after=2_000_000_000, seed=seed)
        return issue_identity(seed, certificate, public_bytes(signing_key(f"device {index}")))

    def inbox(self, recipient: str) -> Shares:
        return Shares(
            shares=[
                EncryptedShare(peer=sender, ciphertext=share.ciphertext)
                for sender, sent in zip(self.ids, self.shares)
                for share in sent.shares
                if share.peer == recipient
            ]
        )

    def unmask(self, answers: dict[str, Unmasking]) -> np.ndarray:
        return unmask_sum(
            self.total, plan=self.plan, cohort=self.cohort, sharers=self.ids, survivors=self.survivors.devices,
            answers=answers,
        )  # fmt: skip


def round_vectors() -> Json:
    session = Session()
    devices = [
        {
            "device_id": session.ids[i],
            "identity_seed": fixed(f"device {i}").hex(),
            "randomness": fixed(f"randomness {i}", session.streams[i].drawn).hex(),
            "chain": plain(session.chains[i]),
            "advertisement": plain(session.advertisements[i]),
            "shares": plain(session.shares[i]),
            "inbox": plain(session.inboxes[i]),
            "vector": session.vectors[i].tolist(),
            "masked": session.masked[i].tolist() if i < 4 else None,
            "answer": plain(session.answers[session.ids[i]]) if i < 4 else None,
        }
        for i in range(5)
    ]
    return {
        "enrolment_key": public_bytes(session.enrolment).hex(),
        "server_key": public_bytes(session.server).hex(),
        "sealed_plan": plain(session.sealed_plan),
        "plan_digest": session.digest,
        "devices": devices,
        "cohort": plain(session.cohort),
        "cohort_digest": cohort_digest(session.cohort),
        "survivors": plain(session.survivors),
        "survivors_digest": survivors_digest(session.survivors),
        "confirmations": plain(session.confirmations),
        "masked_sum": session.total.tolist(),
        "sum": session.sum.tolist(),
        "device_failures": [
            # The first device runs the good steps before `step`, then gets `message` and must refuse it.
            {"name": name, "step": step, "message": plain(message), "error": error}
            for step, make in (("share", _bad_cohorts), ("mask", _bad_inboxes), ("confirm", _bad_survivors),
                               ("unmask", _bad_confirmations))
            for name, message, error in make(session)
        ],
        "server_failures": [
            {"name": n, "answers": {d: plain(a) for d, a in answers.items()}, "error": error, "devices": blamed}
            for n, answers, error, blamed in _bad_answers(session)
        ],
    }  # fmt: skip


Failure = tuple[str, msgspec.Struct, str]


def _bad_cohorts(session: Session) -> list[Failure]:
    members = session.cohort.members
    key = signing_key("device 1")
    body = msgspec.json.decode(members[1].advertisement.body, type=Advertisement)

    def second(**changes: Any) -> Cohort:
        return Cohort(members=[members[0], msgspec.structs.replace(members[1], **changes), *members[2:]])

    def advertised(**changes: str | bytes) -> Cohort:
        return second(advertisement=seal("advertisement", msgspec.structs.replace(body, **changes), key))

    tampered = msgspec.structs.replace(members[1].advertisement, signature=flip(members[1].advertisement.signature))
    first = msgspec.json.decode(members[0].advertisement.body, type=Advertisement)
    return [
        ("member_not_enrolled", second(chain=session.chain(1, enrolment="server")), "CertificateError"),
        ("tampered_advertisement", second(advertisement=tampered), "CertificateError"),
        ("advertisement_by_another_device", second(advertisement=members[2].advertisement), "CertificateError"),
        ("advertisement_of_another_round", advertised(round_id=fixed("other", 16).hex()), "SecureAggregationError"),
        ("advertisement_for_another_plan", advertised(plan=fixed("other").hex()), "SecureAggregationError"),
        ("cipher_key_is_mask_key", advertised(cipher_key=body.mask_key), "SecureAggregationError"),
        ("mask_key_of_another_device", advertised(mask_key=first.mask_key), "ConsistencyError"),
        ("cipher_key_of_order_1", advertised(cipher_key=bytes(32)), "SecureAggregationError"),
        ("token_used_twice", second(chain=session.chain(1, token=2)), "ConsistencyError"),
        ("member_twice", Cohort(members=[*members[:4], members[3]]), "ConsistencyError"),
        ("own_device_missing", Cohort(members=members[1:]), "ConsistencyError"),
        ("too_few", Cohort(members=members[:2]), "ThresholdError"),
    ]


def _bad_inboxes(session: Session) -> list[Failure]:
    shares = session.inboxes[0].shares
    flipped = msgspec.structs.replace(shares[1], ciphertext=flip(shares[1].ciphertext))
    shorter = msgspec.structs.replace(shares[1], ciphertext=shares[1].ciphertext[:-1])
    misattributed = msgspec.structs.replace(shares[1], peer=shares[0].peer)
    stranger = msgspec.structs.replace(shares[1], peer=fixed("stranger", 16).hex())
    reflected = msgspec.structs.replace(shares[0], ciphertext=session.shares[0].shares[0].ciphertext)
    return [
        ("tampered_envelope", Shares(shares=[shares[0], flipped, *shares[2:]]), "ShareError"),
        ("short_envelope", Shares(shares=[shares[0], shorter, *shares[2:]]), "ShareError"),
        ("envelope_of_another_sender", Shares(shares=[misattributed, *shares[2:]]), "ShareError"),
        ("own_envelope_returned", Shares(shares=[reflected, *shares[1:]]), "ShareError"),
        ("envelope_for_another_recipient", session.inboxes[1], "ShareError"),
        ("unknown_sender", Shares(shares=[*shares, stranger]), "ShareError"),
        ("sender_twice", Shares(shares=[*shares, shares[0]]), "ShareError"),
        ("too_few", Shares(shares=shares[:1]), "ThresholdError"),
    ]


def _bad_survivors(session: Session) -> list[Failure]:
    devices = session.survivors.devices
    own = session.ids[0]
    others = sorted(session.ids[1:])
    return [
        ("not_sorted", Survivors(devices=devices[::-1]), "ConsistencyError"),
        ("survivor_twice", Survivors(devices=[devices[0], *devices]), "ConsistencyError"),
        ("stranger", Survivors(devices=sorted([*devices, fixed("stranger", 16).hex()])), "ConsistencyError"),
        ("own_device_missing", Survivors(devices=others), "ConsistencyError"),
        ("too_few", Survivors(devices=sorted([own, others[0]])), "ThresholdError"),
    ]


def _bad_confirmations(session: Session) -> list[Failure]:
    good = session.confirmations.confirmations
    body = msgspec.json.decode(good[1].confirmation.body)

    def second(**changes: str) -> Confirmations:
        sealed = seal("confirmation", msgspec.convert({**body, **changes}, Confirmation), signing_key("device 1"))
        return Confirmations(confirmations=[good[0], Confirmed(device=good[1].device, confirmation=sealed), *good[2:]])

    fewer = Survivors(devices=sorted(session.ids[:3]))
    swapped = Confirmed(device=good[1].device, confirmation=good[2].confirmation)
    dropped = Confirmed(device=session.ids[4], confirmation=good[1].confirmation)
    return [
        ("other_survivors", second(survivors=survivors_digest(fewer)), "ConsistencyError"),
        ("another_round", second(round_id=fixed("other", 16).hex()), "SecureAggregationError"),
        ("another_attempt_at_the_round", second(cohort=fixed("other").hex()), "SecureAggregationError"),
        ("signed_by_another_device", Confirmations(confirmations=[good[0], swapped, *good[2:]]), "CertificateError"),
        ("by_a_dropped_device", Confirmations(confirmations=[*good, dropped]), "ConsistencyError"),
        ("one_device_twice", Confirmations(confirmations=[good[0], good[0], good[1]]), "ConsistencyError"),
        ("too_few", Confirmations(confirmations=good[:2]), "ThresholdError"),
    ]


def _bad_answers(session: Session) -> list[tuple[str, dict[str, Unmasking], str, list[str]]]:
    ids, good = session.ids, session.answers
    victim = good[ids[1]]

    def second(**changes: list[RevealedShare]) -> dict[str, Unmasking]:
        return {**good, ids[1]: msgspec.structs.replace(victim, **changes)}

    def with_share(revealed: list[RevealedShare], share: bytes) -> list[RevealedShare]:
        return [RevealedShare(device=revealed[0].device, share=share), *revealed[1:]]

    beyond = shamir.PRIME.to_bytes(33, "big")
    both = [*victim.mask_keys, RevealedShare(device=ids[0], share=victim.self_seeds[0].share)]
    exact = {device: second(mask_keys=with_share(victim.mask_keys, bytes(33)))[device] for device in ids[:3]}
    return [
        ("too_few_answers", {device: good[device] for device in ids[:2]}, "ThresholdError", []),
        ("wrong_share_of_a_seed", second(self_seeds=with_share(victim.self_seeds, bytes(33))), "ShareError", []),
        ("wrong_share_of_a_mask_key", second(mask_keys=with_share(victim.mask_keys, bytes(33))), "ShareError", []),
        ("wrong_share_without_surplus", exact, "ShareError", []),
        ("share_not_below_the_prime", second(mask_keys=with_share(victim.mask_keys, beyond)), "ShareError", [ids[1]]),
        ("both_shares_of_one_device", second(mask_keys=both), "ShareError", [ids[1]]),
        ("a_seed_is_missing", second(self_seeds=victim.self_seeds[1:]), "ShareError", [ids[1]]),
        ("answer_of_a_dropped_device", {**good, ids[4]: victim}, "ConsistencyError", []),
    ]
