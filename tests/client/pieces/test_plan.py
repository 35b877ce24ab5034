"""From what the server says and what is here to the steps that make a file: never a gap, never a byte twice."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel import bundle as b
from archipel.bundle.ranges import MIN_RANGE_BYTES, shareable_ranges
from archipel.client.pieces import MAX_FETCHES, Place, find, plan
from archipel.protocol.messages import Piece
from archipel.server.pieces import pieces_of

numbers = st.integers(0, 60)


@settings(max_examples=500, deadline=None)
@given(
    size=st.integers(0, 50),
    said=st.lists(st.tuples(numbers, st.integers(1, 20), st.booleans()), max_size=100),
)
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
    return {**large, "small": rng.standard_normal(5).astype(np.float32)}


def test_ranges_are_the_tensors_bytes(tmp_path: Path) -> None:
    made = tensors(0)
    path = tmp_path / "weights"
    path.write_bytes(b.write_weights(made))
    data = path.read_bytes()
    found = {data[offset : offset + length] for offset, length in shareable_ranges(path)}
    assert found == {array.tobytes() for name, array in made.items() if name != "small"}
    for damaged in (data[:-1], data[:100], b"", b"PK\x03\x04" + data, data[:8] + b"[" + data[9:], bytes(8) + data):
        path.write_bytes(damaged)
        assert shareable_ranges(path) == []


def test_ranges_of_a_bundle_file_are_tensors_and_larger_members(tmp_path: Path) -> None:
    """Against zipfile's own reading, and the tensors' bytes."""
    import zipfile

    from archipel.bundle import write_weights

    made = tensors(1)
    path = tmp_path / "x.bundle"
    graph = bytes(range(256)) * 100
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("manifest.json", b"{}")
        archive.writestr("manifest.sig", b"s" * 64)
        archive.writestr("train.onnx", graph)
        archive.writestr("tiny.onnx", graph[:50])
        archive.writestr("weights.safetensors", write_weights(made))
    data = path.read_bytes()
    found = {data[offset : offset + length] for offset, length in shareable_ranges(path)}
    assert found == {graph, *(array.tobytes() for name, array in made.items() if name != "small")}
    assert len(graph) > MIN_RANGE_BYTES
    said = pieces_of(path)
    assert said.size == len(data)
    assert {hashlib.sha256(data[p.offset : p.offset + p.length]).hexdigest() for p in said.pieces} == {
        p.sha256 for p in said.pieces
    }
    # Members that claim more than there is.
    for at in range(0, len(data), 997):
        changed = bytearray(data)
        changed[at] ^= 0xFF
        path.write_bytes(bytes(changed))
        assert all(offset + length <= len(data) for offset, length in shareable_ranges(path))


def test_found_are_only_those_whose_bytes_are_here(tmp_path: Path) -> None:
    made = tensors(2)
    path = tmp_path / "weights"
    path.write_bytes(b.write_weights(made))
    pieces = pieces_of(path).pieces
    foreign = Piece(offset=0, length=pieces[0].length, sha256="f" * 64)
    found = find([*pieces, foreign], [tmp_path / "gone", path])
    assert found == {piece.sha256: Place(path, piece.offset) for piece in pieces}
    changed = bytearray(path.read_bytes())
    changed[pieces[1].offset] ^= 1
    path.write_bytes(bytes(changed))
    assert set(find(pieces, [path])) == {pieces[0].sha256, pieces[2].sha256}
