"""Agreement: how far `predict`, as devices run it, answers what the training form answers to the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from archipel.bundle.roles import Label, Metric, Prediction
from archipel.compression.compressed import CompressedModel
from archipel.compression.examples import Examples, fixed_batch
from archipel.compression.score import open_session
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.lite_runtime.agreement import MIN_AGREEMENT, MIN_SNR
from archipel.training.batch_norm import prepared
from archipel.training.evaluation import CORRECT

MOST = 512
_BATCH = 64
Ask = Callable[[dict[str, np.ndarray]], list[np.ndarray]]
_FLOOR, _CEILING = -100.0, 150.0  # dB; a manifest has no infinity, and float32 has 144 dB


@dataclass(frozen=True)
class Agreement:
    """How far `predict` and the training form agree on a set of `examples` examples.

    `share` is that of equal classes, from 0 to 1, None for a loss of no classification. It tells nothing where
    `one_class`: the training form gives all examples the same one. `snr_db` is 10 log10(signal / noise), the least of
    all outputs that count: the signal is the variance of the training form's answers over the examples (their power
    where that is 0), the noise the mean squared difference of the two.
    """

    examples: int
    share: float | None
    one_class: bool
    snr_db: float

    def metrics(self, name: str) -> dict[str, float]:
        """The entries of a lineage, for the set of this name."""
        share = {} if self.share is None or self.one_class else {f"agreement_{name}": self.share}
        return {**share, f"snr_db_{name}": self.snr_db}


def check_agreement(
    model: Model,
    programs: Mapping[str, Model],
    *,
    axis: int = 1,
    min_agreement: float = MIN_AGREEMENT,
    min_snr: float = MIN_SNR,
) -> dict[str, float]:
    """Measure the agreement on the examples of a CompressedModel, and refuse programs whose `predict` is another model.

    Arguments:
        model: what `programs` were lowered from. Without examples nothing is measured.
        programs: `predict` and, of a bundle that trains, `evaluate`, which says which output counts and whether it
            has classes. Without it whole numbers as labels do.
        axis: that of the classes.
        min_agreement: the least share of equal classes.
        min_snr: in dB, the least signal-to-noise ratio where there are no classes, or only one.

    Returns:
        `agreement_SET` (with classes) and `snr_db_SET` for every set of examples, calibration and validation.

    Raises:
        ConversionError: for a set below the bound.
    """
    sets = model.examples if isinstance(model, CompressedModel) else {}
    predict, evaluate = programs["predict"], programs.get("evaluate")
    outputs, classes = _what_counts(predict, evaluate, axis)
    if not (sets and outputs):
        return {}
    form = model.training_form if isinstance(model, CompressedModel) else None
    # One thread each: the order of sums, and so the bytes of the manifest, must not depend on the machine's cores.
    asked = [open_session(each, 1, outputs) for each in (prepared(form or model, "frozen"), predict)]
    metrics: dict[str, float] = {}
    for name, examples in sets.items():
        if evaluate is None and outputs[0] == predict.outputs[0].name and _are_classes(examples.labels, predict):
            found = _measure(asked, examples, fixed_batch(predict), 1, _Classes(axis))
        else:
            found = _measure(asked, examples, fixed_batch(predict), len(outputs), classes)
        _check(name, found, min_agreement, min_snr)
        metrics.update(found.metrics(name))
    return metrics


def _measure(
    asked: Sequence[Ask], examples: Examples, rows: int | None, outputs: int, classes: _Classes | None
) -> Agreement:
    """The agreement on at most MOST of the examples, evenly chosen.

    `asked` are the training form and `predict`, of whose answers the first `outputs` count; `rows` is the batch that
    both insist on.
    """
    ask_form, ask_predict = asked
    size = rows or _BATCH
    chosen = np.unique(np.linspace(0, len(examples) - 1, min(len(examples), MOST)).astype(np.int64))
    if rows:
        chosen = np.resize(chosen, -(-len(chosen) // size) * size)
    noises = [_Noise() for _ in range(outputs)]
    same = labels = 0
    kinds: set[int] = set()
    for batch in examples.take(chosen).batches(size):
        expected, given = ask_form(dict(batch.fields)), ask_predict(dict(batch.fields))
        for noise, x, y in zip(noises, expected, given):
            noise.add(x, y)
        if classes is not None:
            x, y = classes(expected[0]), classes(given[0])
            same, labels = same + int((x == y).sum()), labels + x.size
            kinds.update(np.unique(x).tolist())
    snr = min(noise.decibels for noise in noises)
    return Agreement(len(chosen), same / labels if labels else None, len(kinds) == 1, snr)


class _Classes:
    """The classes that an output [batch, ...] answers: the largest along `axis`, or None: whether it is above 0."""

    def __init__(self, axis: int | None) -> None:
        self._axis = axis

    def __call__(self, output: np.ndarray) -> np.ndarray:
        answer: np.ndarray = output > 0 if self._axis is None else output.argmax(self._axis)
        return answer


def _what_counts(predict: Model, evaluate: Model | None, axis: int) -> tuple[list[str], _Classes | None]:
    """The outputs that are compared, and what makes classes of the first one (None: it has none)."""
    if evaluate is None:
        return [info.name for info in predict.outputs if info.dtype.startswith("float")], None
    ports = evaluate.program.inputs
    prediction = next(port for port in ports if isinstance(port, Prediction))
    label = next(port for port in ports if isinstance(port, Label))
    if not any(isinstance(port, Metric) and port.name == CORRECT for port in evaluate.program.outputs):
        return [prediction.output], None
    return [prediction.output], _Classes(axis if label.dtype == "int64" else None)


def _are_classes(labels: np.ndarray | None, predict: Model) -> bool:
    """Whether the labels are classes of the first output [batch, classes, ...]."""
    return labels is not None and labels.dtype.kind in "iu" and labels.ndim == len(predict.outputs[0].shape) - 1


class _Noise:
    """Running sums of one output in float64, over batches of `expected` and `given` answers."""

    def __init__(self) -> None:
        self._first: np.ndarray | None = None
        self._count = 0
        self._away: np.ndarray | float = 0.0
        self._squares = self._power = self._noise = 0.0

    def add(self, expected: np.ndarray, given: np.ndarray) -> None:
        x, y = expected.astype(np.float64), given.astype(np.float64)
        if self._first is None:
            self._first = x[:1]
        # Distances to the first answer, whose squares lose no digits where all answers are close to each other.
        away = x - self._first
        self._count += len(x)
        self._away = self._away + away.sum(axis=0)
        self._squares += float((away**2).sum())
        self._power += float((x**2).sum())
        self._noise += float(((x - y) ** 2).sum()) if x.shape == y.shape else math.nan

    @property
    def decibels(self) -> float:
        if not math.isfinite(self._noise):
            return _FLOOR
        varied = self._squares - float((np.asarray(self._away) ** 2).sum()) / max(self._count, 1)
        signal = varied if varied > 0 else self._power
        if not self._noise:
            return _CEILING
        if not signal > 0:
            return _FLOOR
        # A tenth of a decibel: more digits would only show which kernels the machine has.
        return round(min(max(10 * math.log10(signal / self._noise), _FLOOR), _CEILING), 1)


def _check(name: str, found: Agreement, min_agreement: float, min_snr: float) -> None:
    remedy = "give calibration examples like those of devices, in the same scale and of every kind, or lower"
    if found.share is not None and not found.one_class:
        if found.share < min_agreement:
            raise ConversionError(
                f"{name}: predict, as devices run it, gives {found.share:.1%} of {found.examples} examples the class "
                f"that the training form gives them, expected at least {min_agreement:.1%}; {remedy} min_agreement"
            )
        return
    if found.snr_db < min_snr:
        why = " (all in one class)" if found.one_class else ""
        raise ConversionError(
            f"{name}: predict, as devices run it, differs from the training form on {found.examples} examples{why}: "
            f"signal to noise {found.snr_db:.1f} dB, expected at least {min_snr:g} dB; {remedy} min_snr"
        )
