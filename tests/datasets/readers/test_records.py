"""Record files and Parquet files of others: what was written comes back, damage is named by file, row and column."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from archipel.datasets import ArrayDataset, Batches, Field, open_parquet, write_records
from archipel.datasets.dataset import Arrays
from archipel.datasets.readers.schema import DTYPES, decode_schema, encode_schema
from archipel.errors import DatasetError

CORPUS = Path(__file__).parent / "corpus"


@settings(max_examples=40)
@given(st.data())
@pytest.mark.sampled(every=4)
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    count = data.draw(st.integers(1, 30))
    arrays = {}
    for number in range(data.draw(st.integers(1, 3))):
        dtype, shape = data.draw(st.sampled_from(DTYPES)), data.draw(hnp.array_shapes(min_dims=0, max_side=3))
        order = data.draw(st.sampled_from("<>"))
        arrays[f"f{number}"] = data.draw(hnp.arrays(np.dtype(dtype).newbyteorder(order), (count, *shape)))
    assert write_records(arrays, path, group_bytes=data.draw(st.integers(1, 200))) == count
    read = open_parquet(path, memory=data.draw(st.integers(1, 1000)))
    rows = np.array(data.draw(st.lists(st.integers(0, count - 1))), np.intp)
    taken = read.take(rows)
    for name, array in arrays.items():
        assert str(read.fields[name]) == str(Field(array.dtype.newbyteorder("="), array.shape[1:]))
        assert taken[name].tobytes() == array[rows].astype(taken[name].dtype).tobytes()


class Words:
    """A stream of examples of different lengths, with the names of classes."""

    fields = {
        "sound": Field(np.dtype(np.int16), (None, 2)),
        "sound_length": Field(np.dtype(np.int64)),
        "label": Field(np.dtype(np.int64), (), ("no", "yes")),
    }

    def read(self, start: int = 0) -> Iterator[Arrays]:
        for row in range(start, 9):
            yield {
                "sound": np.full((1, row, 2), row, np.int16),
                "sound_length": np.array([row]),
                "label": np.array([row % 2]),
            }


def test_examples_of_different_lengths(tmp_path: Path) -> None:
    write_records(Words(), tmp_path / "words.parquet", group_bytes=30)
    data = open_parquet(tmp_path / "words.parquet")
    assert data.fields == Words.fields
    taken = data.take(np.array([2, 0, 3]))
    assert taken["sound_length"].tolist() == [2, 0, 3]
    assert taken["sound"][:, :, 0].tolist() == [[2, 2, 0], [0, 0, 0], [3, 3, 3]]
    assert taken["label"].tolist() == [0, 0, 1]
    # Its own output is read the same a second time.
    write_records(data, tmp_path / "again.parquet")
    assert (
        open_parquet(tmp_path / "again.parquet").take(np.array([2, 0, 3]))["sound"].tolist() == taken["sound"].tolist()
    )


def test_tables_of_others(tmp_path: Path) -> None:
    table = pa.table(
        {
            "age": pa.array([39, 50, 38, 53], pa.int32()),
            "pay": pa.array([1.5, 2.0, 3.25, -1.0], pa.float64()),
            "price": pa.array(["1.25", "2.50", "3.75", "0.00"]).cast(pa.decimal128(10, 2)),
            "member": pa.array([True, False, True, True]),
            "pixels": pa.array([[[1, 2], [3, 4]]] * 3 + [[[5, 6], [7, 8]]], pa.list_(pa.list_(pa.uint8(), 2), 2)),
            "beats": pa.array([[1.0], [], [2.0, 3.0], [4.0]], pa.list_(pa.float32())),
            "kind": pa.array(["dog", "cat", "dog", "ant"]),
            "code": pa.array(["x", "y", "x", "x"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    pq.write_table(table.slice(1), tmp_path / "b.parquet", row_group_size=2)
    data = open_parquet(tmp_path)
    assert len(data) == 7
    assert [data.locate(row) for row in (0, 3, 4, 6)] == [
        f"{tmp_path / 'a.parquet'}, row 0", f"{tmp_path / 'a.parquet'}, row 3",
        f"{tmp_path / 'b.parquet'}, row 0", f"{tmp_path / 'b.parquet'}, row 2",
    ]  # fmt: skip
    assert str(data.fields["pixels"]) == "uint8[2, 2]"
    assert data.fields["kind"].classes == ("ant", "cat", "dog")
    taken = data.take(np.array([6, 2, 1]))
    assert taken["age"].tolist() == [53, 38, 50]
    assert taken["price"].tolist() == [0.0, 3.75, 2.5]
    assert taken["member"].tolist() == [True, True, False]
    assert taken["pixels"].tolist() == [[[5, 6], [7, 8]], [[1, 2], [3, 4]], [[1, 2], [3, 4]]]
    assert taken["beats"].tolist() == [[4, 0], [2, 3], [0, 0]]
    assert taken["beats_length"].tolist() == [1, 2, 0]
    assert taken["kind"].tolist() == [0, 2, 1]
    assert taken["code"].tolist() == [0, 0, 1]
    chosen = open_parquet(tmp_path, columns=["kind"], classes={"kind": ["dog", "cat", "ant"]})
    assert list(chosen.fields) == ["kind"]
    assert chosen.take(np.arange(4))["kind"].tolist() == [0, 1, 0, 2]
    assert pickle.loads(pickle.dumps(data)).take(np.array([6]))["age"].tolist() == [53]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(2, 3, 2))
    pq.write_table(pa.table({"t": tensors}), tmp_path / "t.parquet")
    assert np.array_equal(open_parquet(tmp_path / "t.parquet").take(np.arange(2))["t"], np.arange(12).reshape(2, 3, 2))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None, 3, None]), r"t\.parquet, row 1: column 'x': no value \(and 1 more rows\); fill it in"),
        (pa.array([[1], [None, 2], [3], []]), r"row 1: column 'x': no value;"),
        (pa.array([[1, 2], [1, 2], None, [1, 2]], pa.list_(pa.int8(), 2)), r"row 2: column 'x': no value;"),
        (pa.array([[1, 2], [1, 2], [1, 2], [1, None]], pa.list_(pa.int8(), 2)), r"row 3: column 'x': no value;"),
        (pa.array(["a", "b", "c", "a"]), r"row 2: column 'x': 'c' is none of the classes a, b; add it"),
        (
            pa.array([1, 2, 3, 4], pa.timestamp("ms")),
            r"column 'x' is timestamp\[ms\], which can be no field; leave it out",
        ),
        (pa.array([b"a", b"b", b"c", b"d"]), "column 'x' is binary, which can be no field"),
    ],
)
def test_rows_and_columns_that_cannot_be_read(tmp_path: Path, column: pa.Array, message: str) -> None:
    pq.write_table(pa.table({"x": column}), tmp_path / "t.parquet")
    with pytest.raises(DatasetError, match=message):
        open_parquet(tmp_path / "t.parquet", classes={"x": ["a", "b"]}).take(np.arange(4))


def test_what_is_missing_or_no_parquet(tmp_path: Path) -> None:
    write_records({"x": np.arange(9)}, tmp_path / "x.parquet")
    whole = (tmp_path / "x.parquet").read_bytes()
    with pytest.raises(DatasetError, match=r"no column 'y'; it has 'x'"):
        open_parquet(tmp_path / "x.parquet", columns=["y"])
    with pytest.raises(DatasetError, match=r"nothing\.parquet: No such file"):
        open_parquet(tmp_path / "nothing.parquet")
    for content in (b"", b"PAR1", whole[:-1], whole[:-8] + b"\xff\xff\xff\x7fPAR1", whole[:-8] + bytes(4) + b"PAR1"):
        (tmp_path / "y.parquet").write_bytes(content)
        with pytest.raises(DatasetError, match=r"y\.parquet"):
            open_parquet(tmp_path / "y.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"no \*\.parquet in this folder"):
        open_parquet(tmp_path / "empty")
    with pytest.raises(DatasetError, match="there are no examples to write"):
        write_records({"x": np.zeros(0)}, tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").read_bytes() == whole
    with pytest.raises(DatasetError, match="field 'x' is complex"):
        write_records(type("C", (), {"fields": {"x": Field(np.dtype(complex))}, "read": lambda self: iter(())})(), "x")


@pytest.mark.parametrize(
    ("column", "changes", "message"),
    [
        (
            pa.array([b"abcd"], pa.binary(4)),
            {"shape": [3]},
            r"is fixed_size_binary\[4\], but archipel's schema says uint8\[3\]; convert",
        ),
        (pa.array([b"abcd"], pa.binary(4)), {"shape": [None]}, r"schema says uint8\[n\]"),
        (pa.array([b"abcd"]), {"shape": [4]}, r"schema says uint8\[4\]"),
        (pa.array([b"abcd"]), {"shape": [None, 3]}, "its bytes are no multiple of 3; convert"),
        (pa.array([b"abcd"]), {"shape": []}, r"schema says uint8\[\]"),
        (pa.array([[1, 2]], pa.list_(pa.uint8(), 2)), {"shape": [3]}, "schema says"),
        (pa.array([1.5]), {"shape": [3]}, "schema says"),
        (pa.array([1.5]), {"shape": [], "dtype": "int8"}, "schema says"),
        (pa.array(["a"]), {"shape": []}, "schema says"),
        (pa.array([1], pa.timestamp("ms")), {"shape": []}, "schema says"),
        (pa.array([{"a": 1}]), {"shape": [1]}, "schema says"),
    ],
)
def test_a_schema_that_lies_about_its_column(tmp_path: Path, column: pa.Array, changes: dict, message: str) -> None:
    field = {"name": "x", "dtype": "uint8", "shape": [], "classes": [], **changes}
    metadata = {"archipel.records": json.dumps({"version": 1, "fields": [field]})}
    table = pa.table({"x": column}).replace_schema_metadata(metadata)
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DatasetError, match=rf"t\.parquet.*column 'x'.*{message}"):
        open_parquet(tmp_path / "t.parquet").take(np.arange(1))


@pytest.mark.sampled(every=3)
@settings(max_examples=50)
@given(st.data())
def test_mutated_files_are_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.parquet"
    write_records({"x": np.arange(40, dtype=np.int16).reshape(20, 2), "y": np.arange(20)}, path, group_bytes=80)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        read = open_parquet(path)
        taken = read.take(np.arange(min(len(read), 1000)))
    except DatasetError:
        return
    assert all(field.fits(taken[name]) for name, field in read.fields.items())


@pytest.mark.parametrize("path", sorted(CORPUS.glob("schema-*.json")), ids=lambda path: path.stem)
def test_schemas_of_the_corpus(path: Path) -> None:
    if "sound" in path.stem:
        fields = decode_schema(path.read_bytes(), "here")
        assert json.loads(encode_schema(fields)) == json.loads(path.read_bytes())
    else:
        with pytest.raises(DatasetError, match=r"^here: .*; |^here: .*, expected"):
            decode_schema(path.read_bytes(), "here")


@settings(max_examples=100)
@given(st.data())
def test_mutated_schemas_are_refused_or_whole(data: st.DataObject) -> None:
    content = bytearray((CORPUS / "schema-sound.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        fields = decode_schema(bytes(content), "here")
    except DatasetError:
        return
    assert decode_schema(encode_schema(fields), "here") == fields


@pytest.mark.sampled(every=3)
def test_a_file_larger_than_the_memory_for_it(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (4000, 4096), np.uint8)
    write_records({"x": x, "row": np.arange(4000)}, tmp_path / "x.parquet", group_bytes=256 << 10, compression="none")
    data = open_parquet(tmp_path / "x.parquet", memory=2 << 20)
    before = pa.total_allocated_bytes()
    most, seen = 0, []
    for batch in Batches(data, 50, seed=1):
        most = max(most, pa.total_allocated_bytes() - before)
        seen.append(batch["row"])
        assert np.array_equal(batch["x"][0], x[batch["row"][0]])
    assert sorted(np.concatenate(seen).tolist()) == list(range(4000))
    assert most < 4 << 20


def test_a_few_bytes_that_stand_for_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipel.datasets.readers.parquet.MAX_GROUP_BYTES", 1_000_000)
    zeros = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, np.int8)), pa.array([0.0]))
    pq.write_table(pa.table({"x": zeros}), tmp_path / "x.parquet", row_group_size=200_000)
    assert (tmp_path / "x.parquet").stat().st_size < 5_000
    with pytest.raises(DatasetError, match="row group 0 takes 1600000 bytes, the limit is 1000000; write it again"):
        open_parquet(tmp_path / "x.parquet")


def test_a_write_that_fails_leaves_the_file(tmp_path: Path) -> None:
    class Breaking(ArrayDataset):
        def take(self, rows: np.ndarray) -> Arrays:
            if rows[-1] >= 3:
                raise ValueError("boom")
            return super().take(rows)

    write_records({"x": np.arange(2)}, tmp_path / "x.parquet")
    with pytest.raises(DatasetError, match="row 3: ValueError: boom"):
        write_records(Breaking({"x": np.arange(9)}), tmp_path / "x.parquet", group_bytes=8)
    assert len(open_parquet(tmp_path / "x.parquet")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]
