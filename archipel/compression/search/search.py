"""`search`: find a recipe that meets a target, by trying recipes and measuring the models."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from archipel.compression.compress import compress
from archipel.compression.compressed import CompressedModel
from archipel.compression.examples import Data, Examples, fixed_batch
from archipel.compression.latency import latencies
from archipel.compression.part import Part
from archipel.compression.recipe import write_recipe
from archipel.compression.report import Measured
from archipel.compression.score import check_classes, default_loss, score
from archipel.compression.search.history import OBJECTIVES, History, Outcome, Trial
from archipel.compression.search.point import Metrics, Point, save_point
from archipel.compression.search.result import SearchResult
from archipel.compression.search.space import Space
from archipel.compression.search.target import Target, parse_target
from archipel.compression.work import Progress
from archipel.durable import make_folder, sweep, write_durably
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.training.losses import Loss
from archipel.training.step_engines import ONNX_RUNTIME

TRIALS = 30
REPEATS = 50
"""After so many proposals in a row that lead to known points, the space counts as exhausted."""


@dataclass(frozen=True)
class SearchProgress:
    """Trial `trial` of `trials`, and the progress of its recipe."""

    trial: int
    trials: int
    inner: Progress


def search(
    model: Model,
    target: str | Target,
    data: Data | None = None,
    calibration: Data | None = None,
    validation: Data | None = None,
    *,
    folder: str | os.PathLike[str],
    trials: int = TRIALS,
    minutes: float | None = None,
    loss: Loss | None = None,
    seed: int = 0,
    engine: str = ONNX_RUNTIME,
    space: Space | None = None,
    on_progress: Callable[[SearchProgress], None] | None = None,
) -> SearchResult:
    """Try recipes on `model` until `trials` of them are measured or `minutes` are over, and say which meets `target`.

        result = search(model, "size<40%, accuracy>=-0.5", train, None, validation, folder="search")
        print(result.verdict())

    First each form of numbers is tried by itself, then Optuna's TPE proposes recipes: towards the Pareto front of
    accuracy and size (and of what else the target bounds) among those that meet it. Recipes are screened without
    fine-tuning; only one whose size, FLOPs and latency meet the target is trained. Latency is measured on the Lite
    runtime, and guides the search only if the target bounds it.

    Arguments:
        target: text such as "size<100kB, accuracy>=-0.5" (see `search.target`).
        data, calibration, validation, loss, seed, engine: as in `compress`. `validation` is needed; without `data` no
            recipe trains.
        folder: every point is a folder below `folder`/points with recipe.toml, model.onnx, trainable.onnx and
            metrics.json, which has its seed: `compress` with that recipe and seed makes the same bytes. The same call
            on the same folder goes on after any end, also with another target, `trials` or `minutes`.
        space: the recipes to choose from. None: all that the parts and the data allow.
        on_progress: called with each SearchProgress; may raise KeyboardInterrupt to stop.

    Raises CompressionError for arguments that do not fit, or the folder of another search.
    """
    wanted = parse_target(target) if isinstance(target, str) else target
    if trials < 1 or (minutes is not None and not minutes > 0):
        raise CompressionError(f"search: trials must be 1 or more and minutes above 0, got {trials} and {minutes}")
    if validation is None:
        raise CompressionError("search needs validation data to measure accuracy on; pass validation=(inputs, labels)")
    run = _Search(model, wanted, data, calibration, validation, loss, seed, engine, Path(folder), space, on_progress)
    try:
        return run.go_on(trials, None if minutes is None else time.monotonic() + 60 * minutes)
    finally:
        run.history.close()


class _Search:
    """One call of `search` on a folder: its points, its history, and the measurements of the original."""

    def __init__(
        self,
        model: Model,
        target: Target,
        data: Data | None,
        calibration: Data | None,
        validation: Data,
        loss: Loss | None,
        seed: int,
        engine: str,
        folder: Path,
        space: Space | None,
        on_progress: Callable[[SearchProgress], None] | None,
    ) -> None:
        self.model, self.target, self.seed, self.folder = model, target, seed, folder
        self.engine = engine
        given = {"data": (data, True), "calibration": (calibration, False), "validation": (validation, True)}
        self.sets = {
            what: None if each is None else Examples.of(each, model, what, labelled).feed
            for what, (each, labelled) in given.items()
        }
        self.validation = Examples.of(validation, model, "validation", labelled=True)
        self.loss = loss or default_loss(self.validation.labels)
        check_classes(self.validation, "validation", self.loss, model)
        self.on_progress = on_progress
        self.space = space or Space.of(data is not None, data is not None or calibration is not None)
        if self.space.training and data is None:
            raise CompressionError("search: the space has fine-tuning, which needs training data; pass data=")
        self.feed = dict(self.validation.take(slice(0, fixed_batch(model) or 1)).fields)
        self.deployed = CompressedModel.of(model).deployed()
        self._open()
        # Costs without a bound would pull the search away from accuracy and size.
        guides = [name for name in OBJECTIVES if name in ("quality", "size") or name in target.quantities]
        self.history = History(folder / "trials.sqlite", self.space, seed, guides)
        for trial in self.history.trials:
            if trial.point and trial.point not in self.points:
                raise CompressionError(f"{folder}: point {trial.point} is gone; remove the folder or choose another")

    def go_on(self, trials: int, deadline: float | None) -> SearchResult:
        done = sum(trial.new for trial in self.history.trials)
        repeats = 0
        while done < trials and repeats < REPEATS and (deadline is None or time.monotonic() < deadline):
            number = len(self.history.trials)
            if number < len(self.space.anchors):
                # The trial's number alone decides, so a resumed search makes the same trials.
                values = self.space.anchors[number]
            else:
                values = self.history.propose([self._outcome(trial) for trial in self.history.trials])
            trial = self._try(values, partial(self._tell, done + 1, trials))
            self.history.add(trial, self._outcome(trial))
            repeats = 0 if trial.new else repeats + 1
            done += trial.new
        return self.result(exhausted=repeats >= REPEATS)

    def result(self, exhausted: bool) -> SearchResult:
        failed = {write_recipe(self.space.recipe(t.values)): t.error for t in self.history.trials if t.error}
        points = tuple(self.points.values())
        return SearchResult(
            self.target, self.original, points, tuple(failed.items()), self.folder, self.seed, exhausted
        )

    def _try(self, values: dict[str, Any], tell: Callable[[Progress], None]) -> Trial:
        """Measure the recipe without fine-tuning; with it too, if all but the accuracy meets the target."""
        full = self.space.recipe(values)
        for trial in self.history.trials:
            # A recipe that failed would fail again.
            if trial.error and self.space.recipe(trial.values) == full:
                return replace(trial, values=values, new=False)
        number = None
        try:
            cheap = self.space.recipe(self.space.screened(values))
            number = self._point(cheap, tell)
            if full != cheap and self._worth_training(self._metrics(number)):
                number = self._point(full, tell)
        except CompressionError as error:
            return Trial(values, number, True, str(error))
        return Trial(values, number, all(trial.point != number for trial in self.history.trials))

    def _worth_training(self, metrics: Metrics) -> bool:
        excesses = self.target.excesses(metrics, self.original)
        # Training changes the accuracy alone.
        return all(excess <= 0 for quantity, excess in excesses.items() if quantity != "accuracy")

    def _outcome(self, trial: Trial) -> Outcome | None:
        if trial.point is None:
            return None
        metrics = self._metrics(trial.point)
        objectives = (-metrics.quality, float(metrics.nbytes), metrics.latency_ratio, float(metrics.flops))
        return Outcome(objectives, self.target.excesses(metrics, self.original))

    def _metrics(self, number: int) -> Metrics:
        return self.points[number].metrics if number else self.original

    def _point(self, recipe: Sequence[Part], tell: Callable[[Progress], None]) -> int:
        """The number of the recipe's point, which is made if it is missing; 0, the original, for an empty recipe."""
        if not recipe:
            return 0
        for point in self.points.values():
            if list(point.recipe) == list(recipe):
                return point.number
        number = max(self.points, default=0) + 1
        running = self.folder / f"running-{hashlib.sha256(write_recipe(recipe).encode()).hexdigest()[:16]}"
        # An interrupted recipe goes on in its folder; those of other recipes are left from a call that chose otherwise.
        for other in self.folder.glob("running-*"):
            if other != running:
                shutil.rmtree(other)
        started = time.monotonic()
        small, report = compress(
            self.model, recipe, **self.sets, loss=self.loss, seed=self.seed,
            engine=self.engine, folder=running, on_progress=tell,
        )  # fmt: skip
        deployed = small.deployed()
        # The original again: only times that are measured in turns can be compared.
        before, after = latencies([self.deployed, deployed], self.feed)
        metrics = _metrics(report.after, after, after / before)
        place = self.folder / "points" / f"{number:03d}"
        self.points[number] = save_point(
            place, number, recipe, self.seed, small, deployed, metrics, time.monotonic() - started
        )
        # Last: if the search is killed before, the point is there or its checkpoints are.
        shutil.rmtree(running)
        return number

    def _tell(self, trial: int, trials: int, inner: Progress) -> None:
        if self.on_progress is not None:
            self.on_progress(SearchProgress(trial, trials, inner))

    def _open(self) -> None:
        """Read the state of this search from the folder, or begin it there."""
        path = self.folder / "search.json"
        fingerprint = self._fingerprint()
        if path.exists():
            try:
                state = json.loads(path.read_text(encoding="utf-8"))
                run, self.original = state["run"], Metrics(**state["original"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CompressionError(f"{path}: not the state of a search ({error}); choose another folder") from None
            if run != fingerprint:
                raise CompressionError(
                    f"{self.folder}: a search with another model, seed, data, engine, or other parts to choose from; "
                    "remove the folder or choose another"
                )
        else:
            # A kill may have left a partial search.json, which must not count as other content.
            sweep(self.folder, path.name)
            if self.folder.exists() and any(self.folder.iterdir()):
                raise CompressionError(f"{self.folder}: neither empty nor the folder of a search; choose another")
            make_folder(self.folder)
            measured = Measured.of(self.model, self.deployed, score(self.deployed, self.validation, self.loss))
            latency = latencies([self.deployed], self.feed)[0]
            self.original = _metrics(measured, latency, 1.0)
            content = {"run": fingerprint, "seed": self.seed, "original": asdict(self.original)}
            write_durably(path, json.dumps(content, indent=1).encode() + b"\n", 0o666)
        # After search.json, which marks the folder as this search's: a folder with other content is refused.
        make_folder(self.folder / "points")
        folders = sorted((self.folder / "points").glob("[0-9]*"))
        self.points = {point.number: point for point in map(Point.load, folders)}

    def _fingerprint(self) -> str:
        """A digest of everything that measurements depend on; the target is not part of it."""
        digest = hashlib.sha256(self.model.to_bytes())
        digest.update(f"{self.seed} {self.loss!r} {self.space.choices!r} {self.space.forms!r}".encode())
        if self.engine != ONNX_RUNTIME:
            digest.update(f"engine {self.engine}".encode())
        for what, arrays in self.sets.items():
            for name, array in sorted((arrays or {}).items()):
                digest.update(f"{what}/{name} {array.dtype} {array.shape}".encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def _metrics(measured: Measured, latency_us: float, ratio: float) -> Metrics:
    loss, accuracy = measured.loss, measured.accuracy
    if loss is None or not math.isfinite(loss):
        raise CompressionError(f"the loss on the validation data is {loss}, which cannot be compared")
    return Metrics(
        measured.nbytes, measured.zipped, measured.weights, measured.flops, loss, accuracy, latency_us, ratio
    )
