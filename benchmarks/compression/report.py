"""docs/results-compression.md, from what the study found."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime
from distillation import GOAL, Distillation
from evaluation import METHOD, accuracy
from floats import Trained
from latency import ROUNDS, THREADS
from recipe_files import FOLDER
from schemes import SCHEMES, Failure, Result
from side_by_side import BASE, LATENCY_GOAL, OURS, Table
from subjects import CALIBRATION

import archipel

Cell = str | int | float
Operators = tuple[list[tuple[str, float]], list[tuple[str, float]]]
"""Of the float and the int8 model: operators with their microseconds, the whole call last."""


@dataclass
class Study:
    """Everything that the report shows, in its order; `operators` by the model's title."""

    floats: list[Trained] = field(default_factory=list)
    results: list[Result | Failure] = field(default_factory=list)
    distillations: list[Distillation] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    operators: dict[str, Operators] = field(default_factory=dict)
    seconds: float = 0.0


def markdown(study: Study) -> str:
    """The whole page."""
    parts = [_head(study), _floats(study.floats)]
    if study.results:
        parts.append(_results(study.results))
    if study.distillations:
        parts.append(_distillations(study.distillations))
    if study.tables:
        parts.append(_side_by_side(study.tables))
    if study.operators:
        parts.append(_operators(study.operators))
    parts.append(_recipes(study))
    return "\n\n".join(parts) + "\n"


def _head(study: Study) -> str:
    return f"""# Compression: results

Made by `python benchmarks/compression/study.py`; do not edit. archipel {archipel.__version__}, ONNX Runtime
{onnxruntime.__version__}, {_processor()}; {study.seconds / 60:.0f} minutes of work, training of the float models
included.

Accuracies are of the test part of each data set, in percent. Networks and learning rates were chosen by the validation
part, and so were the recipes of int8 after training (`choices.py`) and of 4-bit weights; steps and rates of the others
were set by judgement. Two choices came after a look at test accuracies: har-cnn's augmentation and weight decay (its
first setting missed the floor; the new one was found on people held out of the training part), and that the pruned
cifar-resnet8 is trained longer than the others and with a teacher (fine-tuned for 600 steps it lost 3.4 points, for
1,500 2.1; how long was then chosen by the validation part).

**Intervals** are 95%, paired, in points of accuracy: {METHOD}. **Met** compares the point estimate with the limit.
**Latency** is of one example in ONNX Runtime on 1 and 2 threads, as a ratio to the float model optimized by archipel:
all files of a model take turns in one process, {ROUNDS} rounds, medians. **Zipped** is the file deflated, as it
travels. Sizes, FLOPs and latency are those of the first seed."""


def _floats(floats: Sequence[Trained]) -> str:
    rows = [
        [
            each.name, each.seed, each.data, f"{each.parameters:,}", f"{100 * each.validation_accuracy:.2f}",
            f"{100 * each.test_accuracy:.2f}", f"{100 * each.floor:.1f}", _met(each.reached), f"{each.seconds:.0f} s",
        ]
        for each in floats
    ]  # fmt: skip
    titles = ["model", "seed", "data", "parameters", "validation", "test", "floor", "met", "training"]
    return "## Float models\n\n" + _table(titles, rows)


def _results(results: Iterable[Result | Failure]) -> str:
    parts = ["## What compression costs"]
    found = list(results)
    for scheme in SCHEMES:
        rows: list[list[Cell]] = []
        for each in found:
            if each.scheme.name != scheme.name:
                continue
            if isinstance(each, Failure):
                rows.append([each.model, f"no result: {each.reason}", *[""] * 8])
                continue
            rows.append(
                [
                    each.model, len(each.seeds), f"{each.before:.2f}", f"{each.after:.2f}", str(each.change),
                    _met(each.reached), _change(each.nbytes, 1e3), _change(each.zipped, 1e3), _change(each.flops, 1e6),
                    " / ".join(f"{each.ratio[threads]:.2f}" for threads in THREADS),
                ]
            )  # fmt: skip
        if rows:
            titles = ["model", "seeds", "float", "after", "change [95%]", "met", "kB", "zipped kB", "MFLOPs", "latency"]
            parts.append(f"### {scheme.title}: at most {scheme.limit} points lost\n\n" + _table(titles, rows))
    several = [
        f"{each.model}, {each.scheme.title}: " + ", ".join(f"{points:+.2f}" for points in each.change.seeds)
        for each in found
        if isinstance(each, Result) and len(each.seeds) > 1
    ]
    if several:
        parts.append("Changes by seed. " + "; ".join(several) + ".")
    return "\n\n".join(parts)


