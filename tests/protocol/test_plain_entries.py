"""Packed entries of plain updates: what travels comes back, and nothing else is taken, whatever the bytes are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.bundle import read_weights, write_weights
from archipel.bundle.roles import Largest, Rotation, Update
from archipel.errors import MessageError, ProtocolError
from archipel.protocol.bits import pack_bits, packed_size, unpack_bits
from archipel.protocol.bounds import step
from archipel.protocol.plain import decode_plain, encode_plain, plain_size
from archipel.protocol.plain_entries import from_wire, to_wire
from archipel.protocol.vector import Layout

CORPUS = Path(__file__).parent / "corpus" / "packed"
CLIP = 2.0


def delta(name: str, size: int, bits: int, carries: Rotation | Largest) -> Update:
    return Update(
        name=name, tensor=name, dtype="float32", shape=(size,), kind="delta", weighting="uniform", range=1.5,
        bits=bits, clip=CLIP, carries=carries,
    )  # fmt: skip


TURNED = delta("turned", 5, 3, Rotation(parameters=("a",), block=8, taken=5))
LARGEST = delta("largest", 9, 16, Largest(parameters=("b",), most=3))
LAYOUT = Layout((TURNED, LARGEST))


def good() -> dict[str, np.ndarray]:
    return {
        "turned": np.array([0.5, -0.5, 0.0, 1.0, -1.5], np.float32),
        "largest": np.array([0, 0.25, 0, 0, -0.5, 0, 0, 0, 0.125], np.float32),
    }


def changed(name: str, **arrays: Any) -> bytes:
    """The good update with other arrays; None leaves one out."""
    parts = dict(read_weights(encode_plain(LAYOUT, good())))
    parts |= {f"{name}/{key}" if key != "all" else name: array for key, array in arrays.items()}
    return write_weights({key: array for key, array in parts.items() if array is not None})


WRONG: dict[str, tuple[bytes, str]] = {
    "places_twice": (changed("largest", places=np.array([1, 1, 8], np.uint32)), "must grow and be below 9"),
    "places_fall": (changed("largest", places=np.array([4, 1, 8], np.uint32)), "must grow and be below 9"),
    "place_beyond": (changed("largest", places=np.array([1, 4, 9], np.uint32)), "must grow and be below 9"),
    "place_far_beyond": (changed("largest", places=np.array([1, 4, 2**32 - 1], np.uint32)), "must grow and be below 9"),
    "places_signed": (changed("largest", places=np.array([1, 4, 8], np.int32)), r"expected uint32\[3\]"),
    "four_places": (changed("largest", places=np.array([1, 4, 7, 8], np.uint32)), r"expected uint32\[3\]"),
    "no_places": (changed("largest", places=None), "has the arrays"),
    "not_a_number": (changed("largest", values=np.array([1, np.nan, 0], np.float32)), "is not a number up to"),
    "infinite": (changed("largest", values=np.array([1, np.inf, 0], np.float32)), "is not a number up to"),
    "beyond_range": (changed("largest", values=np.array([1.6, 0, 0], np.float32)), "is not a number up to 1.5"),
    "doubles": (changed("largest", values=np.zeros(3, np.float64)), r"expected float32\[3\]"),
    "least_code": (changed("turned", all=np.array([4, 0], np.uint8)), "has -4 steps, at most 3"),
    "left_bits": (changed("turned", all=np.array([0, 128], np.uint8)), "left of its last byte"),
    "three_bytes": (changed("turned", all=np.zeros(3, np.uint8)), r"expected uint8\[2\]"),
    "floats": (changed("turned", all=np.zeros(5, np.float32)), r"expected uint8\[2\]"),
}


def test_what_travels_comes_back() -> None:
    data = encode_plain(LAYOUT, good())
    assert len(data) == plain_size(LAYOUT)
    parts = read_weights(data)
    # 0.5 is a step, in three bits each from the low ones on: 1, -1, 0, 2, -3.
    assert step(TURNED) == 0.5
    assert parts["turned"].tolist() == [0b00_111_001 | (0b000 << 6), 0b0_101_010_0]
    assert parts["largest/places"].tolist() == [1, 4, 8]
    assert parts["largest/values"].tolist() == [0.25, -0.5, 0.125]
    for name, array in decode_plain(data, LAYOUT).items():
        np.testing.assert_array_equal(array, good()[name])


def test_fewer_elements_are_filled_up_and_more_refused() -> None:
    sent = to_wire(LARGEST, np.array([0, 0, 0, 0, 0, 0, 0, 0, 1], np.float32))
    assert sent["largest/places"].tolist() == [0, 1, 8]
    assert from_wire(LARGEST, sent).tolist() == [0] * 8 + [1]
    with pytest.raises(ProtocolError, match="4 elements are not 0, it may have 3"):
        encode_plain(LAYOUT, {**good(), "largest": np.array([1, 1, 1, 1, 0, 0, 0, 0, 0], np.float32) / 8})


def test_the_norm_of_what_is_sent_is_checked() -> None:
    sent = to_wire(LARGEST, np.array([1.4, 1.4, 1.4, 0, 0, 0, 0, 0, 0], np.float32))
    with pytest.raises(MessageError, match=r"the norm of its deltas is 2\.4"):
        decode_plain(write_weights(sent), Layout((LARGEST,)))


@pytest.mark.parametrize("name", WRONG)
def test_everything_else_is_refused(name: str) -> None:
    data, why = WRONG[name]
    with pytest.raises(MessageError, match=why):
        decode_plain(data, LAYOUT)
    # The files are what the fuzz test starts from; a change of the format has to show in them.
    assert (CORPUS / f"{name}.bin").read_bytes() == data


@given(count=st.integers(0, 50), bits=st.integers(1, 32), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_bits_are_those_of_one_long_number(count: int, bits: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 2**bits, count, np.uint32)
    data = pack_bits(numbers, bits)
    whole = sum(int(number) << (bits * i) for i, number in enumerate(numbers))
    assert data == whole.to_bytes(packed_size(count, bits), "little")
    np.testing.assert_array_equal(unpack_bits(np.frombuffer(data, np.uint8), count, bits), numbers)


@pytest.mark.parametrize("cases", [600, pytest.param(200_000, marks=pytest.mark.slow)])
def test_no_bytes_break_the_decoder_or_its_bounds(cases: int) -> None:
    generator = random.Random(5)
    files = [encode_plain(LAYOUT, good()), *(path.read_bytes() for path in sorted(CORPUS.glob("*.bin")))]
    taken = 0
    for _ in range(cases):
        data = bytearray(generator.choice(files))
        for _ in range(generator.randint(0, 3)):
            place = generator.randrange(len(data))
            data[place] = generator.choice((generator.randrange(256), data[place] ^ (1 << generator.randrange(8))))
        try:
            arrays = decode_plain(bytes(data), LAYOUT)
        except MessageError:
            continue
        taken += 1
        assert {name: (array.shape, array.dtype.name) for name, array in arrays.items()} == {
            "turned": ((5,), "float32"), "largest": ((9,), "float32"),
        }  # fmt: skip
        assert np.count_nonzero(arrays["largest"]) <= 3
        assert set(arrays["turned"].tolist()) <= {-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5}
        norm = np.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays.values()))
        # Rounding by chance may lengthen the rotated part.
        assert norm <= CLIP * 1.001 + 0.5 * (np.sqrt(5) / 2 + 12)
    assert 0 < taken < cases
