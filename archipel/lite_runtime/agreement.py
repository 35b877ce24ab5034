"""Agreement of a bundle: how far `predict` answers what the training form, the float programs, answers.

A bundle has no program with the training form's answers, but `train` measures them against labels. So the answers of
`predict` are given to it as labels, with nothing moving: its accuracy is then the share of equal classes, its loss the
distance of the two. With running statistics that `train` computes of the batch, and with dropout, it answers as it does
in training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from archipel.bundle import Bundle
from archipel.bundle.roles import Broadcast, Example, Label, Metric, Prediction
from archipel.errors import NonFiniteLossError
from archipel.lite_runtime.fields import BATCH_ROLES, collect, fixed_rows
from archipel.lite_runtime.interface import ModelRuntime
from archipel.lite_runtime.training.driver import find_program, need_program
from archipel.lite_runtime.values import fixed_shape

MIN_AGREEMENT = 0.8
"""Share of equal classes. Int8 with calibration examples like those of devices reaches 0.95 and more."""
MIN_SNR = 10.0
"""dB: noise of a tenth of the power with which answers differ between examples. Int8 reaches 16 dB and more."""

MOST = 512
_BATCH = 32
_LOSS, _ACCURACY = "loss", "accuracy"
_EXACT = 1e-6

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class BundleAgreement:
    """How far `predict` and the training form agree on `examples` examples.

    `share` is that of equal classes, None for a bundle whose metrics have no accuracy. `snr_db` is 10 log10 of the
    training form's loss against the mean answer over its loss against the answers, the signal-to-noise ratio for the
    squared error; None with classes, and for losses that are no distance.
    """

    examples: int
    share: float | None
    snr_db: float | None

    def good(self, min_agreement: float, min_snr: float) -> bool | None:
        """Whether it reaches the bounds; None where there is nothing to compare."""
        if self.share is not None:
            return self.share >= min_agreement
        return None if self.snr_db is None else self.snr_db >= min_snr

    def __str__(self) -> str:
        count = f"{self.examples} examples"
        if self.share is not None:
            return f"predict gives {self.share:.1%} of {count} the class that the training form gives them"
        if self.snr_db is not None:
            return f"predict and training form on {count}: signal to noise {self.snr_db:.1f} dB"
        return "not compared: the train program has no accuracy, and its loss is no distance of answer and label"


def measure_agreement(runtime: ModelRuntime, x: np.ndarray | Arrays) -> BundleAgreement | None:
    """Compare the two on at most MOST examples, evenly chosen.

    Arguments:
        runtime: one of its own: its parameters stay as they are, its state moves as in training.
        x: the fields of `predict` and `train`; labels are not read.

    Returns:
        The agreement, None for a bundle that does not train or has no `evaluate`.

    Raises:
        RuntimeInputError: for arrays that do not fit the fields. RuntimeProgramError: a graph fails.
    """
    bundle = runtime.bundle
    measured = find_program(bundle, "evaluate")
    if not bundle.manifest.schedule or measured is None:
        return None
    name = bundle.manifest.schedule[0].program
    train, evaluate = bundle.program(name), bundle.program(measured)
    ports = [p for p in bundle.program(need_program(bundle, "predict", "be compared")).inputs if isinstance(p, Example)]
    fields = collect("data", ports, x)
    size = fixed_rows(port for port in (*ports, *train.inputs) if isinstance(port, BATCH_ROLES)) or min(
        _BATCH, fields.count
    )
    chosen = np.unique(np.linspace(0, fields.count - 1, min(fields.count, MOST)).astype(np.int64))
    # Whole batches: statistics of a small last one would say less.
    chosen = np.resize(chosen, max(1, len(chosen) // size) * size)
    examples = {field: array[chosen] for field, array in fields.arrays.items()}
    prediction = next(port for port in evaluate.inputs if isinstance(port, Prediction))
    label = next(port for port in evaluate.inputs if isinstance(port, Label))
    batches = range(0, len(chosen), size)
    parts = [runtime.predict({f: array[i : i + size] for f, array in examples.items()}) for i in batches]
    answers = np.concatenate([part[prediction.output] for part in parts])

    def metric(name_of: str, labels: np.ndarray) -> float:
        """The mean of a metric of the train program, for these labels."""
        try:
            history = runtime.fit(
                {**examples, label.name: labels}, batch_size=size, shuffle=False, program=name, moves=[],
                broadcast=_zeros(bundle),
            )  # fmt: skip
        except NonFiniteLossError:
            return math.nan
        return float(np.mean(history.metrics[name_of]))

    metrics = {port.name for port in train.outputs if isinstance(port, Metric)}
    if _ACCURACY in metrics:
        share = metric(_ACCURACY, _classes(answers, prediction, label))
        return BundleAgreement(len(chosen), 0.0 if math.isnan(share) else share, None)
    mean = np.broadcast_to(answers.mean(axis=0, keepdims=True).astype(answers.dtype), answers.shape).copy()
    if _LOSS not in metrics or not _is_distance(runtime, examples, label, prediction, answers, mean):
        return BundleAgreement(len(chosen), None, None)
    noise, signal = metric(_LOSS, answers), metric(_LOSS, mean)
    return BundleAgreement(len(chosen), None, _decibels(signal, noise))


def _is_distance(
    runtime: ModelRuntime, examples: Arrays, label: Label, prediction: Prediction, answers: np.ndarray, mean: np.ndarray
) -> bool:
    """Whether the loss takes labels like `answers`, and is 0 where the two are equal, as squared errors are."""
    if (label.dtype, len(label.shape)) != (prediction.dtype, len(prediction.shape)):
        return False
    equal, other = (runtime.evaluate({**examples, label.name: y})[_LOSS] for y in (answers, mean))
    return abs(equal) <= _EXACT * abs(other)


def _decibels(signal: float, noise: float) -> float:
    if not math.isfinite(noise) or not signal > 0:
        return -math.inf
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def _zeros(bundle: Bundle) -> dict[str, np.ndarray]:
    """What a server would send with a round: no answer depends on it."""
    ports = [p for program in bundle.manifest.programs.values() for p in program.inputs if isinstance(p, Broadcast)]
    return {port.tensor: np.zeros(fixed_shape(port), port.dtype) for port in ports}


def _classes(answers: np.ndarray, prediction: Prediction, label: Label) -> np.ndarray:
    """The labels that call `answers` right: the classes, or for labels that are numbers whether they are above 0."""
    if len(label.shape) == len(prediction.shape):
        return (answers > 0).astype(label.dtype)
    axis = 1 if (prediction.shape[0], *prediction.shape[2:]) == label.shape else len(prediction.shape) - 1
    classes: np.ndarray = answers.argmax(axis).astype(label.dtype)
    return classes
