"""CSV files against Python's csv module, and every damage by its line."""

from __future__ import annotations

import csv
import gzip
import io
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pacsv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets import CsvStream, as_dataset, open_csv, open_file, open_parquet, write_records
from archipel.datasets.readers.csv_cells import CsvFile
from archipel.errors import DatasetError
from tests.datasets.test_published import folder

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0", exclude_categories=("Cs",)), max_size=5)


@settings(max_examples=20)
@given(st.data())
def test_as_pythons_csv_module_reads(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    count = data.draw(st.integers(1, 12))
    numbers = data.draw(st.lists(st.floats(-1e30, 1e30), min_size=count, max_size=count))
    whole = data.draw(st.lists(st.integers(-(2**50), 2**50), min_size=count, max_size=count))
    texts = data.draw(st.lists(TEXTS.map(lambda text: f"_{text}_"), min_size=count, max_size=count))
    delimiter = data.draw(st.sampled_from([",", ";", "\t"]))
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=delimiter, lineterminator=data.draw(st.sampled_from(["\n", "\r\n"])))
    writer.writerows([["a", "b b", "label"], *zip(numbers, whole, texts)])
    path.write_bytes(buffer.getvalue().encode())
    read = list(csv.DictReader(io.StringIO(buffer.getvalue()), delimiter=delimiter))
    opened = open_csv(path, fields={"both": ["b b", "a"], "whole": "b b", "kind": "label"}, delimiter=delimiter)
    taken = opened.take(np.arange(count))
    assert taken["both"].dtype == np.float32
    np.testing.assert_array_equal(
        taken["both"], np.array([[float(row["b b"]), float(row["a"])] for row in read], np.float32)
    )
    assert taken["whole"].tolist() == [int(row["b b"]) for row in read]
    names = opened.fields["kind"].classes
    assert [names[number] for number in taken["kind"]] == [row["label"].strip() for row in read]
    assert list(names) == sorted(set(names))


GOOD = "age,hours,income\n39,40,<=50K\n\n50,13.5,>50K\n38,?,<=50K\n"


def test_columns_become_fields(tmp_path: Path) -> None:
    path = tmp_path / "people.csv.gz"
    path.write_bytes(gzip.compress(GOOD.encode()))
    data = open_csv(path, on_bad="skip")
    assert {name: str(field) for name, field in data.fields.items()} == {"input": "float32[2]", "label": "int64[]"}
    assert data.take(np.array([1, 0]))["input"].tolist() == [[50, 13.5], [39, 40]]
    assert data.fields["label"].classes == ("<=50K", ">50K")
    assert str(data.left_out) == f"1 left out: {path}, line 5: no value in column 'hours'"
    assert [data.locate(row) for row in range(2)] == [f"{path}, line 2", f"{path}, line 4"]
    filled = open_csv(path, fields={"hours": "hours", "age": "age"}, missing="nan")
    np.testing.assert_array_equal(filled.take(np.arange(3))["hours"], np.array([40, 13.5, np.nan], np.float32))
    assert filled.fields["age"].dtype == np.int64
    named = open_csv(path, fields={"label": "income"}, classes={"income": [">50K", "<=50K"]})
    assert named.take(np.arange(3))["label"].tolist() == [1, 0, 1]
    with pytest.raises(DatasetError, match="line 5: no value"):
        as_dataset(str(path))
    with pytest.raises(DatasetError, match="on_bad must be"):
        open_csv(path, on_bad="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (GOOD, {}, "line 5: no value in column 'hours'; correct the file, or leave such rows out with on_bad='skip'"),
        ("a,b\n1,2\n3\n5,6\n7,8,9\n", {}, r"line 3: expected 2 cells, one for each column \(and 1 more near it\)"),
        ("a,b\n1,2\n\n3,x1\n5,6\n", {}, "line 4: 'x1' in column 'b' is no number"),
        ('a,b\n"1\n",2\n3,4\n5,x\n', {}, "line 5: 'x' in column 'b' is no number"),
        ("a,b\n1,u\n2,v\n", {"classes": {"b": ["u", "w"]}}, "line 3: 'v' in column 'b' is none of the classes u, w"),
        ("a,b\nu,1\nv,2\n", {}, r"column 'a' has texts \('u'\).*fields=\{'input': \[...\], 'a': 'a'\}"),
        ("a,a\n1,2\n", {}, "two columns are called 'a'"),
        ("", {}, "is empty; give a file with a head and rows"),
        ("a;b\n1;2\n", {}, "has one column, 'a;b'; give the delimiter: delimiter=';', or ','"),
        ("a,b\n", {}, "no rows"),
        ("a,b\n1,2\n", {"fields": {"x": ["c"]}}, "no column 'c'; it has 'a', 'b'"),
        ("a,b\n1,2\n", {"fields": {"x": []}}, "field 'x' has no columns"),
        ("a,b\n1,2\n", {"classes": {"c": ["u"]}}, "classes for column 'c', which no field reads"),
        ("a,b\n" + "1,2\n" * 300, {"max_bytes": 100}, "more than 100 bytes of arrays; convert it first"),
    ],
)
def test_damage_is_named_by_line(tmp_path: Path, text: str, options: dict, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DatasetError, match=message) as caught:
        open_csv(tmp_path / "t.csv", **options)
    assert str(caught.value).startswith(str(tmp_path / "t.csv"))


