"""From what the server says and what is here to the steps that make a file: never a gap, never a byte twice."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel import bundle as b
from archipel.bundle.ranges import MAX_CUT_BYTES, MIN_CUT_BYTES, MIN_RANGE_BYTES, shareable_ranges
from archipel.client.downloads.piece_index import PieceIndex, Place
from archipel.client.downloads.pieces import MAX_FETCHES, plan
from archipel.protocol.messages import Piece
from archipel.server.storage.pieces import pieces_of

numbers = st.integers(0, 60)


@settings(max_examples=500)
@given(
    size=st.integers(0, 50),
    said=st.lists(st.tuples(numbers, st.integers(1, 20), st.booleans()), max_size=100),
)
@pytest.mark.sampled(every=8)
def test_steps_make_the_whole_file_once(size: int, said: list[tuple[int, int, bool]]) -> None:
    """Whatever the server says: each byte in exactly one step, in order, few requests, copies only of whole pieces."""
    pieces = [Piece(offset=o, length=n, sha256=f"{index:064x}") for index, (o, n, _) in enumerate(said)]
    there = {p.sha256: Place(Path(p.sha256), 7) for p, (*_, here) in zip(pieces, said, strict=True) if here}
    steps = plan(size, pieces, there)
    assert [byte for step in steps for byte in range(step.start, step.stop)] == list(range(size))
    assert all(step.stop > step.start for step in steps)
    assert sum(step.place is None for step in steps) <= MAX_FETCHES
    by_name = {piece.sha256: piece for piece in pieces}
    for step in steps:
        if step.place is not None:
            piece = by_name[step.place.file.name]
            assert (step.start, step.stop) == (piece.offset, piece.offset + piece.length)
            assert step.place.offset == 7


def test_the_smallest_parts_are_fetched_where_requests_would_be_too_many() -> None:
    lengths = [10 + index for index in range(3 * MAX_FETCHES)]
    pieces, at = [], 0
    for index, length in enumerate(lengths):
        pieces.append(Piece(offset=at + 1, length=length, sha256=f"{index:064x}"))
        at += 1 + length
    steps = plan(at, pieces, {piece.sha256: Place(Path(piece.sha256), 0) for piece in pieces})
    assert sum(step.place is None for step in steps) == MAX_FETCHES
    kept = {step.place.file.name for step in steps if step.place is not None}
    assert kept == {piece.sha256 for piece in pieces[-MAX_FETCHES:]}


def tensors(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    large = {f"large{n}": rng.standard_normal((100, 64)).astype(np.float32) for n in range(3)}
    return {**large, "small": rng.standard_normal(500).astype(np.float32)}


def naive_cuts(data: bytes) -> set[int]:
    """Where the sum of the last 32 bytes' numbers, each twice as much as the one after it, begins with 13 zero bits."""
    numbers = [int(hashlib.sha256(bytes([n])).hexdigest()[:8], 16) for n in range(256)]
    return {
        end
        for end in range(1, len(data) + 1)
        if sum(numbers[data[end - 1 - k]] << k for k in range(min(32, end))) % 2**32 < 2**19
    }


@pytest.mark.parametrize("size", [0, 1, 40, 5_000, 300_000])
@pytest.mark.sampled(every=6)
def test_other_files_are_cut_where_their_bytes_say(tmp_path: Path, size: int) -> None:
    data = b"{}" + np.random.default_rng(size).bytes(size)
    path = tmp_path / "any"
    path.write_bytes(data)
    expected, begin, cuts = [], 0, naive_cuts(data)
    for end in range(1, len(data) + 1):
        may = end - begin >= MIN_CUT_BYTES and end <= len(data) - MIN_CUT_BYTES
        if end == len(data) or end - begin == MAX_CUT_BYTES or (may and end in cuts):
            expected.append((begin, end - begin))
            begin = end
    assert shareable_ranges(path) == [each for each in expected if each[1] >= MIN_RANGE_BYTES]
    assert len(expected) >= size // 20_000


