"""Writes what the sides of benchmarks/simulate.py read: `write_files.py MNIST FOLDER ROW`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from tasks import TASKS, torch_network

from archipel import Model, datasets
from archipel.bundle.development import generate_development_key
from archipel.converter import Signing, Training, convert
from archipel.training import losses, optimizers


def main() -> None:
    source, folder, row = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if not (folder / "x.npy").exists():
        data = datasets.mnist(source, validation=1)
        for name, pictures, labels in (("", data.train.inputs, data.train.labels), ("t", *test(data))):
            np.save(folder / f"{name}x.npy", pictures)
            np.save(folder / f"{name}y.npy", labels.astype(np.int64))
    task = next(each for each in TASKS.values() if each.name == row)
    model = Model.from_torch(torch_network(row), torch.zeros(2, 1, 28, 28))
    key = generate_development_key()
    training = Training(
        losses.cross_entropy(), optimizers.sgd(lr=task.rate), strategy="fedavg", epochs=1, batch_size=task.batch
    )
    (folder / f"{row}.pub").write_bytes(key.public_key().public_bytes_raw())
    convert(model, folder / f"{row}.bundle", signing=Signing(key), training=training)


def test(data: datasets.LabelledSplits) -> tuple[np.ndarray, np.ndarray]:
    return data.test.inputs[:2000], data.test.labels[:2000]


if __name__ == "__main__":
    main()
