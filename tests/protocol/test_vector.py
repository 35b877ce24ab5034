from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.bundle.roles import Metric, Program, Update
from archipel.errors import MessageError, ProtocolError
from archipel.protocol import Layout, add_masked, pack, unpack

CORPUS = Path(__file__).parent / "corpus" / "vector"


def update(name="w", shape=(4,), kind="delta", bits=16, range_=1.0) -> Update:
    return Update(
        name=f"{name}_out",
        dtype="float32",
        shape=shape,
        tensor=name,
        kind=kind,
        weighting="examples",
        range=range_,
        bits=bits,
    )


def layout(*ports: Update) -> Layout:
    return Layout.of(Program(kind="finish", inputs=(), outputs=ports))


def quantised(value: float, range_: float, bits: int) -> int:
    """The nearest whole number of steps, in exact fractions (ties to even)."""
    largest = 2 ** (bits - 1) - 1
    step = range_ / largest
    return max(-largest, min(largest, round(Fraction(value / step))))


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.sampled(every=3)
@given(
    bits=st.integers(2, 20),
    range_=st.floats(1e-3, 1e3),
    rows=st.lists(st.lists(finite, min_size=4, max_size=4), min_size=1, max_size=9),
)
@settings(max_examples=150)
def test_the_decoded_sum_is_the_sum_of_the_quantised_values(bits, range_, rows):
    here = layout(update(bits=bits, range_=range_))
    modulus = here.modulus_bits(len(rows))
    total = np.zeros(4, np.uint32)
    for row in rows:
        encoded = here.encode({"w_out": np.float32(row)}, modulus_bits=modulus, max_cohort=len(rows))
        assert encoded.dtype == np.uint32
        add_masked(total, encoded, modulus)
    decoded = here.decode_sum(total, cohort=len(rows), modulus_bits=modulus).deltas["w"]
    step = range_ / (2 ** (bits - 1) - 1)
    for column, result in enumerate(decoded.tolist()):
        exact = sum(quantised(float(np.float32(row[column])), range_, bits) for row in rows)
        assert result == exact * step


@pytest.mark.sampled(every=3)
@given(bits=st.integers(2, 24), values=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5))
@settings(max_examples=150)
def test_the_error_is_half_a_step_for_each_device(bits, values):
    here = layout(update(shape=(1,), bits=bits))
    modulus = here.modulus_bits(5)
    total = np.zeros(1, np.uint32)
    for value in values:
        add_masked(total, here.encode({"w_out": np.float32([value])}, modulus_bits=modulus, max_cohort=5), modulus)
    decoded = here.decode_sum(total, cohort=len(values), modulus_bits=modulus).deltas["w"]
    half = 0.5 / (2 ** (bits - 1) - 1)
    assert abs(decoded[0] - math.fsum(values)) <= len(values) * half * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("bits", "cohort"), [(8, 1), (8, 256), (8, 257), (16, 256), (16, 4096), (20, 4096), (30, 4)])
def test_extreme_values_of_a_full_cohort_do_not_overflow(bits, cohort, sign):
    here = layout(update(bits=bits, range_=3.0))
    modulus = here.modulus_bits(cohort)
    encoded = here.encode(
        {"w_out": np.full(4, sign * np.finfo(np.float32).max)}, modulus_bits=modulus, max_cohort=cohort
    )
    total = (encoded.astype(np.uint64) * cohort % 2**modulus).astype(np.uint32)
    decoded = here.decode_sum(total, cohort=cohort, modulus_bits=modulus).deltas["w"]
    np.testing.assert_allclose(decoded, sign * 3.0 * cohort, rtol=1e-12)


@pytest.mark.parametrize(
    ("bits", "cohort", "expected"),
    # n * (2^(bits-1) - 1) must stay below 2^(b-1): 256 * 127 = 32512 < 32768, 259 * 127 = 32893 does not.
    [(8, 1, 8), (8, 2, 16), (8, 258, 16), (8, 259, 24), (16, 256, 24), (16, 257, 32), (2, 127, 8), (2, 128, 16)],
)
def test_the_smallest_modulus(bits, cohort, expected):
    assert layout(update(bits=bits)).modulus_bits(cohort) == expected