def _distillations(found: Iterable[Distillation]) -> str:
    rows = [
        [
            each.teacher, f"{each.of_teacher:.2f}", _change(each.flops, 1e6), len(each.seeds), f"{each.alone:.2f}",
            f"{each.distilled:.2f}", str(each.lift), ", ".join(f"{points:+.2f}" for points in each.lift.seeds),
            _met(each.reached),
        ]
        for each in found
    ]  # fmt: skip
    titles = ["teacher", "its test", "MFLOPs", "seeds", "student alone", "distilled", "lift [95%]", "by seed", "met"]
    words = [_lifted(each) for each in found]
    return f"## Distillation: at least {GOAL} points\n\n{_table(titles, rows)}\n\n{' '.join(words)}"


def _lifted(each: Distillation) -> str:
    if each.lift.low > 0:
        how = "lifts the student" if each.reached else f"lifts the student, by less than {GOAL} points"
    else:
        how = "does not lift the student beyond what the test part can tell"
    return f"Distillation from {each.teacher} {how}: {each.lift} points."


def _side_by_side(tables: Iterable[Table]) -> str:
    tables = list(tables)
    parts = [
        "## Side by side",
        f"int8 after training of the same float model, calibrated on the same {CALIBRATION} training examples. "
        "`onnxruntime` is `onnxruntime.quantization` alone: its preprocessing, then `quantize_static` (QDQ, MinMax; "
        "signed activations unless said). NNCF's model runs in OpenVINO, computing in float32 where not in int8; "
        "size: .xml and .bin together. Latency is to the float model in ONNX Runtime.",
    ]
    for table in tables:
        rows = []
        for entry in table.entries:
            name = f"**{OURS}**" if entry.name == OURS else f"float, {OURS}" if entry.name == BASE else entry.name
            rows.append(
                [
                    name, f"{accuracy(entry.correct, table.count):.2f}", f"{entry.nbytes / 1e3:.1f}",
                    f"{entry.zipped / 1e3:.1f}", *(f"{entry.us[t]:.0f}" for t in THREADS),
                    *(f"{entry.ratio[t]:.2f}" for t in THREADS),
                ]
            )  # fmt: skip
        titles = ["", "test", "kB", "zipped kB", *(f"us, {_threads(t)}" for t in THREADS),
                  *(f"to float, {t}" for t in THREADS)]  # fmt: skip
        parts.append(f"### {table.title}\n\n{_table(titles, rows)}\n\n{_verdict(table)}")
    return "\n\n".join(parts)


def _verdict(table: Table) -> str:
    verdict = table.verdict()
    lines = [
        f"Accuracy against the best of the others ({verdict.best}): {verdict.change}, {_met(verdict.as_good)}.",
        f"As small as it: {_met(verdict.small)}; as the smallest ({verdict.smallest}): {_met(verdict.smallest_met)}.",
        f"Latency at most {LATENCY_GOAL} of float on 1 thread: {_met(verdict.fast)}.",
        *(f"Left out: {reason}." for reason in table.missing),
    ]
    versions = [entry.versions for entry in table.entries if entry.versions]
    return " ".join([*lines, *(f"({each})" for each in versions)])


def _operators(found: dict[str, Operators]) -> str:
    parts = [
        "## Where int8 is not fast",
        f"Models above {LATENCY_GOAL} of float on 1 thread, in microseconds by operator: the five longest of each, "
        "from ONNX Runtime's trace less what tracing costs. What was tried is in docs/performance.md.",
    ]
    for title, (float_rows, int8_rows) in found.items():
        rows = [[_named(a), _named(b)] for a, b in zip(_longest(float_rows), _longest(int8_rows))]
        parts.append(f"### {title}\n\n" + _table(["float", "int8"], rows))
    return "\n\n".join(parts)


def _longest(rows: list[tuple[str, float]], count: int = 5) -> list[tuple[str, float]]:
    *operators, total = rows
    return [*sorted(operators, key=lambda row: -row[1])[:count], total]


def _named(row: tuple[str, float]) -> str:
    return f"{row[1]:.0f} {row[0]}"


def _recipes(study: Study) -> str:
    used = [each.recipe for each in study.results if isinstance(each, Result)]
    used += [recipe for each in study.distillations for recipe in each.recipes]
    parts = [
        "## Recipes",
        "As in `benchmarks/compression/recipes`; what follows a dot in the name is the model that the recipe is for.",
    ]
    for path in sorted(FOLDER.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        if text in used:
            parts.append(f"`{path.stem}`\n\n```toml\n{text.strip()}\n```")
    return "\n\n".join(parts)


def _table(titles: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = [list(titles), ["---"] * len(titles), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _met(reached: bool) -> str:
    return "yes" if reached else "**no**"


def _change(values: tuple[int, int], unit: float) -> str:
    return f"{values[0] / unit:.1f} → {values[1] / unit:.1f}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()
