"""A site's own tables, pictures and databases as a device's examples; what is wrong with them is said in one line."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from archipel.cli.devices.device_examples import LocalExamples
from archipel.client.settings import load_device_settings
from archipel.errors import ArchipelError
from tests.support.federation import Federation
from tests.support.fixtures.federation import federation, server_host  # noqa: F401
from tests.support.linear_bundle import local_data

AGES, PULSES, OUTCOMES = [71, 35, 52, 60], [88.5, 61.0, 70.25, 92.0], ["icu", "home", "ward", "home"]
TABLE = {"age": AGES, "pulse": PULSES, "outcome": OUTCOMES, "note": ["", "left", "", "moved"]}
FEATURES = np.array(list(zip(AGES, PULSES, strict=True)), np.float32)
LABELS = np.array([2, 0, 1, 0])
ARRANGED = """
[examples.fields]
features = ["age", "pulse"]
label = ["outcome"]
[examples.classes]
outcome = ["home", "ward", "icu"]
"""


def examples(folder: Path, text: str) -> dict[str, np.ndarray]:
    (folder / "device.toml").write_text(f'folder = "device"\n[examples]\n{text}')
    local = LocalExamples(load_device_settings(folder / "device.toml", environment={}))
    local.check()
    return dict(local())


def check(found: dict[str, np.ndarray]) -> None:
    assert list(found) == ["features", "label"]
    assert (found["features"].dtype, found["label"].dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(found["features"], FEATURES)
    np.testing.assert_array_equal(found["label"], LABELS)


def database(folder: Path) -> str:
    with sqlite3.connect(folder / "ward.db") as connection:
        connection.execute("CREATE TABLE stays (id INTEGER, age INTEGER, pulse REAL, outcome TEXT, note TEXT)")
        rows = [(n, *row, None) for n, row in enumerate(zip(AGES, PULSES, OUTCOMES, strict=True))]
        connection.executemany("INSERT INTO stays VALUES (?, ?, ?, ?, ?)", rows)
        connection.execute("INSERT INTO stays VALUES (9, 40, 80.0, NULL, 'still here')")
    connection.close()
    return f'database = "sqlite:///{folder / "ward.db"}"\n'


def test_tables_of_every_kind_are_the_same_examples(tmp_path: Path) -> None:
    pq.write_table(pa.table(TABLE), tmp_path / "stays.parquet")
    (tmp_path / "parts").mkdir()
    for number in range(2):
        part = {name: values[2 * number : 2 * number + 2] for name, values in TABLE.items()}
        pq.write_table(pa.table(part), tmp_path / "parts" / f"{number}.parquet")
    rows = [",".join(map(str, row)) for row in zip(*TABLE.values(), strict=True)]
    (tmp_path / "stays.csv").write_text("\n".join([",".join(TABLE), *rows]) + "\n")
    for name in ("stays.parquet", "parts", "stays.csv"):
        check(examples(tmp_path, f'file = "{name}"{ARRANGED}'))
    where = "SELECT age, pulse, outcome FROM stays WHERE outcome IS NOT NULL ORDER BY id"
    check(examples(tmp_path, f'{database(tmp_path)}query = "{where}"{ARRANGED}'))


def test_columns_are_fields_by_themselves_and_arrays_may_be_arranged_too(tmp_path: Path) -> None:
    found = examples(tmp_path, f'{database(tmp_path)}query = "SELECT age, age > 50 AS old FROM stays ORDER BY id"')
    assert {name: array.tolist() for name, array in found.items()} == {
        "age": [*AGES, 40], "old": [1, 0, 1, 1, 0]
    }  # fmt: skip
    np.savez(tmp_path / "data.npz", age=np.array(AGES), pulse=np.array(PULSES), y=LABELS)
    text = 'file = "data.npz"\n[examples.fields]\nfeatures = ["age", "pulse"]\nlabel = ["y"]\n'
    check(examples(tmp_path, text))


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (3, 4, 5, 3), np.uint8)
    for name, picture in zip(("cat/1", "cat/2", "dog/1"), pictures, strict=True):
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "pets" / f"{name}.png")
    found = examples(tmp_path, 'file = "pets"\n[examples.fields]\npicture = ["input"]\nlabel = ["label"]\n')
    assert found["picture"].dtype == np.uint8
    # Height, width and channels, or channels first: as the reader has them, the same pixels.
    assert sorted(found["picture"].ravel().tolist()) == sorted(pictures.ravel().tolist())
    assert found["label"].tolist() == [0, 0, 1]


WRONG = {
    "age": ("no value", "SELECT age, outcome FROM stays", "column 'outcome' of the query, row 5: no value"),
    "text": ("a text", "SELECT note FROM stays WHERE id = 9", "the text 'still here'; list the names of its classes"),
    "twice": ("two", "SELECT age, pulse AS age FROM stays", "two columns 'age'; rename one with AS"),
    "none": ("no rows", "SELECT age FROM stays WHERE id > 99", "answers no rows"),
    "blob": ("bytes", "SELECT x'00ff' AS picture", "a bytes, which is no number; convert it with CAST"),
    "syntax": ("syntax", "SELEC age", 'near "SELEC"'),
    "table": ("no table", "SELECT age FROM visits", "no such table: visits"),
    "change": ("a change", "DELETE FROM stays", "answers no rows; it has to be a SELECT"),
}


@pytest.mark.parametrize(("query", "said"), [(query, said) for _, query, said in WRONG.values()], ids=list(WRONG))
def test_a_query_that_is_not_right(tmp_path: Path, query: str, said: str) -> None:
    text = database(tmp_path) + f'query = "{query}"\n[examples.classes]\noutcome = ["home", "ward", "icu"]\n'
    if "outcome" not in query:
        text = text.partition("[examples.classes]")[0]
    with pytest.raises(ArchipelError) as caught:
        examples(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    # Nothing was changed, whatever the query was.
    with sqlite3.connect(tmp_path / "ward.db") as connection:
        assert connection.execute("SELECT count(*) FROM stays").fetchone() == (5,)
    connection.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('database = "sqlite:///x.db"', "database and query belong together"),
        ('file = "x.csv"\nquery = "SELECT 1"', "database and query belong together"),
        ('file = "x.csv"\nstore = true', "set one of"),
        ('store = true\n[examples.fields]\na = ["b"]', "fields and classes are of the columns of a file or query"),
        ('file = "x.csv"\n[examples.fields]\na = []', "fields.a: expected the names of columns, got none"),
        ('database = "nowhere"\nquery = "SELECT 1"', "is no URL of a database"),
        ('database = "oracle://me:hunter2@host/x"\nquery = "SELECT 1"', "needs the package"),
        ('database = "sqlite:////no/such/folder/x.db"\nquery = "SELECT 1"', "unable to open database file"),
        ('file = "missing.parquet"', "missing.parquet: cannot be read (No such file or directory); put a file"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ArchipelError) as caught:
        examples(tmp_path, text)
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_columns_that_there_are_not_and_an_answer_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = database(tmp_path) + 'query = "SELECT age, pulse FROM stays"\n'
    with pytest.raises(ArchipelError, match=r"has no column 'height'; it has age, pulse"):
        examples(tmp_path, where + '[examples.fields]\nx = ["age", "height"]\n')
    with pytest.raises(ArchipelError, match=r"the query has no column 'outcome'; it has age, pulse"):
        examples(tmp_path, where + '[examples.classes]\noutcome = ["a"]\n')
    many = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 100000) SELECT x FROM n"
    text = f'folder = "device"\nmax_peak_bytes = 80000\n[examples]\n{where}'
    (tmp_path / "device.toml").write_text(text.replace("SELECT age, pulse FROM stays", many))
    with pytest.raises(ArchipelError, match=r"answers more than 80000 bytes \(max_peak_bytes\); limit its rows"):
        LocalExamples(load_device_settings(tmp_path / "device.toml", environment={})).check()


@pytest.mark.sampled(every=4)
def test_a_round_from_a_database_is_that_of_the_arrays(federation: Federation, tmp_path: Path) -> None:  # noqa: F811
    """The URL, which has a password at many a site, comes from the environment."""
    data = local_data(0)
    with sqlite3.connect(tmp_path / "site.db") as connection:
        connection.execute("CREATE TABLE seen (a REAL, b REAL, c REAL, y REAL)")
        rows = np.column_stack([data["x"], data["y"]]).astype(float).tolist()
        connection.executemany("INSERT INTO seen VALUES (?, ?, ?, ?)", rows)
    connection.close()
    (tmp_path / "device.toml").write_text(
        'folder = "device"\n[examples]\nquery = "SELECT * FROM seen ORDER BY rowid"\n'
        '[examples.fields]\nx = ["a", "b", "c"]\ny = ["y"]\n'
    )
    environment = {"ARCHIPEL_DEVICE_EXAMPLES_DATABASE": f"sqlite:///{tmp_path / 'site.db'}"}
    site = LocalExamples(load_device_settings(tmp_path / "device.toml", environment=environment))
    agents = [federation.agent(0, examples=site), federation.agent(1), federation.agent(2)]
    task = federation.task(cohort=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    [info] = federation.rounds(task)
    assert (info.phase, len(info.survivors)) == ("committed", 3), info.reason
    before = federation.operator.weights.read(info.weights_in)["w"]
    expected = federation.expected_weights(before, list(zip(agents, range(3))), task)
    np.testing.assert_allclose(federation.operator.weights.read(info.weights_out)["w"], expected, rtol=1e-6)
