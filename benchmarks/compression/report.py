"""docs/results-compression.md, from what the study found."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cases import CASES
from distillation import GOAL, Distillation
from evaluation import METHOD, accuracy
from floats import Trained
from latency import ROUNDS, THREADS
from recipe_files import FOLDER
from schemes import SCHEMES, Failure, Result
from side_by_side import LATENCY_GOAL, Entry, Table
from stamp import Stamp, described, versions
from subjects import CALIBRATION
from verdict import Outcome, shown
from ways import OURS, TOOLS

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
    accuracy_stamps: list[Stamp] = field(default_factory=list)
    latency_stamps: list[Stamp] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """One verdict of the page: what was asked, the answer, and what the point estimate alone would have said."""

    asked: str
    outcome: Outcome
    by_point: bool
    figures: str


def markdown(study: Study) -> str:
    """The whole page."""
    parts = [_head(study), _answers(study), _floats(study.floats)]
    if study.results:
        parts.append(_results(study.results))
    if study.distillations:
        parts.append(_distillations(study.distillations))
    if study.tables:
        parts.append(_side_by_side(study.tables))
    if study.operators:
        parts.append(_operators(study.operators))
    parts.append(_recipes(study))
    return wrap_prose("\n\n".join(parts) + "\n")


def wrap_prose(page: str) -> str:
    """The page with lines of at most 120 columns, but for tables, code and headings."""
    blocks, is_code = [], False
    for block in page.split("\n\n"):
        begins_as_code, is_code = is_code, is_code ^ (block.count("```") % 2 == 1)
        lines = block.split("\n")
        if begins_as_code or "```" in block or all(len(line) <= 120 or line.startswith(("|", "#")) for line in lines):
            blocks.append(block)
        elif any(line.startswith("- ") for line in lines):
            blocks.append("\n".join(_fill(line, "  " if line.startswith("- ") else "") for line in lines))
        else:
            blocks.append(_fill(" ".join(lines), ""))
    return "\n\n".join(blocks)


def _fill(text: str, indent: str) -> str:
    if text.startswith(("|", "#")):
        return text
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _head(study: Study) -> str:
    peers = {name: number for table in study.tables for name, number in table.versions.items()}
    stamps = [*study.accuracy_stamps, *study.latency_stamps]
    listed = ", ".join([versions(stamps), *(f"{name} {number}" for name, number in peers.items())])
    absent = [name for name in CASES if name not in {each.name for each in study.floats}]
    partly = f"\n- **Only a part of the study**: without {', '.join(absent)}." if absent else ""
    return f"""# Compression: results

Made by `python benchmarks/compression/study.py`; do not edit.

- Float models: {described([each.stamp for each in study.floats])}
- Compression and accuracy: {described(study.accuracy_stamps)}
- Latency: {described(study.latency_stamps)}
- {listed}.{partly}

Accuracies are of the test part of each data set, in percent. Networks and learning rates were chosen by the validation
part, and so was the recipe of 4-bit weights; steps and rates of the others were set by judgement. Two choices came
after a look at test accuracies: har-cnn's augmentation and weight decay (its first setting missed the floor; the new
one was found on people held out of the training part), and that the pruned cifar-resnet8 is trained longer than the
others and with a teacher (how long was then chosen by the validation part).

**Intervals** are 95%, paired, in points of accuracy: {METHOD}. Those of a float model's accuracy are Wilson's score
intervals over test examples. They say what other test examples would change, and nothing about other training runs.

**Met** is decided by the interval: *yes* where the whole interval is on the right side of the limit, *no* where all of
it is on the wrong side, *open* where the interval holds the limit: these test examples cannot tell.

