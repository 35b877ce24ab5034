"""Bytes from outside: messages and members are read or refused, and nothing else happens."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.errors import ArchipelError, MessageError
from archipel.protocol import public_bytes
from archipel.protocol.secagg_plus import messages
from archipel.protocol.secagg_plus.agreement import KeyAgreement
from archipel.protocol.secagg_plus.alone import Alone
from archipel.protocol.secagg_plus.hybrid import Hybrid
from archipel.protocol.secagg_plus.member import ALONE_BYTES, FULL_BYTES, SHORT_BYTES, read_member, shorten
from archipel.protocol.secagg_plus.messages import Packed, pack, unpack
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes
from tests.support.neighbour_rounds import ENROLMENT, SESSION, NeighbourRound, make_terms

CORPUS = sorted((Path(__file__).parents[1] / "corpus" / "neighbours").glob("*.bin"))
KINDS = [
    kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Packed) and kind != Packed
]


@pytest.fixture(scope="module", params=[Alone, Hybrid], ids=["alone", "hybrid"])
def samples(request: pytest.FixtureRequest) -> list[Packed]:
    """One message of each kind, from a real round."""
    assumed = Assumptions(0, 0.2, "semi-honest", security=1, correctness=1)
    run = NeighbourRound(5, make_terms(Sizes(3, 3, 2), assumed, 5, request.param))
    run.open()
    run.deal(range(1, 5))
    device = run.devices[0]
    found: list[Packed] = [run.roster.invite(0), device.draw(run.roster.invite(0))]
    found.append(run.roster.introduce(0, found[-1]))  # type: ignore[arg-type]
    found.append(device.deal(found[-1]))  # type: ignore[arg-type]
    run.roster.take(0, found[-1])  # type: ignore[arg-type]
    inbox = run.roster.inbox(0)
    found += [inbox, device.receive(inbox)]
    partners = run.roster.pair(0, set(range(5)))
    question = run.roster.ask(0, {0, 1, 2, 3})
    confirmed = device_confirms(run, question)
    return [*found, partners, question, *confirmed]


def device_confirms(run: NeighbourRound, question: messages.Question) -> list[Packed]:
    """What follows a question, made by hand: signatures and shares of the right lengths."""
    return [
        messages.Confirmed(signatures=bytes(64 * len(question.present))),
        messages.Inclusions(neighbours=[1], signatures=bytes(64)),
        messages.Answer(seeds=bytes(36), mask_keys=b"", presence=bytes(64)),
    ]  # fmt: skip


def test_there_is_a_sample_of_every_message(samples: list[Packed]) -> None:
    assert {type(sample) for sample in samples} == set(KINDS)


def test_cut_and_changed_messages_are_read_or_refused(samples: list[Packed]) -> None:
    refused = 0
    for sample in samples:
        data = pack(sample)
        assert unpack(data, type(sample)) == sample
        ends = range(0, len(data), max(1, len(data) // 40))
        changed = [data[:end] for end in ends] + [
            data[:end] + bytes([data[end] ^ 0xFF]) + data[end + 1 :] for end in ends
        ]
        for mutated in changed:
            for kind in (type(sample), *KINDS[:3]):
                try:
                    unpack(mutated, kind)
                except MessageError:
                    refused += 1
    assert refused > 500


@pytest.mark.parametrize(
    ("kind", "fields", "match"),
    [
        (messages.Inbox, ([1, 2], [1], bytes(64), bytes(264)), "positions: expected 2 times 1"),
        (messages.Inbox, ([1, 2], [1, 1], bytes(63), bytes(264)), "cipher_keys: expected 2 times 32"),
        (messages.Inbox, ([1, 2], [1, 1], bytes(64), bytes(265)), "dealt: expected 2 times 132"),
        (messages.Inbox, ([1, 2], [1, 1], bytes(64), bytes(2 * 1220 + 1103)), "dealt: expected 2 times 132"),
        (messages.Inbox, ([1, 2], [1, 1], bytes(64), bytes(2 * 1220 + 3 * 1104)), "dealt: expected 2 times 132"),
        (messages.Inbox, ([1], [0], bytes(32), bytes(132)), ">= 1"),
        (messages.Inbox, ([1 << 16], [1], bytes(32), bytes(132)), "<= 65535"),
        (messages.Partners, ([], [1, 2], bytes(32)), "mask_keys: expected 2 times 32"),
        (messages.Inclusions, ([1], bytes(128)), "signatures: expected 1 times 64"),
    ],
)
def test_columns_of_different_lengths(kind: type[Packed], fields: tuple[object, ...], match: str) -> None:
    with pytest.raises(MessageError, match=match):
        unpack(msgspec.msgpack.encode(fields), kind)


def test_cut_and_changed_members_are_refused() -> None:
    member, key = members_of(Hybrid), public_bytes(ENROLMENT)
    for encoded, size in ((member, FULL_BYTES), (shorten(member), SHORT_BYTES)):
        read_member(encoded, SESSION, key, "plants", keys_bytes=size)
        for at in range(0, len(encoded), 29):
            for mutated in (encoded[:at], encoded[:at] + bytes([encoded[at] ^ 0xFF]) + encoded[at + 1 :]):
                with pytest.raises(ArchipelError):
                    read_member(mutated, SESSION, key, "plants", keys_bytes=size)
                # What a device hashes before it has verified anything.
                with suppress(MessageError):
                    shorten(mutated)


def members_of(agreement: type[KeyAgreement]) -> bytes:
    run = NeighbourRound(3, make_terms(Sizes(2, 2, 2), Assumptions(0, 0.2, security=1, correctness=1), 3, agreement))
    return run.devices[0].advertise()


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_corpus(path: Path) -> None:
    for kind in KINDS:
        with pytest.raises(MessageError):
            unpack(path.read_bytes(), kind)
    for size in (ALONE_BYTES, SHORT_BYTES, FULL_BYTES):
        with pytest.raises(MessageError):
            read_member(path.read_bytes(), SESSION, public_bytes(ENROLMENT), "plants", keys_bytes=size)


@pytest.mark.sampled(every=3)
@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    for kind in KINDS:
        try:
            unpack(data, kind)
        except MessageError:
            continue
    with pytest.raises(ArchipelError):
        read_member(data, SESSION, public_bytes(ENROLMENT), "plants")
