"""What a secure round costs a device besides its vector: bytes of messages and milliseconds of each step.

    python benchmarks/secagg.py [--quick] [--json]

One device of a cohort of 10, 50 and 100, its peers in the same process; a vector of 1000 entries. The column "for
complaints" is what the envelope keys, their paths, the signatures and the phase complaining add.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from measure import arguments, print_alone, state_run

from archipel.protocol import issue_identity, mint_token, plan_digest, public_bytes, seal
from archipel.protocol.messages import (
    Cohort,
    Complaints,
    Confirmations,
    Confirmed,
    Member,
    RoundPlan,
    Shares,
    Survivors,
)  # fmt: skip
from archipel.protocol.sealed import encode
from archipel.protocol.secagg import (
    KeyTree,
    Participant,
    check_advertisement,
    check_envelope_keys,
    check_shares,
    hand_out_keys,
    read_session,
)  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    cohort: int
    step: str
    milliseconds: float
    sent_bytes: int
    received_bytes: int
    bytes_for_complaints: int


def main() -> None:
    options = arguments(__doc__).parse_args()
    state_run(options.json, ("cryptography", "msgspec", "numpy"))
    if not options.json:
        print(f"{'cohort':>6}  {'step':<30}{'ms':>9}{'sent':>10}{'received':>10}{'for complaints':>16}  (bytes)")
    for size in (10, 50) if options.quick else (10, 50, 100):
        rows = [run(size) for _ in range(1 if options.quick else 3)]
        for row in map(_fastest, zip(*rows)):
            if options.json:
                print_alone(
                    "secagg", f"cohort of {row.cohort}, {row.step}", ms=row.milliseconds, bytes_sent=row.sent_bytes,
                    bytes_received=row.received_bytes, bytes_for_complaints=row.bytes_for_complaints,
                )  # fmt: skip
            else:
                print(
                    f"{row.cohort:>6}  {row.step:<30}{row.milliseconds:>9.2f}{row.sent_bytes:>10}"
                    f"{row.received_bytes:>10}{row.bytes_for_complaints:>16}"
                )


def _fastest(rows: tuple[Row, ...]) -> Row:
    return replace(rows[0], milliseconds=round(min(row.milliseconds for row in rows), 2))


def run(size: int) -> list[Row]:
    enrolment, server = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    plan = RoundPlan(
        round_id=secrets.token_hex(16), task_id=secrets.token_hex(16), number=1, bundle="0" * 64, weights="0" * 64,
        privacy="secure", min_cohort=3, max_cohort=size, threshold=size * 2 // 3 + 1, modulus_bits=24,
    )  # fmt: skip
    sealed = seal("plan", plan, server)
    chains, devices, identities = [], [], []
    for _ in range(size):
        seed, identity = secrets.token_bytes(32), Ed25519PrivateKey.generate()
        token = mint_token(enrolment, population="p", not_after=2**33, seed=seed)
        chains.append(issue_identity(seed, token, public_bytes(identity)))
        identities.append(identity)
        devices.append(
            Participant(plan, plan_digest(sealed), identity, chains[-1], public_bytes(enrolment), secrets.token_bytes)
        )
    first, names = devices[0], [device.device_id for device in devices]
    rows: list[Row] = []

    def row(step: str, milliseconds: float, sent: Any = None, received: Any = None, extra: int = 0) -> None:
        size_of = [0 if message is None else len(encode(message)) for message in (sent, received)]
        rows.append(Row(size, step, milliseconds, *size_of, extra))

    def timed(act: Callable[[], T]) -> tuple[T, float]:
        began = time.perf_counter()
        found = act()
        return found, 1e3 * (time.perf_counter() - began)

    sent, taken = timed(first.advertise)
    advertised = [sent, *(device.advertise() for device in devices[1:])]
    without = {**msgspec.to_builtins(sent), "envelope_keys": ""}
    row("advertise", taken, sent, extra=len(encode(sent)) - len(msgspec.json.encode(without)))
    _, taken = timed(lambda: _take_advertisement(sent, identities[0], plan, plan_digest(sealed)))
    row("server: take an advertisement", taken)
    cohort = Cohort(members=[Member(chain=c, advertisement=a.advertisement) for c, a in zip(chains, advertised)])
    trees = {name: KeyTree(each.envelope_keys, size) for name, each in zip(names, advertised)}
    cohorts = [msgspec.structs.replace(cohort, keys=hand_out_keys(trees, name)) for name in names]
    shares, taken = timed(lambda: first.share(cohorts[0]))
    signatures = sum(len(encode(share)) - len(encode(share).replace(_signature(share), b"")) for share in shares.shares)
    row("share", taken, shares, cohorts[0], len(encode(cohorts[0])) - len(encode(cohort)) + signatures)
    session = read_session(cohort, plan)
    _, taken = timed(lambda: check_shares(shares, names[0], session))
    row("server: take shares", taken)
    everybody = [shares, *(device.share(told) for device, told in zip(devices[1:], cohorts[1:]))]

    def inbox(name: str) -> Shares:
        return Shares(
            shares=[
                msgspec.structs.replace(share, peer=sender)
                for sender, each in zip(names, everybody)
                for share in each.shares
                if share.peer == name
            ]
        )

    opened = inbox(names[0])
    complaints, taken = timed(lambda: first.complain(opened))
    row("complain", taken, complaints, opened, signatures + len(encode(complaints)))
    for device in devices[1:]:
        device.complain(inbox(device.device_id))
    vector, none = np.zeros(1000, np.uint32), Complaints(complaints=[])
    _, taken = timed(lambda: first.mask(vector, none))
    row("mask", taken)
    for device in devices[1:]:
        device.mask(vector, none)
    survivors = Survivors(devices=sorted(names))
    confirmation, taken = timed(lambda: first.confirm(survivors))
    signed = [confirmation, *(device.confirm(survivors) for device in devices[1:])]
    row("confirm", taken, confirmation, survivors)
    confirmations = Confirmations(confirmations=[Confirmed(device=d, confirmation=s) for d, s in zip(names, signed)])
    answer, taken = timed(lambda: first.unmask(confirmations))
    row("unmask", taken, answer, confirmations)
    return rows


def _take_advertisement(sent: Any, identity: Any, plan: RoundPlan, digest: str) -> None:
    advertisement = check_advertisement(sent.advertisement, public_bytes(identity), plan.round_id, digest)
    check_envelope_keys(advertisement, sent.envelope_keys, plan.max_cohort)


def _signature(share: Any) -> bytes:
    return b',"signature":"' + base64.b64encode(share.signature) + b'"'


if __name__ == "__main__":
    main()
