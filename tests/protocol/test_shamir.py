from __future__ import annotations

import hashlib
import itertools
import random
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.errors import ShareError, ThresholdError
from archipel.protocol.secagg.shamir import PRIME, SHARE_BYTES, Interpolation, decode_share, reconstruct, split

CORPUS = Path(__file__).parent / "corpus" / "share"


def is_prime(number: int, rounds: int = 64) -> bool:
    """Miller and Rabin; every round leaves a composite undetected with probability at most 1/4."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    witnesses = random.Random(7)
    for _ in range(rounds):
        x = pow(witnesses.randrange(2, number - 1), odd, number)
        if x in (1, number - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % number
            if x == number - 1:
                break
        else:
            return False
    return True


def test_the_field_is_the_smallest_one_above_32_bytes():
    assert is_prime(PRIME)
    assert not any(is_prime(number, rounds=8) for number in range(2**256 + 1, PRIME, 2))


def numbers(seed: int):
    generator = random.Random(seed)
    return lambda count: generator.randbytes(count)


def lagrange_at_zero(points: list[tuple[int, int]]) -> int:
    """In exact fractions over the integers, then modulo the prime: no code in common with the package."""
    total = Fraction(0)
    for x, y in points:
        term = Fraction(y)
        for other, _ in points:
            if other != x:
                term *= Fraction(-other, x - other)
        total += term
    return total.numerator * pow(total.denominator, -1, PRIME) % PRIME


@given(secret=st.binary(min_size=32, max_size=32), seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=60)
def test_any_threshold_of_shares_give_the_secret(secret, seed, data):
    count = data.draw(st.integers(1, 12))
    threshold = data.draw(st.integers(1, count))
    shares = split(secret, threshold, count, numbers(seed))
    assert all(len(share) == SHARE_BYTES for share in shares)
    chosen = data.draw(
        st.permutations(range(count)).map(lambda order: order[: data.draw(st.integers(threshold, count))])
    )
    points = [(i + 1, shares[i]) for i in chosen]
    assert reconstruct(points, threshold) == secret
    as_integers = [(x, int.from_bytes(y, "big")) for x, y in points[:threshold]]
    assert lagrange_at_zero(as_integers) == int.from_bytes(secret, "big")


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, b"\0" * 31 + b"\1"])
def test_extreme_secrets(secret):
    assert reconstruct(list(enumerate(split(secret, 3, 5, numbers(1)), 1))[2:], 3) == secret


@pytest.mark.parametrize("secret", [0, 1, 12345, 2**256 - 1])
def test_fewer_shares_fit_every_secret(secret):
    # Threshold 2: for any secret there is exactly one slope that gives the device at position 4 this same share.
    seen = 987654321
    slope = (seen - secret) * pow(4, -1, PRIME) % PRIME
    shares = split(secret.to_bytes(32, "big"), 2, 5, lambda count: slope.to_bytes(count, "big"))
    assert int.from_bytes(shares[3], "big") == seen
    with pytest.raises(ThresholdError):
        reconstruct([(4, shares[3])], 2)


@pytest.mark.parametrize("count", [6, 9])
def test_the_one_wrong_share_is_found_wherever_it_is(count):
    shares = split(b"s" * 32, 4, count, numbers(3))
    for wrong, by in itertools.product(range(count), (1, 2**200, PRIME - 1)):
        tampered = list(shares)
        tampered[wrong] = ((int.from_bytes(shares[wrong], "big") + by) % PRIME).to_bytes(33, "big")
        interpolation = Interpolation(range(1, count + 1), 4, b"".join(tampered))
        with pytest.raises(ShareError, match="one polynomial"):
            interpolation.secret(tampered)
        assert interpolation.outlier(tampered) == wrong
    assert Interpolation(range(1, count + 1), 4, b"").outlier(shares) is None


def fitted(shares: list[bytes], challenge: bytes) -> list[bytes]:
    """Shares of positions 1 to 4 with threshold 2, the first two changed so that they pass the test of `challenge`.

    The test is the sum of w(x) r(x) y over all shares: w(x) = 1 / the product of x's distances from the others, and
    r(x) = x + SHA-512 of the challenge with its label. Two errors e1, e2 pass where w1 r1 e1 + w2 r2 e2 = 0.
    """
    factor = int.from_bytes(hashlib.sha512(b"archipel/v1/shamir\0" + challenge).digest(), "big")
    first = pow((1 - 2) * (1 - 3) * (1 - 4), -1, PRIME) * (1 + factor)
    second = pow((2 - 1) * (2 - 3) * (2 - 4), -1, PRIME) * (2 + factor)
    errors = (7, -7 * first * pow(second, -1, PRIME))
    values = [int.from_bytes(share, "big") for share in shares]
    changed = [(value + error) % PRIME for value, error in zip(values, errors)]
    return [value.to_bytes(SHARE_BYTES, "big") for value in (*changed, *values[2:])]


@pytest.mark.parametrize("known", [b"", b"an earlier round's shares"])
def test_shares_that_were_fitted_to_another_challenge_are_refused(known: bytes) -> None:
    """Who knows the challenge beforehand passes off another secret; so it depends on all the shares."""
    secret = b"s" * 32
    forged = fitted(split(secret, 2, 4, numbers(5)), known)
    assert Interpolation(range(1, 5), 2, known).secret(forged) != secret
    with pytest.raises(ShareError, match="one polynomial"):
        Interpolation(range(1, 5), 2, b"".join(forged)).secret(forged)
    with pytest.raises(ShareError, match="one polynomial"):
        reconstruct(list(enumerate(forged, 1)), 2)


def test_with_one_surplus_share_an_error_is_seen_but_not_found():
    shares = split(b"s" * 32, 4, 5, numbers(4))
    shares[1] = shares[2]
    interpolation = Interpolation(range(1, 6), 4, b"".join(shares))
    with pytest.raises(ShareError):
        interpolation.secret(shares)
    assert interpolation.outlier(shares) is None


def test_shares_of_a_polynomial_of_higher_degree_are_refused():
    shares = split(b"s" * 32, 5, 9, numbers(5))
    with pytest.raises(ShareError, match="degree below 4"):
        reconstruct(list(enumerate(shares, 1)), 4)


def test_a_secret_beyond_32_bytes_is_refused():
    beyond = (2**256).to_bytes(33, "big")
    with pytest.raises(ShareError, match="32-byte secret"):
        reconstruct([(1, beyond), (2, beyond)], 2)


@pytest.mark.parametrize(("threshold", "count"), [(0, 3), (4, 3), (-1, 3)])
def test_thresholds_that_make_no_sense(threshold, count):
    with pytest.raises(ThresholdError):
        split(bytes(32), threshold, count, numbers(6))


def test_secret_of_another_size():
    with pytest.raises(ShareError, match="32 bytes"):
        split(bytes(31), 2, 3, numbers(7))


@pytest.mark.parametrize("positions", [[1, 1], [0, 1], [-1, 1], [1, PRIME]])
def test_positions_that_make_no_sense(positions):
    with pytest.raises(ShareError, match="positions"):
        Interpolation(positions, 2, b"")


@pytest.mark.parametrize("threshold", [-1, 0, 3])
def test_thresholds_that_cannot_be_met(threshold):
    with pytest.raises(ThresholdError):
        Interpolation([1, 2], threshold, b"")


def test_wrong_number_of_shares():
    with pytest.raises(ShareError, match="expected 2 shares"):
        Interpolation([1, 2], 2, b"").secret([bytes(33)])


def test_a_share_is_below_the_prime():
    assert decode_share((PRIME - 1).to_bytes(33, "big")) == PRIME - 1
    with pytest.raises(ShareError, match="must be below"):
        decode_share(PRIME.to_bytes(33, "big"))  # or 0 would have two encodings


@given(st.binary(max_size=40))
def test_decoding_any_bytes(data):
    _decode_or_refuse(data)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.bin")), ids=lambda path: path.stem)
def test_decoding_the_corpus(path):
    _decode_or_refuse(path.read_bytes())


def _decode_or_refuse(data: bytes) -> None:
    try:
        value = decode_share(data)
    except ShareError:
        assert len(data) != 33 or int.from_bytes(data, "big") >= 2**256 + 297
    else:
        assert value.to_bytes(33, "big") == data
