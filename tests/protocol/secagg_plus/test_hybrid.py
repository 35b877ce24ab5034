"""Rounds with ML-KEM: the keys by hand, whole rounds, their bytes, and where there is no ML-KEM."""

from __future__ import annotations

import hmac
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel.bundle.manifest import PrivacyPolicy
from archipel.errors import ArchipelError, PolicyError, ShareError
from archipel.protocol.messages import RoundPlan
from archipel.protocol.secagg_plus import kem
from archipel.protocol.secagg_plus.agreement import Draw
from archipel.protocol.secagg_plus.alone import Alone
from archipel.protocol.secagg_plus.choosing import spoken
from archipel.protocol.secagg_plus.hybrid import Hybrid
from archipel.protocol.secagg_plus.member import FULL_BYTES, SHORT_BYTES, read_keys, shorten
from archipel.protocol.secagg_plus.messages import Drawn
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes
from archipel.protocol.secagg_plus.terms import terms_of
from tests.support.ml_kem import ml_kem
from tests.support.neighbour_rounds import SESSION, NeighbourRound, make_terms
from tests.support.rounds import fixed

COUNT = 8
SIZES = Sizes(5, 3, 3)
ASSUMED = Assumptions(0, 0.2, "semi-honest", security=1, correctness=1)
PUBLIC, CIPHERTEXT = 1184, 1088
"""FIPS 203, table 3."""
TOLD = CIPHERTEXT + 16
PAGES = Path(__file__).resolve().parents[3] / "docs"


def finish(run: NeighbourRound, places: set[int]) -> Any:
    """The sum of those in `places`, of whom each has its place, plus one, in each entry."""
    run.mask({place: np.full(3, place + 1, np.uint32) for place in sorted(places)})
    run.answer(sorted(places))
    return run.unmask()


def total(places: set[int]) -> Any:
    return np.full(3, sum(places) + len(places), np.uint32)


