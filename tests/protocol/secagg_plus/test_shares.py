"""Shamir's sharing over 2^31 - 1 against integers, and what fewer shares say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.errors import ShareError, ThresholdError
from archipel.protocol.secagg_plus.shares import SHARE_BYTES, check_share, commit, reconstruct, split
from tests.support.rounds import fixed, stream

P = 2**31 - 1


def elements(share: bytes) -> list[int]:
    return [int.from_bytes(share[i : i + 4], "little") for i in range(0, len(share), 4)]


def interpolate(points: dict[int, int]) -> int:
    """The value at 0, in integers."""
    total = 0
    for x, y in points.items():
        above = below = 1
        for other in points:
            if other != x:
                above, below = above * other % P, below * (other - x) % P
        total += y * above * pow(below, -1, P)
    return total % P


@pytest.mark.sampled(every=3)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.integers(0, 4), st.randoms(use_true_random=False))
def test_any_threshold_shares_give_the_secret(secret: bytes, threshold: int, more: int, order: object) -> None:
    shares = split(secret, threshold, threshold + more, stream(secret.hex()))
    positions = sorted(order.sample(range(1, threshold + more + 1), threshold))  # type: ignore[attr-defined]
    chosen = [shares[x - 1] for x in positions]
    values = np.array([[elements(share) for share in chosen]], np.uint32)
    assert reconstruct(np.array([positions]), values) == [secret]
    by_hand = [interpolate({x: elements(s)[i] for x, s in zip(positions, chosen)}) for i in range(9)]
    assert sum(value << (30 * i) for i, value in enumerate(by_hand)) == int.from_bytes(secret, "little")


def test_many_dealers_at_once() -> None:
    rng = np.random.default_rng(0)
    secrets = [fixed(f"secret {i}") for i in range(300)]
    dealt = [split(secret, 5, 12, stream(f"dealer {i}")) for i, secret in enumerate(secrets)]
    positions = np.stack([np.sort(rng.choice(12, 5, replace=False)) + 1 for _ in secrets])
    values = np.array([[elements(dealt[i][x - 1]) for x in row] for i, row in enumerate(positions)], np.uint32)
    assert reconstruct(positions, values) == secrets


def test_fewer_shares_fit_every_secret() -> None:
    # With threshold - 1 shares there is, for any secret, one polynomial through them: the share that would give it.
    shares = split(fixed("secret"), 3, 5, stream("split"))
    other = fixed("another secret")
    number = int.from_bytes(other, "little")
    forged = []
    for i in range(9):
        known = {1: elements(shares[0])[i], 2: elements(shares[1])[i], 0: number >> (30 * i) & ((1 << 30) - 1)}
        moved = {x - 3: y for x, y in known.items()}
        forged.append(interpolate(moved))
    values = np.array([[elements(shares[0]), elements(shares[1]), forged]], np.uint32)
    assert reconstruct(np.array([[1, 2, 3]]), values) == [other]


def test_shares_are_uniform() -> None:
    # 2,000 shares of one secret in 16 classes: chi-square with 15 degrees of freedom, 0.999 quantile 37.7.
    values = [elements(split(bytes(32), 2, 2, stream(f"uniform {i}"))[0]) for i in range(2000)]
    for column in np.array(values).T:
        counts = np.histogram(column, bins=16, range=(0, P))[0]
        assert ((counts - 125) ** 2 / 125).sum() < 37.7


def test_a_draw_above_the_field_is_drawn_again() -> None:
    calls = []

    def randomness(count: int) -> bytes:
        calls.append(count)
        return b"\xff" * count if len(calls) == 1 else fixed("again", count)

    shares = split(fixed("secret"), 2, 2, randomness)
    assert calls == [36, 36]
    values = np.array([[elements(share) for share in shares]], np.uint32)
    assert reconstruct(np.array([[1, 2]]), values) == [fixed("secret")]


def test_wrong_shares_that_leave_the_secrets_are_told() -> None:
    shares = [elements(share) for share in split(fixed("secret"), 2, 3, stream("split"))]
    shares[1] = [(value + (1 << 30)) % P for value in shares[1]]
    # Twice the first less the second: 2^30 and more in most elements.
    assert reconstruct(np.array([[1, 2]]), np.array([shares[:2]], np.uint32)) == [None]


def test_what_is_no_share_is_refused() -> None:
    good = split(fixed("secret"), 2, 2, stream("split"))[0]
    check_share(good)
    for wrong in (good[:-1], good + b"\0", b""):
        with pytest.raises(ShareError, match=f"{SHARE_BYTES} bytes"):
            check_share(wrong)
    with pytest.raises(ShareError, match="below"):
        check_share(P.to_bytes(4, "little") + good[4:])
    with pytest.raises(ShareError, match="32 bytes"):
        split(b"short", 1, 1, stream("split"))
    for threshold in (0, 3):
        with pytest.raises(ThresholdError):
            split(bytes(32), threshold, 2, stream("split"))


def test_a_commitment_names_what_it_is_for() -> None:
    share = fixed("share", 36)
    assert len({
        commit(1, 1, share, b"a"), commit(2, 1, share, b"a"), commit(1, 2, share, b"a"), commit(1, 1, share, b"b"),
        commit(1, 1, fixed("other", 36), b"a"),
    }) == 5  # fmt: skip
