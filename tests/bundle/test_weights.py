from __future__ import annotations

import json
import mmap
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from archipel.bundle import read_weights, release_pages, weights_layout, write_weights
from archipel.errors import TensorLayoutError

DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint64", "bool"]


@pytest.mark.sampled(every=3)
@given(
    st.dictionaries(
        st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20),
        st.sampled_from(DTYPES).flatmap(
            lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
        ),
        max_size=5,
    ).filter(lambda d: "__metadata__" not in d)
)
def test_what_is_written_is_read(tensors: dict[str, np.ndarray]) -> None:
    data = write_weights(tensors)
    assert data == write_weights(dict(reversed(tensors.items())))
    ours = read_weights(data)
    peer = safetensors.deserialize(data)
    assert ours.keys() == tensors.keys() == dict(peer).keys()
    for name, entry in peer:
        assert ours[name].tobytes() == bytes(entry["data"]) == tensors[name].tobytes()
        assert ours[name].dtype == tensors[name].dtype
        assert ours[name].shape == tensors[name].shape
        assert not ours[name].flags.writeable


def test_a_file_is_mapped_and_offsets_point_into_it(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = write_weights({"a": values, "b": np.ones(3, np.int8)})
    (tmp_path / "w").write_bytes(data)
    np.testing.assert_array_equal(read_weights(tmp_path / "w")["a"], values)
    place = weights_layout(data, len(data))["a"]
    assert data[place.offset : place.offset + place.nbytes] == values.tobytes()


def build(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "too short"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header length"),
        (struct.pack("<Q", 1) + b"{", "header length"),
        (build(b"{{", b""), "header"),
        (build({"a": F32}, b"1234567"), "end at byte"),
        (build({"a": F32}, b"12345678extra"), "end at byte"),
        (build({"a": {**F32, "dtype": "F8"}}, b"12345678"), "'F8'"),
        (build({"a": {**F32, "extra": 1}}, b"12345678"), "extra"),
        (build({"a": {**F32, "shape": [3]}}, b"12345678"), "needs 12 bytes"),
        (build({"a": {**F32, "shape": [-2]}}, b"12345678"), "shape"),
        (build({"a": {**F32, "shape": [1] * 9}}, b"12345678"), "rank"),
        (build({"a": {**F32, "shape": [1 << 31, 1 << 31]}}, b"12345678"), "bytes"),
        (build({"a": {**F32, "data_offsets": [-8, 0]}}, b""), "offsets"),
        (build({"a": F32, "b": F32}, b"12345678"), "starts at byte"),
        (build({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, b"1" * 20), "starts at byte"),
        (build({"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]},
                "b": {**F32, "data_offsets": [1, 9]}}, b"1" * 9), "misaligned"),
        (build({"": F32}, b"12345678"), "printable"),
        (build({"x" * 288: {**F32, "dtype": "F8"}}, b"12345678"), "'F8'"),  # the longest name that is allowed
        (build({"x" * 289: F32}, b"12345678"), "printable"),
        (build({"a\x1b[2J": F32}, b"12345678"), "printable"),
        (build({"a": {**F32, "data_offsets": [0, 16]}}, b"12345678"), "offsets give 16"),
    ],
)  # fmt: skip
def test_broken_files_are_named(data: bytes, text: str) -> None:
    with pytest.raises(TensorLayoutError) as caught:
        read_weights(data)
    assert text in str(caught.value)


def test_limit_comes_before_reading(tmp_path: Path) -> None:
    data = write_weights({"a": np.zeros(100, np.float32)})
    (tmp_path / "w").write_bytes(data)
    for source in (data, tmp_path / "w"):
        with pytest.raises(TensorLayoutError, match="100"):
            read_weights(source, max_bytes=100)
    with pytest.raises(TensorLayoutError, match="cannot be read"):
        read_weights(tmp_path / "missing")


def test_mutations_raise_only_the_documented_error() -> None:
    draw = random.Random(1)
    data = write_weights({"a": np.arange(5, dtype=np.float32), "b": np.ones((2, 2), np.int8), "c": np.array(3.0)})
    for _ in range(2000):
        mutated = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            mutated[draw.randrange(min(len(mutated), 220))] = draw.randrange(256)
        try:
            read_weights(bytes(mutated[: draw.randint(0, len(mutated))] if draw.random() < 0.3 else mutated))
        except TensorLayoutError:
            continue


def test_unknown_dtype_is_refused_when_writing() -> None:
    with pytest.raises(TensorLayoutError, match="complex64"):
        write_weights({"a": np.zeros(2, np.complex64)})


def resident_kilobytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system cannot release pages")
def test_released_pages_come_back(tmp_path: Path) -> None:
    values = np.arange(1 << 22, dtype=np.float32)
    (tmp_path / "w").write_bytes(write_weights({"w": values}))
    array = read_weights(tmp_path / "w")["w"]
    before = resident_kilobytes()
    assert array.sum() == values.sum()
    assert resident_kilobytes() > before + 8000
    release_pages(array)
    assert resident_kilobytes() < before + 4000
    np.testing.assert_array_equal(array, values)
    release_pages(values)  # of no file
