"""One secure round in full, and every message in it that must be refused: what vectors/protocol/round.json holds."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

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
    Complaint,
    Complaints,
    Confirmation,
    Confirmations,
    Confirmed,
    EncryptedShare,
    EnvelopeKey,
    Member,
    RevealedShare,
    RoundPlan,
    Shares,
    Survivors,
    Unmasking,
)
from archipel.protocol.secagg import (
    KeyTree,
    complaints_digest,
    hand_out_keys,
    keys,
    merge_complaints,
    read_session,
    shamir,
)
from archipel.protocol.secagg.envelope import sign_envelope
from protocol_vectors.inputs import Json, Stream, fixed, flip, plain, signing_key

ORDER_8 = "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"
"""A point of order 8 of Curve25519 (the list of RFC 7748's security considerations, as cr.yp.to/ecdh.html has it)."""


class Session:
    """One secure round of seven devices with threshold 4. The sixth sends its shares, but no vector; the last sends the
    first an envelope that does not open, and is excluded."""

    bits = 24
    length = 6

    def __init__(self) -> None:
        self.enrolment, self.server = signing_key("enrolment"), signing_key("server")
        self.plan = RoundPlan(
            round_id=fixed("round", 16).hex(), task_id=fixed("task", 16).hex(), number=1, bundle=fixed("bundle").hex(),
            weights=fixed("weights").hex(), privacy="secure", min_cohort=3, max_cohort=7, threshold=4,
            modulus_bits=self.bits,
        )  # fmt: skip
        self.sealed_plan = seal("plan", self.plan, self.server)
        self.digest = plan_digest(self.sealed_plan)
        self.streams = [Stream(f"randomness {i}") for i in range(7)]
        self.chains = [self.chain(i) for i in range(7)]
        self.members = [
            Participant(
                self.plan, self.digest, signing_key(f"device {i}"), self.chains[i], public_bytes(self.enrolment),
                self.streams[i],
            )
            for i in range(7)
        ]  # fmt: skip
        self.ids = [member.device_id for member in self.members]
        self.vectors = [
            np.frombuffer(fixed(f"vector {i}", 4 * self.length), "<u4").astype(np.uint32) & np.uint32(0xFFFF)
            for i in range(7)
        ]
        self.advertised = [member.advertise() for member in self.members]
        self.cohort = Cohort(
            members=[Member(chain=c, advertisement=a.advertisement) for c, a in zip(self.chains, self.advertised)]
        )
        self.session = read_session(self.cohort, self.plan)
        trees = {name: KeyTree(ad.envelope_keys, 7) for name, ad in zip(self.ids, self.advertised)}
        self.cohorts = [msgspec.structs.replace(self.cohort, keys=hand_out_keys(trees, name)) for name in self.ids]
        self.shares = [member.share(cohort) for member, cohort in zip(self.members, self.cohorts)]
        self.shares[6] = self.spoil(self.shares[6])
        self.inboxes = [self.inbox(device) for device in self.ids]
        self.complained = [self.members[i].complain(self.inboxes[i]) for i in range(6)]
        self.complaints = merge_complaints(self.complained)
        self.masked = [self.members[i].mask(self.vectors[i], self.complaints) for i in range(5)]
        self.survivors = Survivors(devices=sorted(self.ids[:5]))
        signed = [member.confirm(self.survivors) for member in self.members[:5]]
        self.confirmations = Confirmations(
            confirmations=[Confirmed(device=d, confirmation=s) for d, s in zip(self.ids, signed)]
        )
        self.answers = {self.ids[i]: self.members[i].unmask(self.confirmations) for i in range(5)}
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
                msgspec.structs.replace(share, peer=sender)
                for sender, sent in zip(self.ids, self.shares)
                for share in sent.shares
                if share.peer == recipient
            ]
        )

    def signed(self, sender: int, recipient: int, ciphertext: bytes) -> EncryptedShare:
        """An envelope from one device to another one, with that signature."""
        associated = self.session.associated(self.ids[sender], self.ids[recipient])
        signature = sign_envelope(signing_key(f"device {sender}"), ciphertext, associated)
        return EncryptedShare(peer=self.ids[recipient], ciphertext=ciphertext, signature=signature)

    def spoil(self, shares: Shares) -> Shares:
        """The last device's, with another envelope for the first: it signs what does not open."""
        return Shares(
            shares=[
                self.signed(6, 0, flip(share.ciphertext)) if share.peer == self.ids[0] else share
                for share in shares.shares
            ]
        )

    def unmask(self, answers: dict[str, Unmasking]) -> np.ndarray:
        return unmask_sum(
            self.total, plan=self.plan, cohort=self.cohort, sharers=self.ids[:6], survivors=self.survivors.devices,
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
            "advertisement": plain(session.advertised[i].advertisement),
            "envelope_keys": session.advertised[i].envelope_keys.hex(),
            "cohort_keys": plain(session.cohorts[i])["keys"],
            "shares": plain(session.shares[i]),
            "inbox": plain(session.inboxes[i]),
            "complaints": plain(session.complained[i]) if i < 6 else None,
            "vector": session.vectors[i].tolist(),
            "masked": session.masked[i].tolist() if i < 5 else None,
            "answer": plain(session.answers[session.ids[i]]) if i < 5 else None,
        }
        for i in range(7)
    ]
    return {
        "enrolment_key": public_bytes(session.enrolment).hex(),
        "server_key": public_bytes(session.server).hex(),
        "sealed_plan": plain(session.sealed_plan),
        "plan_digest": session.digest,
        "devices": devices,
        "cohort": plain(session.cohort),
        "cohort_digest": cohort_digest(session.cohort),
        "complaints": plain(session.complaints),
        "complaints_digest": complaints_digest(session.complaints),
        "survivors": plain(session.survivors),
        "survivors_digest": survivors_digest(session.survivors),
        "confirmations": plain(session.confirmations),
        "masked_sum": session.total.tolist(),
        "sum": session.sum.tolist(),
        "device_failures": [
            # The first device runs the good steps before `step`, then gets `message` and must refuse it.
            {"name": name, "step": step, "message": plain(message), "error": error}
            for step, make in (("share", _bad_cohorts), ("complain", _bad_inboxes), ("mask", _bad_complaints),
                               ("confirm", _bad_survivors), ("unmask", _bad_confirmations))
            for name, message, error in make(session)
        ],
        "server_failures": [
            {"name": n, "answers": {d: plain(a) for d, a in answers.items()}, "error": error, "devices": blamed}
            for n, answers, error, blamed in _bad_answers(session)
        ],
    }  # fmt: skip


