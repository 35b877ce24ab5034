"""`archipel data` as users call it: what it prints, what it writes, and one line for each error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from archipel.datasets import open_parquet, write_records
from tests.datasets.readers.test_audio import sound, wav
from tests.datasets.readers.test_images import picture, png
from tests.support.commands import Command

CSV = "age,hours,income\n39,40,no\n50,?,yes\n38,20.5,no\n27,30\n60,10,yes\n"


@pytest.fixture
def people(tmp_path: Path) -> Path:
    (tmp_path / "people.csv").write_text(CSV)
    return tmp_path / "people.csv"


def test_convert_inspect_stats(archipel: Command, people: Path, tmp_path: Path) -> None:
    target = tmp_path / "train.parquet"
    arguments = ("data", "convert", str(people), str(target))
    out, _ = archipel(*arguments, "--on-bad", "skip")
    assert f"{target}: 3 examples" in out
    assert "  label  int64[]  2 classes: no, yes" in out
    assert "2 left out:" in out
    assert f"{people}, line 3: no value in column 'hours'" in out
    read = open_parquet(target).take(np.arange(3))
    assert read["input"].tolist() == [[39, 40], [38, 20.5], [60, 10]]
    assert read["label"].tolist() == [0, 0, 1]
    # Other programs read it as a table.
    assert pq.read_table(target).column("label").to_pylist() == [0, 0, 1]
    assert "exists; --force replaces it" in archipel(*arguments, code=1)[1]
    assert "or leave such rows out with --on-bad skip" in archipel(*arguments, "--force", code=1)[1]
    made = json.loads(archipel(*arguments, "--on-bad", "skip", "--force", "--field", "label=income",
                               "--classes", "income=yes,no", "--json")[0])  # fmt: skip
    assert (made["examples"], made["left_out"], len(made["first_left_out"])) == (4, 1, 1)
    assert made["fields"]["label"] == {"dtype": "int64", "shape": [], "classes": ["yes", "no"]}
    shown, _ = archipel("data", "inspect", str(target), "--rows", "1")
    assert f"{target}: 4 examples, 1 fields" in shown
    assert "label  1 (no)" in shown
    first = json.loads(archipel("data", "inspect", str(people), "--json")[0])
    assert first["examples"] is None
    assert first["first"][0] == {"age": 39, "hours": 40.0, "income": 0}
    assert first["first"][1]["hours"] == "nan"


def test_errors_name_options(archipel: Command, people: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "a.parquet")
    people.write_text("age,kind\n39,cat\n50,dog\n")
    _, error = archipel("data", "convert", str(people), target, "--field", "input=age,kind", code=1)
    assert "--field 'input=A,B,...' --field 'kind=kind'" in error
    assert "fields=" not in error
    people.write_text("a,a\n1,2\n")
    assert "give each a name: -o names=A,B,... -o skip=1" in archipel("data", "inspect", str(people), code=1)[1]
    people.write_text("1,2\n3,4\n")
    assert "or give them: -o names=A,B,..." in archipel("data", "convert", str(people), target, code=1)[1]
    _, error = archipel("data", "split", str(people), target, str(tmp_path / "b.parquet"), code=1)
    assert "or give them: archipel data convert with -o names=A,B,..." in error


def test_inspect_tells_what_it_cannot_read(archipel: Command, people: Path) -> None:
    shown, _ = archipel("data", "inspect", str(people))
    assert f"1 left out: {people}, line 5: expected 3 cells" in shown
    people.write_text("Größe;y\n1.7;ja\n")
    assert "give the delimiter: -o 'delimiter=;'" in archipel("data", "inspect", str(people), code=1)[1]
    shown, _ = archipel("data", "inspect", str(people), "-o", "delimiter=;")
    assert "  y      0 (ja)" in shown


def test_stats(archipel: Command, people: Path) -> None:
    found = json.loads(archipel("data", "stats", str(people), "--json")[0])
    assert found["examples"] == 4
    ages = np.array([39, 50, 38, 60])
    assert found["fields"]["age"]["mean"] == ages.mean()
    assert found["fields"]["age"]["std"] == pytest.approx(ages.std(), rel=1e-12)
    assert found["fields"]["hours"]["missing"] == 1
    assert found["fields"]["income"]["classes"] == {"no": 2, "yes": 2}
    text, _ = archipel("data", "stats", str(people), "--plot")
    assert "people.csv: 4 examples" in text
    assert "1 left out" in text
    assert "  no   2  ########################################\n" in text
    assert "hours: from 10 to 40" in text


def test_split(archipel: Command, tmp_path: Path) -> None:
    whole, train, validation = (tmp_path / f"{name}.parquet" for name in ("whole", "train", "validation"))
    write_records({"x": np.arange(50), "label": np.arange(50) % 5}, whole)
    arguments = ("data", "split", str(whole), str(train), str(validation), "--share", "0.2", "--by", "label")
    out, _ = archipel(*arguments)
    assert f"{train}: 40 examples" in out
    assert f"{validation}: 10 examples" in out
    parts = [open_parquet(path).take(np.arange(count)) for path, count in ((train, 40), (validation, 10))]
    assert sorted(np.concatenate([part["x"] for part in parts]).tolist()) == list(range(50))
    assert np.bincount(parts[1]["label"]).tolist() == [2] * 5
    assert "exists; --force replaces it" in archipel(*arguments, code=1)[1]
    again = json.loads(archipel(*arguments, "--force", "--json")[0])
    assert [each["examples"] for each in again] == [40, 10]
    assert np.array_equal(open_parquet(validation).take(np.arange(10))["x"], parts[1]["x"])
    _, error = archipel("data", "split", str(whole), str(whole), str(validation), "--force", code=1)
    assert "must be three files" in error
    assert len(open_parquet(whole)) == 50


@pytest.mark.sampled(every=3)
def test_folders_and_options_of_readers(archipel: Command, tmp_path: Path) -> None:
    for name, content in {"dog/a.png": png(picture(1)), "cat/b.png": png(picture(2)), "cat/c.png": b"broken"}.items():
        (tmp_path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pictures" / name).write_bytes(content)
    out, _ = archipel("data", "convert", str(tmp_path / "pictures"), str(tmp_path / "p.parquet"), "-o", "size=4x3",
                   "--on-bad", "skip")  # fmt: skip
    assert "2 examples" in out
    assert "input  uint8[4, 3, 3]" in out
    assert "1 left out:" in out
    assert "c.png" in out
    (tmp_path / "sounds").mkdir()
    (tmp_path / "sounds" / "a.wav").write_bytes(wav(sound(1, 50)))
    assert "input  float32[20]" in archipel("data", "inspect", str(tmp_path / "sounds"), "-o", "samples=20")[0]
    (tmp_path / "a.txt").write_text("to be or not to be\n")
    options = ("-o", "length=4", "-o", "unit=characters")
    assert "8 classes" in archipel("data", "stats", str(tmp_path / "a.txt"), *options)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("convert", "people.csv", "t.parquet"),
            "people.csv, line 3: no value in column 'hours' (and 1 more near it); correct",
        ),
        (("convert", "people.csv", "t.csv"), "t.csv: a record file must be called NAME.parquet"),
        (("convert", "people.csv", "no/t.parquet"), "no: no such folder; make it first"),
        (("convert", "nothing.csv", "t.parquet"), "nothing.csv: No such file"),
        (
            ("stats", "people.csv", "--on-bad", "error"),
            "people.csv, line 5: expected 3 cells, one for each column; correct",
        ),
        (("inspect", "people.csv", "-o", "size=3x3"), "people.csv: CSV files have no option 'size'; they have classes"),
        (("inspect", "people.csv", "-o", "size"), "--option size: expected NAME=VALUE"),
        (("inspect", "people.csv", "-o", "size=3"), "--option size=3: expected HEIGHTxWIDTH"),
        (("inspect", "people.csv", "--field", "input"), "--field input: expected NAME=VALUE"),
        (("inspect", "people.csv", "--field", "x=weight"), "people.csv: no column 'weight'; it has 'age'"),
    ],
)
def test_errors_are_one_line(archipel: Command, people: Path, arguments: tuple[str, ...], message: str,
                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(people.parent)
    _, out = archipel("data", *arguments, code=1)
    assert message in out
    assert len(out.strip().splitlines()) == 1
    assert not list(people.parent.glob("*.parquet"))