def hkdf(secret: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 with the salt of the session."""
    salt = b"archipel/v1/secagg\0" + bytes.fromhex(SESSION.round_id + SESSION.plan)
    key, block, found = hmac.digest(salt, secret, "sha256"), b"", b""
    while len(found) < length:
        block = hmac.digest(key, block + info + bytes([len(found) // 32 + 1]), "sha256")
        found += block
    return found[:length]


# --- keys by hand -----------------------------------------------------------------------------------------------------


def test_keys_are_those_of_a_second_implementation() -> None:
    secrets = [fixed(f"secret {index}") for index in range(4)]
    agreement = Hybrid(SESSION)
    one, other = agreement.private(secrets[0]), agreement.private(secrets[1])
    x25519 = [X25519PrivateKey.from_private_bytes(hkdf(s, b"archipel/v3/x25519\0", 32)) for s in secrets]
    pairs = [ml_kem.make_keys(hkdf(s, b"archipel/v3/ml-kem-768\0", 64)) for s in secrets]
    assert one.public == x25519[0].public_key().public_bytes_raw()
    assert kem.public_key(one.kem) == pairs[0][0]
    digest = bytes(32)
    public = agreement.publish(other, agreement.private(secrets[2]), digest)
    masks = agreement.publish(agreement.private(secrets[3]), other, digest)
    shared = x25519[0].exchange(X25519PublicKey.from_public_bytes(other.public))
    # An envelope from the first to the second.
    key, opening = agreement.lock(one, public)
    inside = ml_kem.decapsulate(pairs[1][1], opening)
    named = one.public + other.public + opening
    assert key == hkdf(shared + inside, b"archipel/v3/envelope\0" + named, 32)
    assert key == agreement.unlock(other, one.public, opening)
    # A mask: the first, at place 7, drew the second, at place 2.
    bound = bytes.fromhex(SESSION.round_id + SESSION.plan) + fixed("root")
    draw = Draw(bound, 7, 2)
    part, sent = agreement.offer(one, masks, draw)
    ciphertext, commitment, left_behind = sent[:1088], sent[1088:1104], sent[1104:]
    inside = ml_kem.decapsulate(pairs[1][1], ciphertext)
    e = bound + bytes([0, 0, 0, 7, 0, 0, 0, 2])
    assert commitment + part == hkdf(inside, b"archipel/v3/pair\0" + e + ciphertext, 48)
    wrapping = AESGCM(hkdf(secrets[0], b"archipel/v3/left-behind\0" + e + ciphertext, 32))
    assert wrapping.decrypt(bytes(12), left_behind, None) == inside
    expected = hkdf(shared + part, b"archipel/v3/pair-mask\0" + e + one.public + other.public, 32)
    assert agreement.mask_key(one, other.public, part, draw, True) == expected
    assert agreement.mask_key(other, one.public, agreement.accept(other, sent[:1104], draw), draw, False) == expected
    # Whichever of the two left.
    assert agreement.recover(one, sent, draw, True) == agreement.recover(other, sent, draw, False) == part


def test_who_has_the_x25519_key_has_nothing_of_ml_kem() -> None:
    secret = fixed("secret")
    private = Hybrid(SESSION).private(secret)
    found = private.x25519.private_bytes_raw()
    assert found != secret
    again = Hybrid(SESSION).private(found)
    assert kem.public_key(again.kem) != kem.public_key(private.kem)
    assert again.public != private.public


@pytest.mark.parametrize("what", ["place", "round", "secret", "ciphertext", "commitment"])
def test_a_commitment_is_for_one_draw(what: str) -> None:
    agreement = Hybrid(SESSION)
    one, other = agreement.private(fixed("one")), agreement.private(fixed("other"))
    draw = Draw(b"bound", 3, 4)
    _, sent = agreement.offer(one, agreement.publish(one, other, bytes(32)), draw)
    told = sent[:TOLD]
    agreement.accept(other, told, draw)
    at = {"ciphertext": 5, "commitment": -1}.get(what)
    if at is not None:
        changed = bytearray(told)
        changed[at] ^= 1
        told = bytes(changed)
    draw = {"place": Draw(b"bound", 4, 3), "round": Draw(b"other", 3, 4)}.get(what, draw)
    with pytest.raises(ShareError, match="commitment is to another key"):
        agreement.accept(one if what == "secret" else other, told, draw)


# --- whole rounds -----------------------------------------------------------------------------------------------------


def test_the_sum_of_a_cohort_from_which_some_leave_at_every_step() -> None:
    run = NeighbourRound(12, make_terms(Sizes(9, 3, 4), ASSUMED, 12, Hybrid))
    run.open()
    run.deal([place for place in range(12) if place != 3])
    run.receive([place for place in range(12) if place not in (3, 5)])
    assert len(run.sharers) == 10
    stay = run.sharers - {6}
    np.testing.assert_array_equal(finish(run, stay), total(stay))
    # The one that left drew some that stay, and some that stay drew it.
    drawers = {int(drawer) == int(gone) for gone, _, drawer, _ in run.roster.pairs(run.sharers, {6}).tolist()}
    assert drawers == {True, False}
    assert (run.total != total(stay)).all()


@pytest.mark.sampled(every=4)
def test_any_cohort_graph_and_leaving_gives_the_exact_sum_or_none() -> None:
    sums = 0

    @settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal sums
        count = data.draw(st.integers(6, 9), "cohort")
        server = data.draw(st.sampled_from(["semi-honest", "malicious"]), "server")
        neighbours = data.draw(st.integers(4, count - 1), "neighbours")
        least = 2 if server == "semi-honest" else max(neighbours // 2 + 1, neighbours * 2 // 3 + 1)
        partners = neighbours if server == "malicious" else data.draw(st.integers(1, neighbours), "partners")
        assumed = Assumptions(0, 0, server, security=1, correctness=1)  # type: ignore[arg-type]
        try:
            terms = make_terms(Sizes(neighbours, min(least, neighbours), partners), assumed, count, Hybrid)
            run = NeighbourRound(count, terms)
            run.open()
            steps = [set(range(count))]
            for step in ("deal", "receive", "mask", "answer"):
                leaving = data.draw(st.sets(st.sampled_from(sorted(steps[-1])), max_size=1), step)
                steps.append(steps[-1] - leaving)
            run.deal(sorted(steps[1]))
            run.receive(sorted(steps[2]))
            given = {place: np.full(3, place + 1, np.uint32) for place in sorted(steps[3] & run.sharers)}
            run.mask(given)
            run.answer(sorted(steps[4] & given.keys()))
            found = run.unmask()
        except (ArchipelError, StopIteration):
            return
        sums += 1
        np.testing.assert_array_equal(found, total(set(given)))

    check()
    assert sums >= 4


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_messages_have_the_sizes_that_the_page_states() -> None:
    run = NeighbourRound(COUNT, make_terms(SIZES, ASSUMED, COUNT, Hybrid))
    run.open()
    full, short = run.roster.members[0], shorten(run.roster.members[0])
    assert (FULL_BYTES, SHORT_BYTES) == (96 + 2 * PUBLIC, 96 + PUBLIC + 32)
    assert len(bytes(read_keys(full))) == FULL_BYTES
    assert len(bytes(read_keys(short))) == SHORT_BYTES
    assert len(full) - len(short) == PUBLIC - 32
    places = [1, 2, 3, 4, 5]
    members = run.roster.introduce(0, Drawn(places=places)).members
    assert [len(bytes(read_keys(member))) for member in members] == [FULL_BYTES] * 3 + [SHORT_BYTES] * 3
    run.deal(range(COUNT))
    run.receive(range(COUNT))
    inbox = run.roster.inbox(0)
    partners = sum(position <= SIZES.partners for position in inbox.positions)
    assert 0 < partners < len(inbox.dealers)
    assert len(inbox.dealt) == (CIPHERTEXT + 132) * len(inbox.dealers) + TOLD * partners
    assert run.roster.dealt.shape[2] + run.roster.offers.shape[2] == CIPHERTEXT + 132 + CIPHERTEXT + 48 + 16


def more_bytes(k: int, m: int) -> list[int]:
    """What a device sends and receives more, as the page computes it."""
    sent = 2 * PUBLIC + k * CIPHERTEXT + m * (CIPHERTEXT + 48 + 16)
    return [sent, (k + 1) * (PUBLIC + 32) + m * (PUBLIC - 32) + k * CIPHERTEXT + m * (CIPHERTEXT + 16)]


def test_the_page_states_the_bytes_of_the_sizes_in_the_protocol() -> None:
    base, page = ((PAGES / name).read_text(encoding="utf-8") for name in ("protocol.md", "protocol-mlkem.md"))
    rows = re.findall(r"^\| ([\d,]+) \| ([a-z-]+) \| (\d+) \| \d+ \| (\d+) \|$", base, re.M)
    assert len(rows) == 4
    expected = [[devices, server, *more_bytes(int(k), int(m))] for devices, server, k, m in rows]
    stated = re.findall(r"^\| ([\d,]+) \| ([a-z-]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.M)
    assert [[row[0], row[1], *(int(cell.replace(",", "")) for cell in row[2:])] for row in stated] == expected
    # What a server keeps of 1,000 devices, in MB.
    kept = [
        round(1000 * ((CIPHERTEXT + 132) * int(k) + (CIPHERTEXT + 64) * int(m)) / 1e6)
        for devices, _, k, m in rows
        if devices == "1,000"
    ]
    found = re.search(r"with 1,000 devices (\d+) MB where it\s+is\s+semi-honest, and (\d+) MB", page)
    assert found is not None
    assert [int(each) for each in found.groups()] == kept


def test_what_is_sent_more_is_what_the_page_computes() -> None:
    """For one device on average, against real messages of both protocols."""
    k, m = SIZES.neighbours, SIZES.partners
    found = []
    for agreement in (Alone, Hybrid):
        run = NeighbourRound(COUNT, make_terms(SIZES, ASSUMED, COUNT, agreement))
        run.open()
        up = down = 0
        for place, device in enumerate(run.devices):
            drawn = device.draw(run.roster.invite(place))
            introduced = run.roster.introduce(place, drawn)
            dealt = device.deal(introduced)
            run.roster.take(place, dealt)
            up += len(run.roster.members[place]) + len(dealt.dealt)
            down += sum(map(len, introduced.members))
        down += sum(len(run.roster.inbox(place).dealt) for place in range(COUNT))
        found.append((up, down))
    more = [(there - here) / COUNT for here, there in zip(*found, strict=True)]
    # MessagePack writes the length of the keys in one byte more.
    assert more == pytest.approx(more_bytes(k, m), abs=k + 2)


# --- where there is none ----------------------------------------------------------------------------------------------


@pytest.fixture
def without_ml_kem(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Library:
        class MLKEM768PrivateKey:
            @staticmethod
            def from_seed_bytes(seed: bytes) -> Any:
                raise UnsupportedAlgorithm("ML-KEM is not supported by this version of OpenSSL")

    monkeypatch.setattr(kem, "_library", lambda: Library)
    kem.is_available.cache_clear()
    yield
    kem.is_available.cache_clear()


@pytest.mark.usefixtures("without_ml_kem")
def test_without_ml_kem_a_device_does_not_name_the_protocol_and_refuses_its_plans() -> None:
    assert spoken() == ("complete", "neighbours")
    policy = PrivacyPolicy(
        modes=("secure",), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=16, protocols=("neighbours-mlkem",)
    )
    plan = RoundPlan(
        round_id="a" * 32, task_id="b" * 32, number=1, bundle="c" * 64, weights="d" * 64, privacy="secure",
        min_cohort=3, max_cohort=8, threshold=3, modulus_bits=24, protocol="neighbours-mlkem", neighbours=5, partners=3,
    )  # fmt: skip
    with pytest.raises(PolicyError, match="this device's cryptography has no ML-KEM-768"):
        terms_of(plan, "e" * 64, policy)
    assert terms_of(msgspec.structs.replace(plan, protocol="neighbours"), "e" * 64, policy).agreement is Alone


def test_with_it_a_device_names_it() -> None:
    assert spoken() == ("complete", "neighbours", "neighbours-mlkem")
