"""Work: data, training, evaluation, notes for the report and checkpoints, for the parts of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.compression.compressed import CompressedModel
from archipel.compression.examples import Examples
from archipel.compression.score import Score, score
from archipel.compression.training import Batch, train
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.training.losses import Loss
from archipel.training.step_engines import ONNX_RUNTIME

if TYPE_CHECKING:
    from archipel.compression.fine_tune import FineTune

MAX_CALIBRATION = 512
"""How many training examples stand in for missing calibration data."""


@dataclass(frozen=True)
class Progress:
    """`done` of `total` steps of `what`, which is part number `part` of `parts`, counted from 1.

    Example:
        def show(progress):
            print(progress.what, progress.done, "of", progress.total)

        small, _ = archipel.compress(model, [PruneWeights(0.5), FineTune(epochs=1)], data=data, on_progress=show)
    """

    part: int
    parts: int
    what: str
    done: int
    total: int


class Work:
    """What the parts of one run of `compress` work with.

    `original` is the model that `compress` was given, `seed` decides every random choice, `engine` trains, `facts` are
    the notes of the present part. The arguments are those of `compress`.

    Example:
        work = Work(model, loss=training.losses.cross_entropy(), validation=Examples({"input": x}, y))
        sparse = PruneWeights(0.5).apply(CompressedModel.of(model), work)
        print(work.evaluate(sparse).accuracy, work.facts)
    """

    def __init__(
        self,
        original: Model,
        *,
        loss: Loss,
        data: Examples | None = None,
        calibration: Examples | None = None,
        validation: Examples | None = None,
        seed: int = 0,
        engine: str = ONNX_RUNTIME,
        folder: Path | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.original = original
        self.loss = loss
        self.seed = seed
        self.engine = engine
        self.facts: dict[str, Any] = {}
        self._data, self._calibration, self._validation = data, calibration, validation
        self._folder = folder
        self._on_progress = on_progress
        self._place = (1, 1)
        self._runs = 0

    def begin(self, part: int, parts: int) -> None:
        """Start part number `part` of `parts` (from 1), with notes and checkpoints of its own."""
        self._place, self._runs, self.facts = (part, parts), 0, {}

    def need_data(self, part: object) -> Examples:
        """Labelled training examples. Raises CompressionError, naming the part, where there are none."""
        return _require(self._data, part, "training data", "data=(inputs, labels)")

    def need_calibration(self, part: object) -> Examples:
        """Examples, labelled or not: the calibration data, else the first MAX_CALIBRATION of the training data."""
        if self._calibration is None and self._data is not None:
            return self._data.take(slice(0, MAX_CALIBRATION))
        return _require(self._calibration, part, "calibration data", "calibration=inputs")

    def need_validation(self, part: object) -> Examples:
        """Labelled examples for choices and measurements. Raises CompressionError, naming the part, without them."""
        return _require(self._validation, part, "validation data", "validation=(inputs, labels)")

    @property
    def samples(self) -> dict[str, Examples]:
        """The examples for the ranges of activations under "calibration", and those under "validation", where given."""
        sets: dict[str, Examples] = {}
        if self._calibration is not None or self._data is not None:
            sets["calibration"] = self.need_calibration("samples")
        if self._validation is not None:
            sets["validation"] = self._validation
        return sets

    @property
    def validated(self) -> bool:
        """Whether there are validation data."""
        return self._validation is not None

    def evaluate(self, model: Model, examples: Examples | None = None) -> Score:
        """Loss and accuracy of the form that devices run, on the validation data or other labelled examples."""
        deployed = model.deployed() if isinstance(model, CompressedModel) else model
        return score(deployed, examples or self.need_validation("evaluation"), self.loss)

    def train(
        self,
        model: CompressedModel,
        options: FineTune,
        *,
        loss: Loss | None = None,
        trainable: tuple[str, ...] | None = None,
        fields: Callable[[Batch], Batch] | None = None,
        examples: Examples | None = None,
        what: str = "fine-tuning",
    ) -> CompressedModel:
        """`model` after training `model.trainable_names`, or the tensors `trainable`.

        `fields` may change each batch, `examples` replace the training data, `what` is the title in the report. In a
        run with a folder, training can be stopped at any step and goes on from there.
        """
        data = examples or self.need_data(options)
        self._runs += 1
        # Numbered in order: a part that is resumed makes the same trainings again, and finds the finished ones here.
        checkpoint = None if self._folder is None else self._folder / f"training-{self._place[0]}-{self._runs}.npz"
        values, losses = train(
            model,
            data,
            options,
            loss or self.loss,
            model.trainable_names if trainable is None else trainable,
            seed=self.seed,
            engine=self.engine,
            fields=fields,
            checkpoint=checkpoint,
            on_step=lambda done, total, last: self.progress(done, total, f"{what}, loss {last:.3f}"),
        )
        # The last loss of a single batch would be noise.
        tail = losses[-max(len(losses) // 10, 1) :]
        self.note(training={**self.facts.get("training", {}), f"{what} {self._runs}": {
            "steps": len(losses), "first loss": losses[0], "last loss": sum(tail) / len(tail)}})  # fmt: skip
        return model.with_parameters(values)

    def note(self, **facts: Any) -> None:
        """Facts about what the part did, for the report: anything that JSON can hold."""
        self.facts.update(facts)

    def progress(self, done: int, total: int, what: str) -> None:
        """Report how far the part is. The listener may stop the run by raising KeyboardInterrupt."""
        if self._on_progress is not None:
            self._on_progress(Progress(*self._place, what, done, total))


def _require(examples: Examples | None, part: object, what: str, remedy: str) -> Examples:
    if examples is None:
        name = part if isinstance(part, str) else type(part).__name__
        raise CompressionError(f"{name} needs {what}; pass {remedy}")
    return examples