**Latency** is of one example in ONNX Runtime on 1 and 2 threads, as a ratio to the float model optimized by archipel:
all files of a model take turns in one process, {ROUNDS} rounds, medians, with 95% intervals of the median over rounds
(order statistics; of this machine and this run). **Zipped** is the file deflated, as it travels; what is "smaller" is
decided by it. Sizes, FLOPs and latency are those of the first seed."""


def _answers(study: Study) -> str:
    found = list(_all_answers(study))
    count = Counter(each.outcome for each in found)
    parts = [
        "## In short",
        f"{len(found)} verdicts by intervals: {count['yes']} yes, {count['open']} open, {count['no']} no.",
    ]
    for title, wanted in (("Missed", "no"), ("Open", "open")):
        lines = [f"- {each.asked}: {each.figures}{_instead(each)}" for each in found if each.outcome == wanted]
        if lines:
            parts.append(f"**{title}:**\n\n" + "\n".join(lines))
    losses = [f"- {line}" for table in study.tables for line in _losses(table)]
    if losses:
        parts.append("**Where another tool's int8 is better than ours as chosen:**\n\n" + "\n".join(losses))
    return "\n\n".join(parts)


def _instead(each: Answer) -> str:
    return " (the point estimate alone would say yes)" if each.by_point else ""


def _all_answers(study: Study) -> Iterable[Answer]:
    for each in study.floats:
        yield Answer(
            f"{each.name}-{each.seed}, float accuracy of at least {100 * each.floor:.1f}", each.reached,
            each.test_accuracy >= each.floor, _accuracy(each),
        )  # fmt: skip
    for result in study.results:
        if isinstance(result, Result):
            limit = result.scheme.limit
            against = "; against the fine-tuned float ".join(str(change) for change in result.changes)
            yield Answer(
                f"{result.model}, {result.scheme.title}, at most {limit} points lost", result.reached,
                # Round as the intervals' ends are: a loss of exactly the limit is within it.
                round(result.change.points + limit, 9) >= 0, against,
            )  # fmt: skip
    for lift in study.distillations:
        yield Answer(
            f"{lift.teacher}, distillation lifts by at least {GOAL} points", lift.reached, lift.lift.points >= GOAL,
            str(lift.lift),
        )  # fmt: skip
    for table in study.tables:
        verdict = table.verdict()
        one = table.ours.latency[1]
        if verdict:
            yield Answer(
                f"{table.title}, int8 at least as accurate as {verdict.best.name}", verdict.as_good,
                verdict.change.points >= 0, str(verdict.change),
            )  # fmt: skip
            yield Answer(
                f"{table.title}, int8 latency at most {LATENCY_GOAL} of float on 1 thread", verdict.fast,
                one.ratio <= LATENCY_GOAL, str(one),
            )  # fmt: skip


def _losses(table: Table) -> Iterable[str]:
    """Lines on every row of another tool that is smaller zipped, or faster on one thread, than ours as chosen."""
    ours = table.ours
    smaller = sorted((each for each in table.rivals if each.zipped < ours.zipped), key=lambda each: each.zipped)
    faster = sorted(
        (each for each in table.rivals if each.latency[1].high < ours.latency[1].low),
        key=lambda each: each.latency[1].ratio,
    )
    if smaller:
        named = "; ".join(f"{each.zipped / 1e3:.1f} ({each.name})" for each in smaller)
        yield f"{table.title}, zipped kB: ours {ours.zipped / 1e3:.1f}, {named}"
    if faster:
        named = "; ".join(f"{each.latency[1]} ({each.name})" for each in faster)
        yield f"{table.title}, latency to float on 1 thread: ours {ours.latency[1]}, {named}"


def _floats(floats: Sequence[Trained]) -> str:
    rows = [
        [
            each.name, each.seed, each.data, f"{each.parameters:,}", f"{100 * each.validation_accuracy:.2f}",
            _accuracy(each), f"{100 * each.floor:.1f}", shown(each.reached),
        ]
        for each in floats
    ]  # fmt: skip
    titles = ["model", "seed", "data", "parameters", "validation", "test [95%]", "floor", "met"]
    return "## Float models\n\n" + _table(titles, rows)


def _accuracy(each: Trained) -> str:
    low, high = each.interval
    return f"{100 * each.test_accuracy:.2f} [{100 * low:.2f}, {100 * high:.2f}]"


def _results(results: Iterable[Result | Failure]) -> str:
    parts = [
        "## What compression costs",
        "Schemes that train get steps that the float model did not get. So each has a control: the float model after "
        "the same training and nothing else, with the same steps, batches, rates, augmentation and teacher "
        "(`control.py`). Such a scheme must keep within its limit against both, and its verdict is the stricter of the "
        "two.",
    ]
    found = list(results)
    for scheme in SCHEMES:
        rows: list[list[Cell]] = []
        controls = ["fine-tuned float", "change to it [95%]"] if scheme.trains else []
        for each in found:
            if each.scheme.name != scheme.name:
                continue
            if isinstance(each, Failure):
                rows.append([each.model, f"no result: {each.reason}", *[""] * (9 + len(controls))])
                continue
            control = [f"{each.controlled:.2f}", str(each.control)] if scheme.trains else []
            rows.append(
                [
                    each.model, len(each.seeds), f"{each.before:.2f}", f"{each.after:.2f}", str(each.change), *control,
                    shown(each.reached), _change(each.nbytes, 1e3), _change(each.zipped, 1e3),
                    _change(each.flops, 1e6), *(str(each.latency[threads]) for threads in THREADS),
                ]
            )  # fmt: skip
        if rows:
            titles = ["model", "seeds", "float", "after", "change [95%]", *controls, "met", "kB", "zipped kB", "MFLOPs",
                      *(f"latency, {_threads(t)}" for t in THREADS)]  # fmt: skip
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
            shown(each.reached),
        ]
        for each in found
    ]  # fmt: skip
    titles = ["teacher", "its test", "MFLOPs", "seeds", "student alone", "distilled", "lift [95%]", "by seed", "met"]
    words = "The student alone has the same start, steps, rates, augmentation and order of examples."
    return f"## Distillation: at least {GOAL} points\n\n{words}\n\n{_table(titles, rows)}"


def _side_by_side(tables: Iterable[Table]) -> str:
    tables = list(tables)
    counts = ", ".join(f"{tool.name} {len(tool.ways)}" for tool in TOOLS)
    parts = [
        "## Side by side",
        f"int8 after training of the same float model, calibrated on the same {CALIBRATION} training examples. Each "
        "tool is there with its defaults and in the way chosen for this model among its own, all by one rule: the way "
        "whose answers to the validation part are closest to the float model's (mean Kullback-Leibler divergence, "
        f"below each table). Ways: {counts}. `onnxruntime` is `onnxruntime.quantization` alone: its preprocessing, "
        "then `quantize_static` (QDQ, signed weights). NNCF's model runs in OpenVINO, computing in float32 where not "
        "in int8; size: .xml and .bin together. Latency is to the float model in ONNX Runtime. The best of the others "
        "is the row of another tool with the highest test accuracy, by default or chosen, which favours the others.",
    ]
    for table in tables:
        rows: list[list[Cell]] = [
            [
                f"**{entry.name}**" if entry.tool == OURS else entry.name,
                f"{accuracy(entry.correct, table.count):.2f}", f"{entry.nbytes / 1e3:.1f}",
                f"{entry.zipped / 1e3:.1f}", *(f"{entry.latency[t].us:.0f}" for t in THREADS),
                *(str(entry.latency[t]) for t in THREADS),
            ]
            for entry in table.entries
        ]  # fmt: skip
        titles = ["", "test", "kB", "zipped kB", *(f"us, {_threads(t)}" for t in THREADS),
                  *(f"to float, {t}" for t in THREADS)]  # fmt: skip
        parts.append(f"### {table.title}\n\n{_table(titles, rows)}\n\n{_verdict(table)}")
        if table.divergences:
            parts.append(_divergences(table.divergences))
    return "\n\n".join(parts)


def _verdict(table: Table) -> str:
    left_out = [f"Left out: {reason}." for reason in table.missing]
    verdict = table.verdict()
    if verdict is None:
        return " ".join(["No other tool to compare with.", *left_out])
    ours = table.ours

    def small(rival: Entry, met: bool) -> str:
        sizes = f"{ours.zipped / 1e3:.1f} to {rival.zipped / 1e3:.1f} kB"
        return f"{shown('yes' if met else 'no')}, {sizes}"

    lines = [
        f"Ours as chosen: accuracy at least that of the best of the others ({verdict.best.name}): "
        f"{shown(verdict.as_good)}, {verdict.change}.",
        f"Zipped no larger than that one: {small(verdict.best, verdict.small)}; than the smallest of the others "
        f"({verdict.smallest.name}): {small(verdict.smallest, verdict.smallest_met)}.",
        f"Latency at most {LATENCY_GOAL} of float on 1 thread: {shown(verdict.fast)}.",
    ]
    return " ".join([*lines, *left_out])


def _divergences(found: dict[str, dict[str, float]]) -> str:
    parts = [
        f"{tool}: " + "; ".join(f"{way} {value:.3f}" for way, value in sorted(ways.items(), key=lambda each: each[1]))
        for tool, ways in found.items()
    ]
    return "Divergence from float on the validation part, thousandths of a nat. " + ". ".join(parts) + "."


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


def _change(values: tuple[int, int], unit: float) -> str:
    return f"{values[0] / unit:.1f} → {values[1] / unit:.1f}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
