"""The report of a compression: measurements before and after each part."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from archipel.compression.score import Score
from archipel.graph import Model
from archipel.graph.flops import flops_per_example
from archipel.graph.slim import slim


@dataclass(frozen=True)
class Measured:
    """One model as a device would run it.

    `nbytes`: bytes of the ONNX file; `zipped`: of the deflated file, as it travels; `weights`: numbers in parameters;
    `flops`: for one example, two per multiply-accumulate. `loss` and `accuracy` (0 to 1): on the validation data, None
    without any.

    Example: see `archipel.compression.Report`.
    """

    nbytes: int
    zipped: int
    weights: int
    flops: int
    loss: float | None = None
    accuracy: float | None = None

    @classmethod
    def of(cls, model: Model, deployed: Model, score: Score | None = None) -> Measured:
        """Measure `deployed`, the form of `model` that devices run."""
        data = slim(deployed.ir).SerializeToString(deterministic=True)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(zipfile.ZipInfo("model.onnx"), data, zipfile.ZIP_DEFLATED)
        return cls(
            nbytes=len(data),
            zipped=buffer.tell(),
            weights=sum(array.size for array in model.parameters.values()),
            flops=flops_per_example(deployed),
            loss=None if score is None else score.loss,
            accuracy=None if score is None else score.accuracy,
        )


@dataclass(frozen=True)
class Step:
    """One part of the recipe, with the seconds it took, the measurements after it, and the facts that it noted.

    Example: see `archipel.compression.Report`.
    """

    part: str
    seconds: float
    after: Measured
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The measurements of `compress` with a `recipe` (TOML): `before` it, and after each of its `steps`.

    `print` shows them as a table. `seed` is the one with which the same call gives the same bytes.

    Example:
        _, report = archipel.compress(model, [StaticInt8()], data=data, validation=data)
        print(report.before.accuracy, "->", report.after.accuracy)
        print([(step.part, step.seconds, step.after.nbytes) for step in report.steps])
    """

    recipe: str
    before: Measured
    steps: tuple[Step, ...]
    seed: int

    @property
    def after(self) -> Measured:
        """The measurements after the last part."""
        return self.steps[-1].after if self.steps else self.before

    def to_dict(self) -> dict[str, Any]:
        """The same as numbers, strings, lists and dictionaries."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("", "bytes", "zipped", "weights", "MFLOPs", "accuracy", "loss"), _row("before", self.before)]
        rows += [_row(step.part, step.after) for step in self.steps]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(_align(row, widths) for row in rows)


def _row(title: str, measured: Measured) -> tuple[str, ...]:
    accuracy = "-" if measured.accuracy is None else f"{100 * measured.accuracy:.2f} %"
    loss = "-" if measured.loss is None else f"{measured.loss:.4f}"
    title = title if len(title) <= 60 else title[:57] + "..."
    return (
        title,
        f"{measured.nbytes:,}",
        f"{measured.zipped:,}",
        f"{measured.weights:,}",
        f"{measured.flops / 1e6:.2f}",
        accuracy,
        loss,
    )


def _align(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))
    return "  ".join([first, *rest]).rstrip()
