"""Make what the browser demo loads: a signed bundle that recognises digits, the key that signed it, and real digits.

    python scripts/web_demo_bundle.py FOLDER

FOLDER is made anew with
    digits.bundle    the network of `archipel.models.digits_cnn`, trained here; all of its layers learn on the device
    publisher.json   the public key, and what the network reached on people whose digits it never saw
    rehearsal.bin    digits that are learned again together with one's own, so that the others are not forgotten
    check.bin        digits of people whom the network never saw, to measure with; never learned
A .bin file holds records of 785 bytes: the label, then 28 x 28 bytes of ink (0 the paper, 255 the ink).

Weights and digits are the same on every run (on the same kind of processor). The key is a new one each time and its
private half is dropped, so nobody can sign another bundle for this page.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from archipel.bundle import generate_key
from archipel.converter import Signing, Training, convert
from archipel.datasets import DigitsByWriter, digits_by_writer
from archipel.datasets.splits import seeded_order
from archipel.models import digits_cnn
from archipel.training import losses, optimizers
from archipel.training.cloud import Epoch, TrainConfig, random_shift, train

HELD_OUT_WRITERS = 40
REHEARSAL_PER_CLASS = 12
CHECK_PER_CLASS = 30
EPOCHS = 3
BATCH_SIZE = 16
WANTED_ACCURACY = 0.96


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    # One thread: the same numbers on every run, and no slower for so small a network.
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    digits = digits_by_writer()
    writers = seeded_order(np.unique(digits.writers).tolist(), "browser demo")
    held_out, known = digits.of(writers[:HELD_OUT_WRITERS]), digits.of(writers[HELD_OUT_WRITERS:])
    result = train(
        digits_cnn(0),
        (known.inputs(), known.targets()),
        TrainConfig(
            optimizer=optimizers.adam(lr=4e-3), epochs=EPOCHS, batch_size=128, augment=random_shift(1), device="cpu"
        ),
        validation=(held_out.inputs(), held_out.targets()),
        on_epoch=show,
    )
    accuracy = max(epoch.metrics["accuracy"] for epoch in result.history)
    if accuracy < WANTED_ACCURACY:
        print(f"the network is right on {accuracy:.1%} of the held-out digits, expected {WANTED_ACCURACY:.0%} or more")
        return 1
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as work:
        folder = Path(work) / target.name
        folder.mkdir()
        key = generate_key()
        convert(
            result.module,
            folder / "digits.bundle",
            example=np.zeros((2, 1, 28, 28), np.float32),
            name="digits",
            training=Training(losses.cross_entropy(), optimizers.sgd(momentum=0.9), epochs=1, batch_size=BATCH_SIZE),
            signing=Signing(key),
        )
        facts = {
            "key": key.public_key().public_bytes_raw().hex(),
            "accuracy": round(accuracy, 4),
            "digits": len(held_out),
            "writers": HELD_OUT_WRITERS,
        }
        (folder / "publisher.json").write_text(json.dumps(facts) + "\n")
        (folder / "rehearsal.bin").write_bytes(records(known, REHEARSAL_PER_CLASS))
        (folder / "check.bin").write_bytes(records(held_out, CHECK_PER_CLASS))
        shutil.rmtree(target, ignore_errors=True)
        os.rename(folder, target)
    print(f"{target}: right on {accuracy:.1%} of {len(held_out)} digits of {HELD_OUT_WRITERS} people it never saw")
    return 0


def show(epoch: Epoch) -> None:
    print(f"epoch {epoch.number} of {EPOCHS}: {epoch.metrics['accuracy']:.1%} on held-out people", flush=True)


def records(digits: DigitsByWriter, per_class: int) -> bytes:
    """`per_class` digits of each class as one .bin file, classes taken in turn, by as many people as there are."""
    order = seeded_order(range(len(digits)), "browser demo digits")
    by_class = [[row for row in order if digits.labels[row] == label][:per_class] for label in range(10)]
    rows = np.array([rows[index] for index in range(per_class) for rows in by_class], dtype=np.intp)
    chosen = digits.take(rows)
    flat = chosen.images.reshape(len(chosen), -1)
    return np.concatenate([chosen.labels[:, None], flat], axis=1).astype(np.uint8).tobytes()


if __name__ == "__main__":
    sys.exit(main())