def test_the_widest_entry_decides():
    here = layout(update(bits=8), update("n", (), "weight", bits=20))
    assert here.modulus_bits(1) == 24
    assert here.fits(23, 8)
    assert not here.fits(23, 9)


def test_no_modulus_is_large_enough():
    with pytest.raises(ProtocolError, match="overflow 32 bits"):
        layout(update(bits=30)).modulus_bits(5)


def test_entries_follow_the_outputs_order():
    here = layout(
        update("b", (2,)), update("a", (1, 2)), update("n", (), "weight", range_=100), update("c", (1,), "value")
    )
    assert here.length == 6
    arrays = {"a_out": [[0.5, -0.5]], "b_out": [1, 0], "n_out": 40.0, "c_out": [0.25]}
    encoded = here.encode({k: np.asarray(v, np.float32) for k, v in arrays.items()}, modulus_bits=24, max_cohort=3)
    m = 2**15 - 1
    half = round(m / 2 - 1e-9) if round(m / 2) % 2 else round(m / 2)
    assert encoded.tolist() == [m, 0, half, 2**24 - half, round(0.4 * m), round(m / 4)]
    decoded = here.decode_sum(encoded, cohort=1, modulus_bits=24)
    assert set(decoded.deltas) == {"a", "b"}
    assert set(decoded.values) == {"c"}
    assert decoded.weight == pytest.approx(40, abs=100 / m / 2)
    assert decoded.deltas["a"].shape == (1, 2)
    assert decoded.deltas["a"].dtype == np.float64


def test_an_update_without_elements():
    here = layout(update("e", (0, 3)), update())
    encoded = here.encode({"e_out": np.zeros((0, 3)), "w_out": np.ones(4)}, modulus_bits=16, max_cohort=1)
    decoded = here.decode_sum(encoded, cohort=1, modulus_bits=16).deltas
    assert decoded["e"].shape == (0, 3)
    assert decoded["w"].tolist() == [1, 1, 1, 1]


def test_zero_is_exact_and_without_a_weight_there_is_none():
    here = layout(update())
    encoded = here.encode({"w_out": np.zeros(4, np.float32)}, modulus_bits=16, max_cohort=1)
    assert not encoded.any()
    assert here.decode_sum(encoded, cohort=1, modulus_bits=16).weight is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad):
    with pytest.raises(ProtocolError, match="NaN or infinite"):
        layout(update()).encode({"w_out": np.float32([0, bad, 0, 0])}, modulus_bits=16, max_cohort=1)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({}, "missing"),
        ({"w_out": np.zeros(4, np.float32), "x": np.zeros(4, np.float32)}, "not update outputs"),
        ({"w_out": np.zeros((2, 2), np.float32)}, "expected floating point"),
        ({"w_out": np.zeros(4, np.int64)}, "expected floating point"),
    ],
)
def test_arrays_that_do_not_fit(arrays, why):
    with pytest.raises(ProtocolError, match=why):
        layout(update()).encode(arrays, modulus_bits=16, max_cohort=1)


def test_a_modulus_that_could_overflow_is_refused():
    with pytest.raises(ProtocolError, match="16 bits cannot hold the sum of 2"):
        layout(update()).encode({"w_out": np.zeros(4, np.float32)}, modulus_bits=16, max_cohort=2)
    with pytest.raises(ProtocolError, match="cannot hold"):
        layout(update()).decode_sum(np.zeros(4, np.uint32), cohort=2, modulus_bits=16)
    with pytest.raises(ProtocolError, match="cannot hold"):
        layout(update(bits=2)).decode_sum(np.zeros(4, np.uint32), cohort=2, modulus_bits=33)


