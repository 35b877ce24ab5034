"""The folder of a run: of `archipel train`, `archipel simulate --folder`, TensorBoard, or with files of weights."""

from __future__ import annotations

import csv
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from archipel.errors import ArchipelError, InsightError
from archipel.insight.events import read_events
from archipel.insight.limits import MAX_CURVES, MAX_HISTORY_BYTES, MAX_POINTS, cut
from archipel.insight.page_data import Curve, HistogramSeries
from archipel.library_errors import one_line
from archipel.simulation.saved import HISTORY, VERSIONS, Record

METRICS = "metrics.json"
MODEL = "model.onnx"
_MANIFEST = "manifest.json"
_MOST_FILES = 2_000
_DEPTH = 4
_TOGETHER = 12
"""Curves of so many runs and tags or fewer are one picture."""


class EpochRow(msgspec.Struct, kw_only=True):
    """An epoch as `archipel train` writes it."""

    number: int
    updates: int
    train_loss: float | None
    metrics: dict[str, float | None]
    rate: float | None
    seconds: float | None


class TrainFacts(msgspec.Struct, kw_only=True):
    """metrics.json of `archipel train`."""

    history: list[EpochRow]
    finished: bool = True
    best: int | None = None
    test: dict[str, float | None] = {}


@dataclass
class Run:
    """What a folder has: curves, histograms that a log has, files of weights in their order, facts and notes.

    `model` is the file of the model, an ONNX file or a bundle, None where there is none.

    Example: see `archipel.insight.read_run`.
    """

    curves: list[Curve] = field(default_factory=list)
    histograms: list[HistogramSeries] = field(default_factory=list)
    weights: list[Path] = field(default_factory=list)
    model: Path | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_run(path: Path) -> bool:
    """Whether a path is a folder that is no bundle, or an event file of TensorBoard.

    Example:
        assert not is_run(Path("model.onnx"))
    """
    if path.is_dir():
        return not (path / _MANIFEST).exists()
    return path.is_file() and "tfevents" in path.name


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a folder, or one event file.

    Raises InsightError for a folder with nothing to show, or with files that are too large; MissingExtraError for event
    files without tensorboardX; OSError.

    Example:
        Path("run").mkdir()
        Path("run/rounds.csv").write_text("round,loss\\n1,0.9\\n2,0.7\\n")
        run = read_run("run")
        print(len(run.curves), run.notes)
    """
    path, run = Path(path), Run()
    folder = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else list(_files(path))
    events = [file for file in files if "tfevents" in file.name]
    if events:
        log = read_events(folder, events)
        run.notes += log.notes
        run.histograms += log.histograms.values()
        run.curves += [_curve(tag, "", points, name) for (name, tag), points in log.scalars.items()]
    for file in files:
        read = {METRICS: _read_training, HISTORY: _read_simulation}.get(file.name)
        if file.suffix == ".csv":
            read = _read_csv
        if read is None:
            continue
        where = "" if file.parent == folder else cut(file.parent.relative_to(folder).as_posix())
        try:
            read(run, file, where)
        except (msgspec.MsgspecError, ArchipelError, ValueError, RecursionError) as error:
            run.notes.append(f"{cut(file.name)}: cannot be read ({one_line(error)})")
    run.weights = _weights(files, folder)
    run.model = _model(files, folder)
    if not (run.curves or run.histograms or run.weights or run.model):
        told = f": {'; '.join(run.notes)}" if run.notes else ""
        raise InsightError(
            f"{path}: nothing to show{told}; expected the folder of `archipel train` or `archipel simulate --folder`, "
            "TensorBoard's event files, .csv files of `archipel task metrics`, or .safetensors files"
        )
    if len(run.curves) > MAX_CURVES:
        run.notes.append(f"{len(run.curves):,} curves; the first {MAX_CURVES:,} are shown")
        run.curves = run.curves[:MAX_CURVES]
    _group(run.curves)
    return run


def _weights(files: Sequence[Path], folder: Path) -> list[Path]:
    """Files of weights, in their order; of a simulation those of the server after each round, if it has kept them."""
    found = sorted((file for file in files if file.suffix == ".safetensors"), key=in_order)
    if folder / HISTORY in files:
        return [file for file in found if file.parent == folder / VERSIONS] or [
            file for file in found if file.parent == folder
        ]
    return found


def _model(files: Sequence[Path], folder: Path) -> Path | None:
    """The model of `archipel train`, or the bundle that a simulation has made of its model."""
    here = [file for file in files if file.parent == folder]
    bundles = [file for file in here if file.suffix == ".bundle" and folder / HISTORY in files]
    return next((file for file in here if file.name == MODEL), bundles[0] if len(bundles) == 1 else None)


def _files(folder: Path) -> Iterator[Path]:
    count = 0
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(folders) if depth < _DEPTH else []
        for name in sorted(names):
            count += 1
            if count > _MOST_FILES:
                raise InsightError(f"{folder}: more than {_MOST_FILES:,} files; name the folder of one run")
            file = Path(place, name)
            # A link could lead to any file of this machine.
            if file.is_file() and not file.is_symlink():
                yield file


def _read(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_HISTORY_BYTES:
        raise InsightError(f"{size:,} bytes; at most {MAX_HISTORY_BYTES:,} are read")
    return path.read_bytes()


def _read_training(run: Run, path: Path, where: str) -> None:
    facts = msgspec.json.decode(_read(path), type=TrainFacts)
    columns: dict[str, list[tuple[float, float | None]]] = {}
    for epoch in facts.history:
        row = {"train/loss": epoch.train_loss, "rate": epoch.rate, "seconds": epoch.seconds}
        row |= {f"validation/{name}": value for name, value in epoch.metrics.items()}
        _add(columns, epoch.number, row)
    run.curves += [_curve(name, "", points, where, "epoch") for name, points in columns.items()]
    run.facts.append(("epochs", str(len(facts.history)) if facts.finished else f"{len(facts.history)}, not finished"))
    if facts.best is not None:
        run.facts.append(("best epoch", str(facts.best)))
    run.facts += [
        (cut(f"test {name}"), "none" if value is None else f"{value:.6g}") for name, value in facts.test.items()
    ]


def _read_simulation(run: Run, path: Path, where: str) -> None:
    record = msgspec.json.decode(_read(path), type=Record)
    columns: dict[str, list[tuple[float, float | None]]] = {}
    for row in record.rows:
        values: dict[str, float | None] = {f"train/{name}": value for name, value in row.metrics.items()}
        values |= {f"test/{name}": value for name, value in row.tested.items()}
        values |= {f"devices' mean/{name}": each.mean.value for name, each in row.spread.items()}
        values |= {f"devices' worst 10%/{name}": each.worst.value for name, each in row.spread.items()}
        values |= {"devices": row.devices, "step of the model": row.step, "seconds": row.seconds}
        if row.epsilon is not None:
            values["epsilon"] = row.epsilon
        if row.time:
            values |= {"virtual seconds": row.time, "bytes/up": row.bytes_up, "bytes/down": row.bytes_down}
        _add(columns, row.number, values)
    run.curves += [_curve(name, "", points, where, "round") for name, points in columns.items()]
    run.facts += [
        ("rounds", str(len(record.rows))),
        ("engine", cut(record.engine)),
        ("devices", str(record.population)),
    ]


def _read_csv(run: Run, path: Path, where: str) -> None:
    """A table with a line for each round or step, such as `archipel task metrics --csv` writes."""
    lines = csv.reader(_read(path).decode().splitlines())
    head = next(lines, [])
    if len(head) < 2 or len(head) > MAX_CURVES:
        return
    columns: dict[str, list[tuple[float, float | None]]] = {}
    for line in lines:
        numbers = [_number(text) for text in line]
        if len(line) != len(head) or numbers[0] is None:
            raise InsightError("a line without a number for each column")
        _add(columns, numbers[0], {name: value for name, value in zip(head[1:], numbers[1:]) if value is not None})
    # The time at which a round ended is no curve.
    columns.pop("ended", None)
    run.curves += [_curve(name, "", points, where, cut(head[0])) for name, points in columns.items()]


def _number(text: str) -> float | None:
    try:
        return float(text) if text.strip() else None
    except ValueError:
        return None


def _add(columns: dict[str, list[tuple[float, float | None]]], at: float, row: Mapping[str, float | None]) -> None:
    for name, value in row.items():
        columns.setdefault(name, []).append((at, value))


def _curve(
    name: str, group: str, points: Sequence[tuple[float, float | None]], run: str = "", x: str = "step"
) -> Curve:
    """A curve with MAX_POINTS points at most: each so manieth, and the last."""
    every = max(1, math.ceil(len(points) / MAX_POINTS))
    shown = list(points[::every])
    if points and shown[-1] is not points[-1]:
        shown.append(points[-1])
    return Curve(
        name=cut(name),
        group=group,
        run=cut(run),
        x=x,
        steps=[float(step) for step, _ in shown],
        values=[None if value is None or not math.isfinite(value) else float(value) for _, value in shown],
        left_out=len(points) - len(shown),
    )


def _group(curves: list[Curve]) -> None:
    """Curves of one quantity are one picture: what is trained and what is validated of a loss, and its runs.

    The quantity is the last part of the name; where too many have it, the first parts divide them.
    """
    by_end = Counter((curve.name.rpartition("/")[2], curve.x) for curve in curves)
    several = len({curve.x for curve in curves}) > 1
    for curve in curves:
        end = curve.name.rpartition("/")[2]
        group = end if by_end[end, curve.x] <= _TOGETHER else curve.name.partition("/")[0]
        curve.group = f"{group}, by {curve.x}" if several else group


def in_order(path: Path) -> list[Any]:
    """A key to sort files by, in which numbers in names count as numbers: round-2 comes before round-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,15})", path.as_posix())]
