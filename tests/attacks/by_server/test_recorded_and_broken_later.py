"""A server that keeps to the protocol records a round, and later has the private key of every X25519 key in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from archipel.errors import ShareError
from archipel.protocol.secagg import keys
from archipel.protocol.secagg.masks import add_masked, apply_masks, reduce
from archipel.protocol.secagg_plus.agreement import Draw, KeyAgreement, Private
from archipel.protocol.secagg_plus.alone import Alone
from archipel.protocol.secagg_plus.envelope import bind, unseal
from archipel.protocol.secagg_plus.hybrid import Hybrid
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes
from archipel.protocol.secagg_plus.unmask import _Shares
from archipel.protocol.vector import Vector
from tests.support.neighbour_rounds import SESSION, NeighbourRound, make_terms

COUNT, VICTIM, LEAVES = 8, 0, 7
BITS = 24


class Recorded:
    """All that a server has of a round, and what breaking X25519 gives it."""

    def __init__(self, agreement: type[KeyAgreement]) -> None:
        assumed = Assumptions(0, 0.2, "semi-honest", security=1, correctness=1)
        self.run = run = NeighbourRound(COUNT, make_terms(Sizes(6, 3, 4), assumed, COUNT, agreement))
        self.agreement = agreement(SESSION)
        run.open()
        self.broken = dict(self._break())
        run.deal(range(COUNT))
        run.receive(range(COUNT))
        assert run.sharers == set(range(COUNT))
        self.vectors = {
            place: np.arange(place, place + 5, dtype=np.uint32) for place in range(COUNT) if place != LEAVES
        }
        self.masked: dict[int, Vector] = {}
        run.survivors, run.total = set(self.vectors), np.zeros(5, np.uint32)
        for place, vector in self.vectors.items():
            self.masked[place] = run.devices[place].mask(vector, run.roster.pair(place, run.sharers))
            add_masked(run.total, self.masked[place], BITS)
        run.answer(sorted(self.vectors))
        self.bound = bind(SESSION, run.roster.root)

    def _break(self) -> Iterator[tuple[bytes, Private]]:
        """By public key its private half, and nothing else of what the device had."""
        for device in self.run.devices:
            for secret in (device._state.cipher_secret, device._state.mask_secret):
                own = self.run.terms.agreement(SESSION).private(secret)
                found = X25519PrivateKey.from_private_bytes(own.x25519.private_bytes_raw())
                yield own.public, Private(found.private_bytes_raw(), found, own.public)

    def read(self, victim: int) -> Vector | None:
        """The victim's vector; None where a mask stays on it."""
        roster, run = self.run.roster, self.run
        seeds = _Shares(roster, run.questions, run.answers).recover([victim], "seed", self.bound, lambda *_: True)
        own = roster.keys[victim].mask_key
        masks = [(keys.self_mask_key(seeds[victim], SESSION.salt, own), -1)]
        inside = run.roster.pair(victim, run.sharers)
        edges = [(victim, place) for place in roster.drawn[victim, :4].tolist() if place not in inside.gone]
        edges += [(other, victim) for other in inside.others]
        if not self.agreement.by_draw:
            edges = [(victim, other) for other in {one if one != victim else two for one, two in edges}]
        for drawer, drawn in edges:
            key = self.mask_key(victim, drawer, drawn)
            if key is None:
                return None
            masks.append((key, -1 if victim > (drawn if drawer == victim else drawer) else 1))
        found = self.masked[victim].copy()
        apply_masks(found, masks)
        reduce(found, BITS)
        return found

    def mask_key(self, victim: int, drawer: int, drawn: int) -> bytes | None:
        """Of one mask, by the agreement and whatever can be had of the rest."""
        roster, draw = self.run.roster, Draw(self.bound, drawer, drawn)
        other = drawn if drawer == victim else drawer
        mine, theirs = (self.broken[roster.keys[place].mask_key] for place in (victim, other))
        if not self.agreement.by_draw:
            return self.agreement.mask_key(mine, theirs.public, b"", draw, drawer == victim)
        column = roster.drawn[drawer].tolist().index(drawn)
        sent = roster.offers[drawer, column].tobytes()
        # Were an X25519 key the secret itself, ML-KEM's key and the one of what was left behind would follow from it.
        for place, drew in ((drawer, True), (drawn, False)):
            guess = self.agreement.private(self.broken[roster.keys[place].mask_key].secret)
            try:
                part = self.agreement.recover(guess, sent, draw, drew)
            except ShareError:
                continue
            return self.agreement.mask_key(mine, theirs.public, part, draw, drawer == victim)
        return None

    def opened(self) -> int:
        """How many envelopes open with the agreement, and whatever can be had of the rest."""
        roster, found = self.run.roster, 0
        for dealer, position in np.ndindex(roster.drawn.shape):
            holder, dealt = int(roster.drawn[dealer, position]), roster.dealt[dealer, position].tobytes()
            one, other = (self.broken[roster.keys[place].cipher_key] for place in (dealer, holder))
            opening, sealed = dealt[: self.agreement.opening_bytes], dealt[self.agreement.opening_bytes :]
            guess = self.agreement.private(other.secret) if self.agreement.by_draw else other
            key = self.agreement.unlock(
                Private(guess.secret, other.x25519, other.public, guess.kem), one.public, opening
            )
            try:
                unseal(key, self.bound, dealer, holder, position + 1, sealed)
                found += 1
            except ShareError:
                continue
        return found


def test_with_x25519_alone_every_vector_is_read() -> None:
    recorded = Recorded(Alone)
    for place, vector in recorded.vectors.items():
        np.testing.assert_array_equal(recorded.read(place), vector)
    assert recorded.opened() == COUNT * 6


def test_with_ml_kem_no_vector_is_read() -> None:
    recorded = Recorded(Hybrid)
    assert [recorded.read(place) for place in recorded.vectors] == [None] * (COUNT - 1)
    assert recorded.opened() == 0
    # The round itself is a good one.
    np.testing.assert_array_equal(recorded.run.unmask(), sum(recorded.vectors.values()))


def test_a_device_that_left_gives_its_own_masks_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask secret the server has in the round. What that gives are the masks of the pairs that it is in."""
    recorded = Recorded(Hybrid)
    secret = recorded.run.devices[LEAVES]._state.mask_secret
    real = recorded.agreement.private
    key = recorded.run.roster.keys[LEAVES].mask_key
    broken = recorded.broken[key].secret
    monkeypatch.setattr(recorded.agreement, "private", lambda given: real(secret if given == broken else given))
    drawn = recorded.run.roster.drawn[:, :4]
    pairs = [(int(a), int(b)) for a in range(COUNT) for b in drawn[a]]
    known = {pair for pair in pairs if recorded.mask_key(*(pair[0], *pair)) is not None}
    assert known == {pair for pair in pairs if LEAVES in pair}
    assert recorded.read(VICTIM) is None
