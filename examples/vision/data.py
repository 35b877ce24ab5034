"""Fashion-MNIST as files: pictures that were collected, for the cloud, and pictures that stay on devices.

    python examples/vision/data.py FOLDER --out vision

FOLDER has the four published files (train-images-idx3-ubyte.gz and so on). Writes train.npz, validation.npz, test.npz
and devices.npz, each with `x`, float32 [n, 1, 28, 28] in 0..1, and `y`, the class.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from archipel.datasets import Labelled, fashion_mnist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("vision"))
    parser.add_argument(
        "--collected", type=int, default=20_000, help="pictures that the cloud has; devices have others"
    )
    parser.add_argument("--devices", type=int, default=16_000, help="pictures on all devices together")
    options = parser.parse_args()
    data = fashion_mnist(options.folder)
    options.out.mkdir(parents=True, exist_ok=True)
    collected = np.arange(options.collected)
    parts = {
        "train": data.train.take(collected),
        "validation": data.validation,
        "test": data.test,
        "devices": data.train.take(np.arange(options.collected, options.collected + options.devices)),
    }
    for name, part in parts.items():
        write(options.out / f"{name}.npz", part)


def write(file: Path, part: Labelled) -> None:
    np.savez(file, x=part.inputs, y=part.labels)
    print(f"{file}: {len(part)} pictures")


if __name__ == "__main__":
    main()