Failure = tuple[str, msgspec.Struct, str]


def _bad_cohorts(session: Session) -> list[Failure]:
    members, envelope_keys = session.cohort.members, session.cohorts[0].keys
    key = signing_key("device 1")
    body = msgspec.json.decode(members[1].advertisement.body, type=Advertisement)

    def second(**changes: Any) -> Cohort:
        changed = [members[0], msgspec.structs.replace(members[1], **changes), *members[2:]]
        return Cohort(members=changed, keys=envelope_keys)

    def keyed(keys: list[EnvelopeKey]) -> Cohort:
        return Cohort(members=members, keys=keys)

    def advertised(**changes: str | bytes) -> Cohort:
        return second(advertisement=seal("advertisement", msgspec.structs.replace(body, **changes), key))

    tampered = msgspec.structs.replace(members[1].advertisement, signature=flip(members[1].advertisement.signature))
    swapped = msgspec.structs.replace(envelope_keys[1], peer=envelope_keys[0].peer)
    misplaced = [item for item in session.cohorts[1].keys if item.peer == envelope_keys[0].peer]
    misplaced = misplaced or [item for item in session.cohorts[2].keys if item.peer == envelope_keys[0].peer]
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
        ("mask_key_of_order_8", advertised(mask_key=bytes.fromhex(ORDER_8)), "SecureAggregationError"),
        ("no_envelope_key_of_a_peer", keyed(envelope_keys[1:]), "ConsistencyError"),
        ("envelope_key_twice", keyed([*envelope_keys, envelope_keys[0]]), "ConsistencyError"),
        ("envelope_key_of_another_peer", keyed([swapped, *envelope_keys[1:]]), "ConsistencyError"),
        ("envelope_key_for_another_sender", keyed([*misplaced, *envelope_keys[1:]]), "ConsistencyError"),
        ("token_used_twice", second(chain=session.chain(1, token=2)), "ConsistencyError"),
        ("member_twice", Cohort(members=[*members[:6], members[5]]), "ConsistencyError"),
        ("own_device_missing", Cohort(members=members[1:]), "ConsistencyError"),
        ("too_few", Cohort(members=members[:2]), "ThresholdError"),
    ]


