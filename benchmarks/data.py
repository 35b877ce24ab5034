"""What reading data costs: batches against PyTorch's DataLoader, record files against lists, threads, processes.

    python benchmarks/data.py              about two minutes
    python benchmarks/data.py --quick      fewer repetitions: under a minute

Times are of a whole epoch; a ratio below 1 says that the first is faster. `arrays` are 20,000 examples of 784 floats in
batches of 128, shuffled, against a DataLoader of the same in its own process (one tensor an example, as it works).
`record file` reads 2,000 pictures of 64 x 64 as `write_records` writes them, against Parquet's lists of numbers.
`pictures` decodes 200 JPEGs of 500 x 375 to 64 x 64, with a thread for each core against one. `python` makes examples
in a Python loop of about a millisecond, `copied` takes `arrays`, both in two worker processes against one thread.
`resumed` restores a state near the end of an epoch of ten million examples and takes a batch, against one at its start.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from measure import Report, arguments, compare, interleave
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from archipel.datasets import Batches, open_images, open_parquet, write_records


class Computed:
    """Examples that a Python loop makes."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        total = sum(number * row % 7 for number in range(10_000))
        return np.full((3, 32, 32), total, np.float32), row % 10


class Numbers:
    """Ten million examples that take no time."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, row: int) -> int:
        return row


def main() -> None:
    options = arguments(__doc__).parse_args()
    seconds = 1.0 if options.quick else 8.0
    report = Report(options.json, ("numpy", "pyarrow", "pillow", "torch"))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for case, (ours, runs) in _cases(Path(folder)).items():
            report.add(compare("data", case, ours, interleave(runs, seconds, warmup=1)))


def _cases(folder: Path) -> dict[str, tuple[str, dict[str, Callable[[], object]]]]:
    rng = np.random.default_rng(0)
    x, y = rng.random((20_000, 784), np.float32), np.arange(20_000) % 10
    loader = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), 128, shuffle=True)
    _write_pictures(folder / "pictures", rng)
    pixels = rng.integers(0, 256, (2000, 64, 64, 3), np.uint8)
    write_records({"input": pixels}, folder / "records.parquet")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(pixels.ravel()), 64 * 64 * 3)
    pq.write_table(pa.table({"input": lists}), folder / "lists.parquet", row_group_size=600)
    pictures = open_images(folder / "pictures", size=(64, 64))
    cores = os.cpu_count() or 1
    return {
        "arrays": ("batches", {"batches": _epochs(Batches((x, y), 128)), "DataLoader": lambda: _exhaust(loader)}),
        "record file": (
            "records",
            {"records": _read(folder / "records.parquet"), "lists": _read(folder / "lists.parquet")},
        ),
        "pictures": (
            "threads",
            {"threads": _epochs(Batches(pictures, 32, workers=cores)), "one thread": _epochs(Batches(pictures, 32))},
        ),
        "python": ("processes", _processes_and_thread(Computed())),
        "copied": ("processes", _processes_and_thread((x, y))),
        "resumed": ("end", {"end": _resumed(0.99), "start": _resumed(0.0)}),
    }


def _write_pictures(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir()
    for number in range(200):
        rough = Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8))
        rough.resize((500, 375)).save(folder / f"{number}.jpg", quality=90)


def _processes_and_thread(data: Any) -> dict[str, Callable[[], object]]:
    return {
        "processes": _epochs(Batches(data, 32, workers=2, prefetch=4, processes=True)),
        "one thread": _epochs(Batches(data, 32)),
    }


def _epochs(batches: Batches) -> Callable[[], object]:
    return lambda: _exhaust(batches)


def _read(path: Path) -> Callable[[], object]:
    # Opened anew, or what was decoded would be kept.
    return lambda: _exhaust(Batches(open_parquet(path), 100, shuffle=False))


def _resumed(share: float) -> Callable[[], object]:
    batches = Batches(Numbers(), 32)
    state = {**batches.state(), "batch": int(share * len(batches))}

    def run() -> object:
        batches.restore(state)
        return next(iter(batches))

    return run


def _exhaust(batches: Any) -> int:
    return sum(1 for _ in batches)


if __name__ == "__main__":
    main()
