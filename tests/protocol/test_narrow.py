"""Narrow vectors against Python's own integers: each entry in its bits, and sums that survive the cutting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.bundle.roles import Rotation, Update
from archipel.errors import MessageError, ProtocolError
from archipel.protocol.messages import RoundPlan
from archipel.protocol.narrow import masked_size, pack_masked, reduce_sum, unpack_masked
from archipel.protocol.secagg import add_masked
from archipel.protocol.vector import Layout


def layout(*ports: tuple[int, int]) -> Layout:
    """Of entries with so many elements and bits each; the first is a packed delta."""
    return Layout(
        tuple(
            Update(
                name=f"e{i}", tensor=f"e{i}", dtype="float32", shape=(count,), kind="value", weighting="uniform",
                range=1.0, bits=bits, carries=Rotation(parameters=(), block=1) if i == 0 else None,
            )
            for i, (count, bits) in enumerate(ports)
        )
    )  # fmt: skip


def plan(cohort: int, modulus: int, *, narrow: bool = True) -> RoundPlan:
    return RoundPlan(
        round_id="0" * 32, task_id="0" * 32, number=1, bundle="0" * 64, weights="0" * 64, privacy="secure",
        min_cohort=2, max_cohort=cohort, threshold=2, modulus_bits=modulus, narrow=narrow,
    )  # fmt: skip


def by_hand(vector: list[int], widths: list[tuple[int, int]]) -> bytes:
    parts, start = b"", 0
    for count, bits in widths:
        number = sum((entry % 2**bits) << (bits * i) for i, entry in enumerate(vector[start : start + count]))
        parts += number.to_bytes(-(-count * bits // 8), "little")
        start += count
    return parts


PORTS = st.lists(st.tuples(st.integers(0, 30), st.integers(2, 16)), min_size=1, max_size=4)


@given(ports=PORTS, cohort=st.integers(3, 500), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150)
@pytest.mark.sampled(every=4)
def test_entries_take_their_bits_and_sums_come_back(ports: list[tuple[int, int]], cohort: int, seed: int) -> None:
    where, rng = layout(*ports), np.random.default_rng(seed)
    widths = where.widths(cohort)
    for (_, own), (_, bits) in zip(ports, widths, strict=True):
        # As few bits as hold every sum from -most to most.
        most = cohort * (2 ** (own - 1) - 1)
        assert most < 2 ** (bits - 1) <= 2 * most
    modulus = where.modulus_bits(cohort)
    asked = plan(cohort, modulus)
    highest = np.concatenate([np.full(count, 2 ** (bits - 1) - 1, np.int64) for count, bits in ports])
    values = [rng.integers(-highest, highest, endpoint=True) for _ in range(3)]
    masks = [rng.integers(0, 2**modulus, where.length) for _ in range(2)]
    masks.append(-sum(masks))  # they cancel
    total = np.zeros(where.length, np.uint32)
    for value, mask in zip(values, masks, strict=True):
        vector = ((value + mask) % 2**modulus).astype(np.uint32)
        data = pack_masked(where, vector, asked)
        assert data == by_hand(vector.tolist(), widths)
        assert len(data) == masked_size(where, cohort, modulus, narrow=True)
        add_masked(total, unpack_masked(where, data, asked), modulus)
    found = reduce_sum(where, total, asked)
    assert found.tolist() == (sum(values) % 2**modulus).tolist()


@pytest.mark.sampled(every=4)
def test_long_vectors_are_packed_in_parts() -> None:
    where = layout((70_001, 3))
    asked = plan(10, where.modulus_bits(10))
    vector = np.random.default_rng(1).integers(0, 2**7, 70_001, np.uint32)
    data = pack_masked(where, vector, asked)
    assert data == by_hand(vector.tolist(), where.widths(10))
    assert unpack_masked(where, data, asked).tolist() == (vector % 2**6).tolist()


@given(data=st.binary(max_size=24))
@settings(max_examples=300)
def test_any_bytes_of_the_right_length_are_a_vector(data: bytes) -> None:
    where = layout((5, 4), (1, 9))
    asked = plan(10, where.modulus_bits(10))
    widths = where.widths(10)
    assert widths == [(5, 8), (1, 13)]
    if len(data) != 5 + 2:
        with pytest.raises(MessageError, match="expected 6 entries in 7 bytes"):
            unpack_masked(where, data, asked)
        return
    found = unpack_masked(where, data, asked)
    assert found.tolist() == [*data[:5], int.from_bytes(data[5:], "little") % 2**13]


def test_other_rounds_keep_whole_bytes() -> None:
    where = layout((5, 4), (1, 9))
    asked = plan(10, 16, narrow=False)
    vector = np.arange(6, dtype=np.uint32)
    data = pack_masked(where, vector, asked)
    assert data == vector.astype("<u2").tobytes()
    assert len(data) == masked_size(where, 10, 16, narrow=False)
    assert unpack_masked(where, data, asked).tolist() == vector.tolist()
    assert reduce_sum(where, vector, asked) is vector
    for wrong in (vector[:5], vector + np.uint32(2**16)):
        with pytest.raises(ProtocolError):
            pack_masked(where, wrong, plan(10, 16))