def _bad_inboxes(session: Session) -> list[Failure]:
    shares = session.inboxes[0].shares
    flipped = msgspec.structs.replace(shares[1], ciphertext=flip(shares[1].ciphertext))
    signature = msgspec.structs.replace(shares[1], signature=flip(shares[1].signature))
    misattributed = msgspec.structs.replace(shares[1], peer=shares[0].peer)
    stranger = msgspec.structs.replace(shares[1], peer=fixed("stranger", 16).hex())
    reflected = msgspec.structs.replace(
        shares[0], ciphertext=session.shares[0].shares[0].ciphertext, signature=session.shares[0].shares[0].signature
    )
    return [
        ("tampered_envelope", Shares(shares=[shares[0], flipped, *shares[2:]]), "CertificateError"),
        ("tampered_signature", Shares(shares=[shares[0], signature, *shares[2:]]), "CertificateError"),
        ("envelope_of_another_sender", Shares(shares=[misattributed, *shares[2:]]), "CertificateError"),
        ("own_envelope_returned", Shares(shares=[reflected, *shares[1:]]), "CertificateError"),
        ("envelope_for_another_recipient", session.inboxes[1], "ShareError"),
        ("unknown_sender", Shares(shares=[*shares, stranger]), "ShareError"),
        ("sender_twice", Shares(shares=[*shares, shares[0]]), "ShareError"),
        ("too_few", Shares(shares=shares[:1]), "ThresholdError"),
    ]


def _bad_complaints(session: Session) -> list[Failure]:
    (good,) = session.complaints.complaints
    sender = session.ids.index(good.accused)
    honest = next(share for share in session.inboxes[0].shares if share.peer == session.ids[1])
    place = session.session.peers[session.ids[1]].place
    # Drawn third: what the first device makes its envelope keys from.
    secret = fixed("randomness 0", 96)[64:]
    own = keys.envelope_private_key(secret, session.session.salt, place)
    tree = KeyTree(session.advertised[0].envelope_keys, 7)
    path = tree.path(place)

    def about(**changes: Any) -> Complaints:
        return Complaints(complaints=[msgspec.structs.replace(good, **changes)])

    def also(**changes: Any) -> Complaints:
        framing = Complaint(
            complainer=session.ids[0], accused=session.ids[1], ciphertext=honest.ciphertext, signature=honest.signature,
            key=own, path=path,
        )  # fmt: skip
        both = [good, msgspec.structs.replace(framing, **changes)]
        return Complaints(complaints=sorted(both, key=lambda complaint: complaint.accused))

    unsigned = session.signed(sender, 1, good.ciphertext).signature
    return [
        ("envelope_that_opens", also(), "ShareError"),
        ("another_key", also(key=good.key), "ShareError"),
        ("another_key_that_was_advertised", also(key=good.key, path=good.path), "ShareError"),
        ("a_key_of_nobody", also(key=keys.clamp(fixed("nobody"))), "ShareError"),
        ("tampered_ciphertext", also(ciphertext=flip(honest.ciphertext)), "CertificateError"),
        ("envelope_for_another_recipient", about(signature=unsigned), "CertificateError"),
        ("key_in_another_spelling", about(key=bytes([good.key[0] | 1]) + good.key[1:]), "ShareError"),
        ("path_too_short", about(path=good.path[:-32]), "ShareError"),
        ("accused_is_no_member", about(accused=fixed("stranger", 16).hex()), "ShareError"),
        ("accuses_itself", about(complainer=good.accused), "ShareError"),
        ("accused_twice", Complaints(complaints=[good, good]), "ConsistencyError"),
        ("own_complaint_missing", Complaints(complaints=[]), "ConsistencyError"),
    ]


