"""The cloud's part: train on census staff, import, compress, convert, sign."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Aggregators, Bundle, Lineage, PrivacyPolicy, pack
from archipel.cli.start.demo.results import EpochRow
from archipel.compression import StaticInt8, write_recipe
from archipel.converter import Compression, Signing, Training, convert
from archipel.datasets import DigitsByWriter, WriterSplit
from archipel.graph import Model
from archipel.models import digits_cnn
from archipel.training import losses, optimizers
from archipel.training.cloud import Epoch, TrainConfig, random_shift
from archipel.training.cloud import train as train_network

MIN_COHORT = 10
MIN_SITE_COHORT = 5
"""Of one edge server's devices; with those that may work with it, at least 7 of 8."""
THRESHOLD = 0.67  # above two thirds, as the paper asks against an active server (section 6.2)
CLIP = 1.0
RANGE = 0.5
BITS = 16
LOCAL_EPOCHS = 2
BATCH_SIZE = 10
CALIBRATION = 512


@dataclass(frozen=True)
class Published:
    """What leaves the cloud: the bundle as a folder and as one file, and the same model unquantized to compare with."""

    bundle: Bundle
    file: Path
    float_bundle: Bundle
    float_onnx: Path
    int8_onnx: Path


def train(
    digits: DigitsByWriter, split: WriterSplit, seed: int, on_epoch: Callable[[Epoch], None]
) -> tuple[Model, list[EpochRow]]:
    """Train a small CNN on the staff's digits until its validation loss stops falling.

    Returns the network of the best epoch as a Model, and a row for each epoch.
    """
    staff, validation = digits.of(split.cloud_train), digits.of(split.cloud_validation)
    result = train_network(
        digits_cnn(seed),
        (staff.inputs(), staff.targets()),
        TrainConfig(
            epochs=60,
            patience=6,
            # Shifted digits make the cloud's model stronger, so that the devices have something real to beat.
            augment=random_shift(2),
            seed=seed,
            # The steps are so small that several threads would mostly wait for each other.
            threads=1,
        ),
        validation=(validation.inputs(), validation.targets()),
        on_epoch=on_epoch,
    )
    rows = [EpochRow(e.number, e.train_loss, e.metrics["loss"], e.metrics["accuracy"], e.best) for e in result.history]
    return result.model, rows


def publish(
    model: Model,
    digits: DigitsByWriter,
    split: WriterSplit,
    key: Ed25519PrivateKey,
    folder: Path,
    accuracy: float,
    largest_site: int | None = None,
) -> Published:
    """Quantize `predict`, make the programs, sign the bundle.

    Arguments:
        model: the trained network.
        digits, split: the calibration data are digits of the cloud's training writers.
        key: the publisher's private key.
        folder: a folder for the files.
        accuracy: on the validation writers, from 0 to 1; it goes into the lineage.
        largest_site: how many devices an edge server may have; None: there are no edge servers.
    """
    policy = PrivacyPolicy(
        modes=("secure",), min_cohort=MIN_SITE_COHORT if largest_site else MIN_COHORT, threshold=THRESHOLD,
        max_clip=CLIP, max_bits=BITS,
        aggregators=None
        if largest_site is None
        else Aggregators(min_site_cohort=MIN_SITE_COHORT, max_site_cohort=largest_site),
    )  # fmt: skip
    name = model.inputs[0].name
    staff = digits.of(split.cloud_train)
    # Every k-th digit, so that the ranges come from many writers.
    calibration = staff.inputs()[:: max(1, len(staff) // CALIBRATION)]
    make = partial(
        convert,
        model,
        name="digits",
        training=Training(
            losses.cross_entropy(),
            optimizers.sgd(),
            strategy_options={"clip": CLIP, "value_range": RANGE, "bits": BITS},
            epochs=LOCAL_EPOCHS,
            batch_size=BATCH_SIZE,
        ),
        privacy=policy,
    )
    recipe = [StaticInt8()]
    lineage = Lineage(recipe=(write_recipe(recipe),), metrics={"validation_accuracy": accuracy})
    bundle = make(
        path=folder / "digits",
        compression=Compression(recipe, calibration={name: calibration}),
        signing=Signing(key, lineage=lineage),
    )
    file = folder / "digits.bundle"
    pack(bundle.folder, file)
    float_bundle = make(path=folder / "digits-float", signing=Signing(key))
    float_onnx, int8_onnx = folder / "digits-float.onnx", folder / "digits-int8.onnx"
    model.save(float_onnx)
    Model.from_onnx(bundle.program_path("predict")).save(int8_onnx)
    return Published(bundle, file, float_bundle, float_onnx, int8_onnx)


def image_field(bundle: Bundle) -> str:
    """The name of the example field that holds the images."""
    return bundle.program("predict").inputs[0].name


def count_parameters(bundle: Bundle) -> int:
    return int(sum(np.prod(spec.shape) for spec in bundle.manifest.parameters))
