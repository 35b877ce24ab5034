from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets.npz import Column, read_npz
from archipel.errors import DatasetError

COLUMNS = {"x": Column("int16", (None, 2), 10), "n": Column("int64")}


def npy(array: np.ndarray, announced: str | None = None, version: tuple[int, int] = (1, 0)) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version, allow_pickle=True)
    data = stream.getvalue()
    if announced is not None:
        header = f"{{'descr': '<i2', 'fortran_order': False, 'shape': {announced}, }}".encode()
        data = data[:8] + (118).to_bytes(2, "little") + header.ljust(117) + b"\n" + data[128:]
    return data


def write(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


X = np.arange(6, dtype=np.int16).reshape(3, 2)
N = np.array(7)


def test_reads_what_numpy_writes(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "sound.npz", x=X, n=N, other=np.array(["not", "read"]))
        arrays = read_npz(tmp_path / "sound.npz", COLUMNS, "take another")
        assert sorted(arrays) == ["n", "x"]
        np.testing.assert_array_equal(arrays["x"], X)
        assert arrays["x"].dtype == np.int16
        assert not arrays["x"].flags.writeable
        assert arrays["n"].shape == ()
        assert int(arrays["n"]) == 7


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"n": npy(N)}, r"no array 'x' \(int16 \[n, 2\]\)"),
        ({"x": npy(X.astype(np.int32)), "n": npy(N)}, r"expected array 'x' as int16 .* it is int32 \[3, 2\]"),
        ({"x": npy(X.astype(">i2")), "n": npy(N)}, "it is >i2"),
        ({"x": npy(np.zeros((3, 3), np.int16)), "n": npy(N)}, r"it is int16 \[3, 3\]"),
        ({"x": npy(np.zeros((11, 2), np.int16)), "n": npy(N)}, r"n at most 10, it is int16 \[11, 2\]"),
        ({"x": npy(np.asfortranarray(X)), "n": npy(N)}, "in Fortran order"),
        ({"x": npy(np.array([{"a": 1}, None], object)), "n": npy(N)}, "it is object"),
        ({"x": npy(X, version=(2, 0)), "n": npy(N)}, r"format version 2\.0"),
        ({"x": b"no magic here", "n": npy(N)}, "'x' cannot be read"),
        ({"x": b"", "n": npy(N)}, "'x' cannot be read"),
        ({"x": npy(X)[:-4], "n": npy(N)}, "announces 12 bytes and has 8"),
        ({"x": npy(X) + b"more", "n": npy(N)}, "announces 12 bytes and has more"),
        ({"x": npy(X, "(3, 2"), "n": npy(N)}, "'x' cannot be read"),
        ({"x": npy(X, "(10**9, 2)"), "n": npy(N)}, "'x' cannot be read"),
        ({"x": npy(X, "(999999999999, 2)"), "n": npy(N)}, "n at most 10"),
        ({"x": npy(X, "(-1, 2)"), "n": npy(N)}, "it is int16"),
        ({"x": npy(X, "(True, 2)"), "n": npy(N)}, r"it is int16 \[True, 2\]"),
    ],
)
def test_an_array_that_is_not_as_expected_is_refused(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    path = write(tmp_path / "data.npz", **members)
    with pytest.raises(DatasetError, match=message) as caught:
        read_npz(path, COLUMNS, "take another")
    assert "data.npz" in str(caught.value)
    assert "take another" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\3\4 and no more", b"text"])
def test_what_is_no_zip_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"cannot read the data file .*data\.npz: .*; take another"):
        read_npz(path, COLUMNS, "take another")
    with pytest.raises(DatasetError, match="No such file or directory; take another"):
        read_npz(tmp_path / "absent.npz", COLUMNS, "take another")


def test_only_what_numpy_writes_is_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", npy(X))
        archive.writestr("n.npy", npy(N))
    with pytest.raises(DatasetError, match="compressed by method 14, not deflated; take another"):
        read_npz(tmp_path / "data.npz", COLUMNS, "take another")


@pytest.mark.sampled(every=4)
def test_what_a_file_announces_or_unpacks_to_is_not_allocated(tmp_path: Path) -> None:
    columns = {"x": Column("int16", (None, 2), 10**9)}
    announcing = write(tmp_path / "a.npz", x=npy(X, "(999999999, 2)"))
    bomb = write(tmp_path / "b.npz", x=npy(X) + bytes(200_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match="announces 3999999996 bytes and has 12"):
            read_npz(announcing, columns, "take another")
        with pytest.raises(DatasetError, match="has more"):
            read_npz(bomb, columns, "take another")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.sampled(every=3)
@settings(max_examples=200)
@given(st.data())
def test_mutations_are_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    stream = io.BytesIO()
    save = data.draw(st.sampled_from([np.savez, np.savez_compressed]))
    save(stream, x=X, n=N)
    mutated = bytearray(stream.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "mutated.npz"
    path.write_bytes(bytes(mutated))
    try:
        arrays = read_npz(path, COLUMNS, "take another")
    except DatasetError:
        return
    assert arrays["x"].dtype == np.int16
    assert arrays["x"].shape[1] == 2
    assert arrays["n"].dtype == np.int64