def _bad_survivors(session: Session) -> list[Failure]:
    devices = session.survivors.devices
    own = session.ids[0]
    others = sorted(session.ids[1:5])
    excluded = sorted([*devices, session.ids[6]])
    return [
        ("not_sorted", Survivors(devices=devices[::-1]), "ConsistencyError"),
        ("survivor_twice", Survivors(devices=[devices[0], *devices]), "ConsistencyError"),
        ("stranger", Survivors(devices=sorted([*devices, fixed("stranger", 16).hex()])), "ConsistencyError"),
        ("excluded_device", Survivors(devices=excluded), "ConsistencyError"),
        ("own_device_missing", Survivors(devices=others), "ConsistencyError"),
        ("too_few", Survivors(devices=sorted([own, *session.ids[1:3]])), "ThresholdError"),
    ]


def _bad_confirmations(session: Session) -> list[Failure]:
    good = session.confirmations.confirmations
    body = msgspec.json.decode(good[1].confirmation.body)

    def second(**changes: str) -> Confirmations:
        sealed = seal("confirmation", msgspec.convert({**body, **changes}, Confirmation), signing_key("device 1"))
        return Confirmations(confirmations=[good[0], Confirmed(device=good[1].device, confirmation=sealed), *good[2:]])

    fewer = Survivors(devices=sorted(session.ids[:4]))
    swapped = Confirmed(device=good[1].device, confirmation=good[2].confirmation)
    dropped = Confirmed(device=session.ids[5], confirmation=good[1].confirmation)
    return [
        ("other_survivors", second(survivors=survivors_digest(fewer)), "ConsistencyError"),
        ("other_complaints", second(complaints=complaints_digest(Complaints(complaints=[]))), "ConsistencyError"),
        ("another_plan", second(plan=fixed("other").hex()), "SecureAggregationError"),
        ("another_round", second(round_id=fixed("other", 16).hex()), "SecureAggregationError"),
        ("another_attempt_at_the_round", second(cohort=fixed("other").hex()), "SecureAggregationError"),
        ("signed_by_another_device", Confirmations(confirmations=[good[0], swapped, *good[2:]]), "CertificateError"),
        ("by_a_dropped_device", Confirmations(confirmations=[*good, dropped]), "ConsistencyError"),
        ("one_device_twice", Confirmations(confirmations=[good[0], good[0], *good[1:]]), "ConsistencyError"),
        ("too_few", Confirmations(confirmations=good[:3]), "ThresholdError"),
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
    exact = {device: second(mask_keys=with_share(victim.mask_keys, bytes(33)))[device] for device in ids[:4]}
    return [
        ("too_few_answers", {device: good[device] for device in ids[:3]}, "ThresholdError", []),
        ("wrong_share_of_a_seed", second(self_seeds=with_share(victim.self_seeds, bytes(33))), "ShareError", []),
        ("wrong_share_of_a_mask_key", second(mask_keys=with_share(victim.mask_keys, bytes(33))), "ShareError", []),
        ("wrong_share_without_surplus", exact, "ShareError", []),
        ("share_not_below_the_prime", second(mask_keys=with_share(victim.mask_keys, beyond)), "ShareError", [ids[1]]),
        ("both_shares_of_one_device", second(mask_keys=both), "ShareError", [ids[1]]),
        ("a_seed_is_missing", second(self_seeds=victim.self_seeds[1:]), "ShareError", [ids[1]]),
        ("answer_of_a_dropped_device", {**good, ids[5]: victim}, "ConsistencyError", []),
    ]
