"""What every reader keeps, over the table of readers: a new one fails here until it has a sample."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from archipel.datasets import Batches, Dataset, checked, open_file, open_parquet, opening, summarize, write_records
from archipel.datasets.batches import take
from archipel.errors import DatasetError
from tests.datasets.readers.test_audio import sound, wav
from tests.datasets.readers.test_images import picture, png

TABLE = {"a": np.arange(12.0), "label": np.arange(12) % 3}


def arrow() -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, pa.table(TABLE).schema) as writer:
        writer.write_table(pa.table(TABLE), max_chunksize=5)
    return sink.getvalue()


def csv(folder: Path) -> Path:
    rows = "".join(f"{a},{label}\n" for a, label in zip(*TABLE.values()))
    (folder / "t.csv").write_text("a,label\n" + rows)
    return folder / "t.csv"


def parquet(folder: Path) -> Path:
    write_records(TABLE, folder / "t.parquet", group_bytes=60)
    return folder / "t.parquet"


def arrow_file(folder: Path) -> Path:
    (folder / "t.arrow").write_bytes(arrow())
    return folder / "t.arrow"


def arrays(folder: Path) -> Path:
    for name, array in TABLE.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def text(folder: Path) -> Path:
    (folder / "t.txt").write_text("".join(map(str, range(1000))))
    return folder / "t.txt"


def pictures(folder: Path) -> Path:
    for number in range(6):
        (folder / "ab"[number % 2]).mkdir(exist_ok=True)
        (folder / "ab"[number % 2] / f"{number}.png").write_bytes(png(picture(number)))
    return folder


def sounds(folder: Path) -> Path:
    for number in range(6):
        (folder / f"{number}.wav").write_bytes(wav(sound(number, 10 + number)))
    return folder


SAMPLES: dict[str, Callable[[Path], Path]] = {
    "csv_files:open_csv": csv,
    "parquet:open_parquet": parquet,
    "arrow_files:open_arrow": arrow_file,
    "arrays:open_arrays": arrays,
    "text:open_text": text,
    "images:open_images": pictures,
    "audio:open_audio": sounds,
}
READERS = sorted(
    {*opening._BY_SUFFIX.values(), *opening._BY_CONTENT.values(), *(reader for _, reader in opening._in_folders())}
)


@pytest.mark.parametrize("reader", READERS)
def test_every_reader(reader: str, tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir()
    path = SAMPLES[reader](place)
    data = open_file(path)
    assert isinstance(data, Dataset)
    count = len(data)
    assert count > 3
    rows = np.random.default_rng(0).integers(0, count, 20)
    several = take(data, rows)
    for name, field in data.fields.items():
        assert field.fits(several[name]), name
        assert several[name].dtype.isnative
        for place_of, row in enumerate(rows[:5]):
            single = data.take(np.array([row]))[name][0]
            # Filled up with zeros to the longest of the batch where lengths differ.
            inside = tuple(slice(size) for size in single.shape)
            assert np.array_equal(several[name][place_of][inside], single)
    # What was given belongs to whoever asked for it.
    for array in several.values():
        array[...] = 0
    assert any(array.any() for array in take(data, rows).values())
    assert all(array.shape[0] == 0 for array in take(data, np.empty(0, np.intp)).values())
    assert all(str(place) in data.locate(row) for row in range(count))
    again = pickle.loads(pickle.dumps(data))
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: take(again, rows), range(8)))
    for name, array in take(data, rows).items():
        assert all(np.array_equal(each[name], array) for each in taken)
    # Whatever it is, a record file has the same, and all that takes data takes it.
    assert write_records(data, tmp_path / "copy.parquet", group_bytes=100) == count
    copy = open_parquet(tmp_path / "copy.parquet")
    assert copy.fields == data.fields
    assert summarize(copy) == summarize(data)
    assert sum(len(next(iter(batch.values()))) for batch in Batches(checked(data), 4, workers=2)) == count
    with pytest.raises(DatasetError, match="has no option 'nothing'; it has"):
        open_file(path, nothing=1)
