"""Make archipel/datasets/digits_by_writer.xz from a folder with MNIST and the QMNIST writers.

    python scripts/make_digits_by_writer.py ../shared/data/mnist_by_writer

The folder holds `train-images-idx3-ubyte.gz` and `train-labels-idx1-ubyte.gz` (MNIST) and `writers.npz` with
`train_writer`, `train_hsf` and `train_index` of each digit (from QMNIST's label files). Which writers go in depends
on nothing but the constants below.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np

from archipel.datasets.published.digits import PUPIL_SERIES, STAFF_SERIES, DigitsByWriter
from archipel.datasets.published.digits_file import DATA_FILE, decode_digits, encode_digits
from archipel.datasets.splits import seeded_order

STAFF = 82
PUPILS = 162
MOST_BYTES = 3_600_000
TARGET = Path(__file__).parent.parent / "archipel" / "datasets" / DATA_FILE


def read_source(folder: Path) -> DigitsByWriter:
    """MNIST's training digits, those of one writer together, in the order of that person's form."""
    images = np.frombuffer(gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    with np.load(folder / "writers.npz") as columns:
        writers, series, index = columns["train_writer"], columns["train_hsf"], columns["train_index"]
    order = np.lexsort((index, writers))
    return DigitsByWriter(images.reshape(-1, 28, 28), labels, writers, series).take(order)


def choose(source: DigitsByWriter) -> DigitsByWriter:
    staff = seeded_order(source.writers_in(STAFF_SERIES), "package staff")[:STAFF]
    pupils = seeded_order(source.writers_in(PUPIL_SERIES), "package pupils")[:PUPILS]
    return source.of(staff + pupils)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder with MNIST and writers.npz")
    digits = choose(read_source(parser.parse_args().source))
    data = encode_digits(digits)
    if len(data) > MOST_BYTES:
        raise SystemExit(f"{len(data)} bytes, expected at most {MOST_BYTES}: lower STAFF or PUPILS")
    decode_digits(data, TARGET.name)
    TARGET.write_bytes(data)
    print(f"{TARGET.name}: {len(digits)} digits of {STAFF} staff and {PUPILS} pupils in {len(data)} bytes")


if __name__ == "__main__":
    main()
