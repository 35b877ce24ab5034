"""Arrow IPC files in both forms, and NumPy's files: mapped, validated, and refused where damaged."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets import ArrayDataset, Batches, as_dataset, open_arrays, open_arrow, open_file
from archipel.errors import DatasetError

TABLE = pa.table(
    {
        "x": pa.array([[i, i + 1] for i in range(10)], pa.list_(pa.float32(), 2)),
        "kind": ["ab"[i % 2] for i in range(10)],
        "beats": [[1.0] * (i % 3) for i in range(10)],
    }
)


def arrow(form: str, compression: str | None = None) -> bytes:
    sink = io.BytesIO()
    make = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with make(sink, TABLE.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(TABLE, max_chunksize=4)
    return sink.getvalue()


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("form", ["file", "stream"])
def test_both_forms(tmp_path: Path, form: str, compression: str | None) -> None:
    (tmp_path / "t.arrow").write_bytes(arrow(form, compression))
    data = open_file(tmp_path / "t.arrow")
    assert data.blocks.tolist() == [0, 4, 8, 10]
    taken = data.take(np.array([9, 0, 5]))
    assert taken["x"].tolist() == [[9, 10], [0, 1], [5, 6]]
    assert taken["kind"].tolist() == [1, 0, 1]
    assert taken["beats"].tolist() == [[0, 0], [0, 0], [1, 1]]
    assert data.locate(9) == f"{tmp_path / 't.arrow'}, row 9"
    assert data.fields["kind"].classes == ("a", "b")
    assert list(open_arrow(tmp_path / "t.arrow", columns=["kind"]).fields) == ["kind"]
    again = pickle.loads(pickle.dumps(data))
    assert sorted(label for batch in Batches(again, 3, drop_last=False) for label in batch["kind"]) == [0] * 5 + [1] * 5


@pytest.mark.parametrize("form", ["file", "stream"])
def test_a_name_that_is_no_text(tmp_path: Path, form: str) -> None:
    (tmp_path / "t.arrow").write_bytes(arrow(form).replace(b"kind", b"\xebind"))
    with pytest.raises(DatasetError, match=r"t\.arrow: 'utf-8' codec .*; make the file again"):
        open_arrow(tmp_path / "t.arrow")


@pytest.mark.sampled(every=3)
@settings(max_examples=60)
@given(st.data())
def test_mutated_arrow_files_are_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    form, compression = (
        data.draw(st.sampled_from(["file", "stream"])),
        data.draw(st.sampled_from([None, "zstd", "lz4"])),
    )
    content = bytearray(arrow(form, compression))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "mutated.arrow"
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) // 2, 3]))])
    try:
        read = open_arrow(path)
        taken = read.take(np.arange(min(len(read), 1000)))
    except DatasetError:
        return
    assert all(field.fits(taken[name]) for name, field in read.fields.items())


def test_maps_of_numpy_files(tmp_path: Path) -> None:
    x = np.arange(24, dtype=">i2").reshape(4, 3, 2)
    for name, array in {"x": x, "y": np.asfortranarray(x), "label": np.arange(4), "empty": np.zeros((4, 0))}.items():
        np.save(tmp_path / f"{name}.npy", array)
    data = as_dataset(tmp_path)
    assert isinstance(data, ArrayDataset)
    assert isinstance(data.arrays["x"], np.memmap)
    taken = data.take(np.array([3, 1]))
    assert taken["x"].dtype == np.int16
    assert np.array_equal(taken["x"], x[[3, 1]])
    assert np.array_equal(taken["y"], x[[3, 1]])
    assert taken["empty"].shape == (2, 0)
    np.savez_compressed(tmp_path / "both.npz", x=x, label=np.arange(4))
    packed = open_arrays(tmp_path / "both.npz", classes={"label": "abcd"})
    assert np.array_equal(packed.take(np.array([2]))["x"], x[[2]])
    assert packed.fields["label"].classes == ("a", "b", "c", "d")
    assert list(open_arrays(tmp_path / "x.npy").fields) == ["input"]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def test_numpy_files_that_are_refused(tmp_path: Path) -> None:
    sound = npy(np.arange(4))
    for content, message in (
        (b"", "no .npy file"),
        (sound[:-1], r"int64\[4\] needs 32 bytes, it has 31"),
        (sound + b"\0", "needs 32 bytes, it has 33"),
        (npy(np.array([{}])), "object elements"),
        (npy(np.array(["text"])), "<U4 elements"),
        (npy(np.float32(3)), r"its shape is \[\]"),
        (sound.replace(b"(4,)", b"(-4,)"), "first axis|no .npy file"),
    ):
        (tmp_path / "t.npy").write_bytes(content)
        with pytest.raises(DatasetError, match=message) as caught:
            open_arrays(tmp_path / "t.npy")
        assert str(tmp_path / "t.npy") in str(caught.value)
        with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
            archive.writestr("x.npy", content)
        with pytest.raises(DatasetError, match=r"t\.npz"):
            open_arrays(tmp_path / "t.npz")
    for name in ("nothing.npy", "nothing.npz", "nothing.arrow", "nothing.csv"):
        with pytest.raises(DatasetError, match=rf"{name}: No such file"):
            open_file(tmp_path / name)
    with pytest.raises(DatasetError, match=r"\.csv, .*name it so"):
        open_file(tmp_path / "t.docx")
    with pytest.raises(DatasetError, match="open_arrays has no option 'columns'; it has classes"):
        open_file(tmp_path / "t.npy", columns=["x"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(DatasetError, match="nothing in this folder"):
        open_file(tmp_path / "folder")


@settings(max_examples=60)
@given(st.data())
def test_mutated_numpy_files_are_refused_or_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    content = bytearray(npy(np.arange(12, dtype=np.float32).reshape(4, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    if packed := data.draw(st.booleans()):
        with zipfile.ZipFile(folder / "mutated.npz", "w") as archive:
            archive.writestr("input.npy", bytes(content))
    else:
        (folder / "mutated.npy").write_bytes(content)
    try:
        read = open_arrays(folder / ("mutated.npz" if packed else "mutated.npy"))
    except DatasetError:
        return
    assert read.take(np.arange(len(read)))["input"].nbytes == 48