@pytest.mark.parametrize("entry", [3 * 32767 + 1, 2**24 - 3 * 32767 - 1, 2**23])
def test_a_sum_beyond_the_cohort_is_refused(entry):
    total = np.array([0, 0, entry, 0], np.uint32)
    with pytest.raises(ProtocolError, match="'w'"):
        layout(update()).decode_sum(total, cohort=3, modulus_bits=24)
    closer = np.array([0, 3 * 32767, 2**24 - 3 * 32767, 0], np.uint32)
    assert layout(update()).decode_sum(closer, cohort=3, modulus_bits=24).deltas["w"].tolist() == [0, 3.0, -3.0, 0]


def test_random_bytes_are_almost_never_a_sum():
    # What a mask that was not removed would leave: 32767 * 24 * 2 of 2^24 values are in range, so 20 entries suffice.
    noise = np.random.default_rng(1).integers(0, 2**24, (50, 20), np.uint32)
    for row in noise:
        with pytest.raises(ProtocolError, match="a mask is left"):
            layout(update(shape=(20,))).decode_sum(row, cohort=24, modulus_bits=24)


def test_programs_without_update_or_with_two_weights():
    metric = Metric(name="loss", dtype="float32", shape=(), reduction="mean")
    with pytest.raises(ProtocolError, match="nothing to upload"):
        layout(metric)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="one weight"):
        layout(update("n", (), "weight"), update("m", (), "weight"))


@pytest.mark.sampled(every=3)
@given(bits=st.integers(1, 32), seed=st.integers(0, 2**32 - 1), length=st.integers(0, 40))
@settings(max_examples=200)
def test_pack_and_unpack(bits, seed, length):
    vector = np.random.default_rng(seed).integers(0, 2**bits, length, np.uint32)
    width = (bits + 7) // 8
    data = pack(vector, bits)
    assert data == b"".join(entry.to_bytes(width, "little") for entry in vector.tolist())
    back = unpack(data, length, bits)
    assert back.dtype == np.uint32
    assert back.flags.writeable
    np.testing.assert_array_equal(back, vector)


@pytest.mark.sampled(every=3)
@given(data=st.binary(max_size=40), length=st.integers(0, 12), bits=st.integers(1, 32))
@settings(max_examples=300)
def test_unpacking_any_bytes(data, length, bits):
    unpack_or_refuse(data, length, bits)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.bin")), ids=lambda path: path.stem)
@pytest.mark.parametrize("bits", [8, 20, 24, 32])
def test_unpacking_the_corpus(path, bits):
    unpack_or_refuse(path.read_bytes(), 4, bits)


def unpack_or_refuse(data: bytes, length: int, bits: int) -> None:
    width = (bits + 7) // 8
    entries = [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]
    fits = len(data) == length * width and all(entry < 2**bits for entry in entries)
    try:
        vector = unpack(data, length, bits)
    except MessageError:
        assert not fits
    else:
        assert fits
        assert vector.tolist() == entries


def test_packing_what_is_no_vector():
    for vector in (np.zeros(2, np.int32), np.zeros((2, 2), np.uint32), np.full(1, 256, np.uint32)):
        with pytest.raises(ProtocolError):
            pack(vector, 8)


def test_adding_what_does_not_fit():
    total = np.zeros(3, np.uint32)
    for vector in (np.zeros(2, np.uint32), np.zeros(3, np.int32), np.full(3, 2**24, np.uint32)):
        with pytest.raises(ProtocolError):
            add_masked(total, vector, 24)
    for running in (np.zeros(3, np.int64), np.zeros((3, 1), np.uint32)):
        with pytest.raises(ProtocolError, match="running sum"):
            add_masked(running, np.zeros(3, np.uint32), 24)
    for _ in range(3):
        add_masked(total, np.array([1, 2**24 - 1, 2**23], np.uint32), 24)
    assert total.tolist() == [3, 2**24 - 3, 2**23]
