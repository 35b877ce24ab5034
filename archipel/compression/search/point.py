"""Points of a search: a recipe, the model that it makes, and its measurements, each in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx

from archipel.compression.compressed import CompressedModel
from archipel.compression.part import Part
from archipel.compression.recipe import load_recipe, write_recipe
from archipel.durable import creating_folder, sweep
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.graph.slim import slim

RECIPE, MODEL, TRAINABLE, METRICS = "recipe.toml", "model.onnx", "trainable.onnx", "metrics.json"


@dataclass(frozen=True)
class Metrics:
    """One model, measured.

    `nbytes` of the ONNX file, `zipped` of the deflated file, `weights`: numbers in parameters, `flops` for one example
    (two per multiply-accumulate); `loss` and `accuracy` (0 to 1) on the validation data. `latency_us`: the median of
    single predictions on one thread, in microseconds; `latency_ratio`: over the original's, measured in turns with it.
    """

    nbytes: int
    zipped: int
    weights: int
    flops: int
    loss: float
    accuracy: float | None
    latency_us: float
    latency_ratio: float

    @property
    def quality(self) -> float:
        """Larger is better: the accuracy, or without one the negative loss."""
        return -self.loss if self.accuracy is None else self.accuracy


@dataclass(frozen=True)
class Point:
    """A measured recipe, numbered from 1; `seconds`: how long compressing and measuring took."""

    number: int
    folder: Path
    recipe: tuple[Part, ...]
    seed: int
    metrics: Metrics
    seconds: float

    @property
    def title(self) -> str:
        """The recipe in one line, without fields that are defaults."""
        return ", ".join(map(part_text, self.recipe))

    def model(self) -> Model:
        """The model in the form that devices run."""
        return Model.from_onnx(self.folder / MODEL)

    @classmethod
    def load(cls, folder: Path) -> Point:
        """Read what `save_point` wrote. Raises CompressionError."""
        try:
            content = json.loads((folder / METRICS).read_text(encoding="utf-8"))
            metrics = Metrics(**content["metrics"])
            number, seed, seconds = int(content["point"]), int(content["seed"]), float(content["seconds"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CompressionError(
                f"{folder}: not a point of a search ({error}); remove it to have it made again"
            ) from None
        return cls(number, folder, tuple(load_recipe(folder / RECIPE)), seed, metrics, seconds)


def save_point(
    folder: Path,
    number: int,
    recipe: Sequence[Part],
    seed: int,
    model: CompressedModel,
    deployed: Model,
    metrics: Metrics,
    seconds: float,
) -> Point:
    """Write a point as a whole or not at all: the folder gets its name when all files are on the disk.

    `deployed` is `model.deployed()`, which takes longer to compute than all the rest.
    """
    sweep(folder.parent, folder.name)
    command = f"# Made by: archipel compress ORIGINAL -o NEW --recipe {RECIPE} --seed {seed}, with the search's data\n"
    content = {"point": number, "seed": seed, "seconds": seconds, "metrics": asdict(metrics)}
    with creating_folder(folder) as partial:
        (partial / RECIPE).write_text(command + write_recipe(recipe), encoding="utf-8")
        onnx.save(slim(deployed.ir, card=True), partial / MODEL)
        model.save(partial / TRAINABLE, trainable=True)
        (partial / METRICS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return Point(number, folder, tuple(recipe), seed, metrics, seconds)


def pareto(points: Sequence[Point], cost: Callable[[Metrics], float]) -> tuple[Point, ...]:
    """The points that no other point beats in quality at the same or a lower `cost`, the cheapest first."""
    front: list[Point] = []
    # From the cheapest on, a point is on the front if it beats the best so far.
    for point in sorted(points, key=lambda p: (cost(p.metrics), -p.metrics.quality, p.number)):
        if not front or point.metrics.quality > front[-1].metrics.quality:
            front.append(point)
    return tuple(front)


def part_text(part: Part) -> str:
    """`PruneChannels(flops=0.5)`: as `repr`, without the fields that are their defaults."""
    fields = part.__dataclass_fields__  # type: ignore[attr-defined]
    shown = [f"{name}={value!r}" for name, field in fields.items() if (value := getattr(part, name)) != field.default]
    return f"{type(part).__name__}({', '.join(shown)})" if shown else type(part).__name__