def test_what_is_the_same_gives_the_same_parts_wherever_it_lies(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(400_000)
    path = tmp_path / "any"

    def parts(content: bytes) -> set[bytes]:
        path.write_bytes(content)
        return {content[offset : offset + length] for offset, length in shareable_ranges(path)}

    before = parts(data)
    for changed in (b"more" + data, data[:200_000] + data[200_007:], data[:90_000] + b"x" + data[90_001:]):
        assert sum(map(len, before - parts(changed))) < 3 * MAX_CUT_BYTES
    assert parts(bytes(300_000)) <= {bytes(MAX_CUT_BYTES), bytes(300_000 % MAX_CUT_BYTES)}


def test_ranges_are_the_tensors_bytes_and_what_is_between(tmp_path: Path) -> None:
    made = {**tensors(0), "middle": np.arange(100, dtype=np.float32), "tiny": np.ones(1, np.float32)}
    path = tmp_path / "weights"
    path.write_bytes(b.write_weights(made))
    data = path.read_bytes()
    found = [data[offset : offset + length] for offset, length in shareable_ranges(path)]
    *large, rest = (made[name].tobytes() for name in ("large0", "large1", "large2", "middle"))
    header = data[: data.index(large[0])]
    assert found == [header, *large, rest + made["small"].tobytes() + made["tiny"].tobytes()]
    for damaged in (data[:-1], data[:3000], b"", b"PK\x03\x04" + data, data[:8] + b"[" + data[9:], bytes(8) + data):
        path.write_bytes(damaged)
        ranges = shareable_ranges(path)
        assert all(length <= MAX_CUT_BYTES for _, length in ranges)
        assert sum(length for _, length in ranges) <= len(damaged)


def test_ranges_of_a_bundle_file_are_those_of_its_members(tmp_path: Path) -> None:
    made = tensors(1)
    path = tmp_path / "x.bundle"
    graph = np.random.default_rng(1).bytes(60_000)
    (tmp_path / "train.onnx").write_bytes(graph)
    (tmp_path / "weights").write_bytes(b.write_weights(made))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("manifest.json", b"{}")
        archive.writestr("manifest.sig", b"s" * 64)
        archive.write(tmp_path / "train.onnx", "train.onnx")
        archive.writestr("tiny.onnx", graph[:50])
        archive.write(tmp_path / "weights", "weights.safetensors")
    data = path.read_bytes()
    said = pieces_of(path)
    assert said.size == len(data)
    assert all(hashlib.sha256(data[p.offset : p.offset + p.length]).hexdigest() == p.sha256 for p in said.pieces)
    unpacked = {p.sha256 for name in ("train.onnx", "weights") for p in pieces_of(tmp_path / name).pieces}
    assert {p.sha256 for p in said.pieces} == unpacked
    assert sum(p.length for p in said.pieces) > len(data) - 3000
    # Members that claim more than there is.
    for at in range(0, len(data), 997):
        changed = bytearray(data)
        changed[at] ^= 0xFF
        path.write_bytes(bytes(changed))
        assert all(offset + length <= len(data) for offset, length in shareable_ranges(path))


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, PieceIndex, list[Piece]]:
    """A file of an index, the index, and what the server says of that file."""
    path = tmp_path / "blobs" / "first"
    path.parent.mkdir()
    path.write_bytes(b.write_weights(tensors(2)))
    index = PieceIndex(tmp_path / "pieces", [path.parent])
    return path, index, pieces_of(path).pieces


def test_found_are_only_those_whose_bytes_are_here(stored: tuple[Path, PieceIndex, list[Piece]]) -> None:
    path, index, pieces = stored
    foreign = Piece(offset=0, length=pieces[0].length, sha256="f" * 64)
    other_length = Piece(offset=0, length=5, sha256=pieces[0].sha256)
    expected = {piece.sha256: Place(path, piece.offset) for piece in pieces}
    assert index.find([*pieces, foreign]) == expected
    assert index.find([other_length]) == {}
    changed = bytearray(path.read_bytes())
    changed[pieces[1].offset] ^= 1
    path.write_bytes(bytes(changed))
    del expected[pieces[1].sha256]
    assert index.find(pieces) == expected
    path.unlink()
    assert index.find(pieces) == {}


def test_files_are_read_once_and_lists_that_are_lost_or_damaged_are_made_again(
    stored: tuple[Path, PieceIndex, list[Piece]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, index, pieces = stored
    expected = index.find(pieces)
    assert len(expected) == len(pieces)
    kept = path.parent.parent / "pieces" / "first"
    right = kept.read_bytes()
    with monkeypatch.context() as without:
        without.setattr("archipel.client.downloads.piece_index.shareable_ranges", None)
        again = PieceIndex(kept.parent, [path.parent])
        assert again.find(pieces) == expected
    for wrong in (b"", right[:-1], right + b"x", b"\x90", bytes(100), msgspec.msgpack.encode([("gone", 0, 4, b"")])):
        kept.write_bytes(wrong)
        again.find(pieces)
        again.find(pieces)
    kept.write_bytes(right[:-1])
    assert again.find(pieces) == expected
    assert kept.read_bytes() == right
    moved = [("", piece.offset + 1, piece.length, bytes.fromhex(piece.sha256)) for piece in pieces]
    for wrong in (moved, [("gone", *part[1:]) for part in moved], [("", -1, *part[2:]) for part in moved]):
        kept.write_bytes(msgspec.msgpack.encode(wrong))
        assert again.find(pieces) == {}
        assert again.find(pieces) == expected
    path.unlink()
    again.find(pieces)
    assert not kept.exists()