def test_skipped_rows_are_counted_and_lines_stay_right(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines, sound = ["a,b"], []
    for number in range(2, 4000):
        kind = rng.integers(0, 12)
        lines.append({0: "", 1: "1", 2: f"{number},", 3: f"{number},x", 4: "1,2,3"}.get(int(kind), f"{number},1"))
        sound += [number] if kind > 4 else []
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    data = open_csv(tmp_path / "t.csv", fields={"line": "a", "b": "b"}, on_bad="skip")
    assert data.take(np.arange(len(data)))["line"].tolist() == sound
    assert data.left_out.count == sum(1 for line in lines[1:] if line) - len(sound)
    assert len(data.left_out.first) <= 10
    for row in (0, 17, len(data) - 1):
        assert data.locate(row) == f"{tmp_path / 't.csv'}, line {sound[row]}"
    stream = CsvStream(tmp_path / "t.csv", fields={"line": "a"}, on_bad="skip")
    later = np.concatenate([piece["line"] for piece in stream.read(1000)])
    everything = np.concatenate([piece["line"] for piece in stream.read()])
    assert np.array_equal(later, everything[1000:])


def test_pieces_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipel.datasets.readers.csv_cells._BLOCK_BYTES", 64)
    rows = [f"{i},{'abc'[i % 3]}" if i % 7 else f"{i}" for i in range(1, 200)]
    (tmp_path / "t.csv").write_text("n,label\n" + "\n".join(rows))
    data = open_csv(tmp_path / "t.csv", fields={"n": "n", "label": "label"}, on_bad="skip")
    kept = [i for i in range(1, 200) if i % 7]
    taken = data.take(np.arange(len(data)))
    assert taken["n"].tolist() == kept
    assert taken["label"].tolist() == [i % 3 for i in kept]
    assert [data.locate(row) for row in (5, 6)] == [f"{tmp_path / 't.csv'}, line {kept[row] + 1}" for row in (5, 6)]
    assert data.left_out.count == 28


def test_a_column_that_begins_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipel.datasets.readers.csv_cells._BLOCK_BYTES", 64)
    monkeypatch.setattr("archipel.datasets.readers.csv_cells._FEW", 3)
    codes = [str(number) for number in range(100, 150)] + [f"V{number}" for number in range(100, 160)] + ["?"]
    (tmp_path / "t.csv").write_text("code,label\n" + "".join(f"{code},1\n" for code in codes))
    data = open_csv(tmp_path / "t.csv", fields={"code": "code"}, on_bad="skip")
    assert data.fields["code"].classes == tuple(sorted(codes[:-1]))
    assert data.take(np.arange(len(data)))["code"].tolist() == list(range(110))


@settings(max_examples=60)
@given(content=st.binary(max_size=60) | st.text('a1,"\n.;', max_size=60).map(str.encode))
def test_any_bytes_are_refused_or_rows(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.csv"
    path.write_bytes(content)
    try:
        data = open_csv(path, on_bad="skip", missing="nan")
    except DatasetError as error:
        named = str(error)
    else:
        named = str(path)
        assert len(data.take(np.arange(len(data)))[next(iter(data.fields))]) == len(data)
    assert str(path) in named


@pytest.mark.sampled(every=4)
def test_adult_census_against_plain_python() -> None:
    path = folder("adult") / "adult.data.gz"
    with gzip.open(path, "rt") as file:
        rows = [line.strip().split(", ") for line in file if line.strip()]
    sound = [row for row in rows if "?" not in row]
    names = [f"c{number}" for number in range(15)]
    data = open_file(
        path, names=names, fields={"input": ["c0", "c4", "c12"], "job": "c1", "label": "c14", "rest": "c13",
                                   "occupation": "c6"}, on_bad="skip"
    )  # fmt: skip
    # All rows with `?` have it in one of the columns that are read.
    assert len(data) == len(sound) == 30162
    assert data.left_out.count == 2399
    taken = data.take(np.arange(len(data)))
    assert np.array_equal(taken["input"], np.array([[row[0], row[4], row[12]] for row in sound]).astype(np.float32))
    classes = sorted({row[1] for row in sound} | {"Never-worked"})
    assert list(data.fields["job"].classes) == classes
    assert taken["job"].tolist() == [classes.index(row[1]) for row in sound]
    assert taken["label"].sum() == sum(row[14] == ">50K" for row in sound)


def test_a_csv_becomes_a_record_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "a,b,label\n" + "".join(f"{i},{i / 4},{'no' if i % 3 else 'yes'}\n" for i in range(99))
    )
    write_records(CsvStream(tmp_path / "t.csv"), tmp_path / "t.parquet", group_bytes=200)
    made, read = open_csv(tmp_path / "t.csv"), open_parquet(tmp_path / "t.parquet")
    assert read.fields == made.fields
    for name in made.fields:
        assert np.array_equal(made.take(np.arange(99))[name], read.take(np.arange(99))[name])


@pytest.mark.sampled(every=4)
def test_no_thread_of_pyarrow_outlives_a_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lets go of a Python function while the process ends aborts it, in one command of a hundred."""
    (tmp_path / "any.csv").write_text("a,b\n1,2\n3\n")
    handlers = []
    real = pacsv.ParseOptions

    def options(**given: Any) -> pacsv.ParseOptions:
        handlers.append(weakref.ref(given["invalid_row_handler"]))
        return real(**given)

    monkeypatch.setattr(pacsv, "ParseOptions", options)
    file = CsvFile(tmp_path / "any.csv")
    for _ in range(2000):
        assert sum(map(len, file.read(["a"], []))) == 1
        assert handlers[-1]() is None
