"""What `archipel data` prints for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from archipel.cli.input_output.tables import one_line, table
from archipel.datasets.dataset import Arrays, Field
from archipel.datasets.left_out import LeftOut
from archipel.datasets.summary import FieldSummary, Summary

_BAR = 40
_SHOWN = 32
_FEW = 20


def first_lines(first: Arrays, fields: Mapping[str, Field]) -> Iterator[str]:
    """The first examples, a line for each field of each."""
    width = max(map(len, fields), default=0)
    for row in range(len(next(iter(first.values()))) if first else 0):
        yield f"example {row}"
        for name, array in first.items():
            with np.printoptions(threshold=12, edgeitems=2, precision=4, linewidth=10_000):
                text = " ".join(str(array[row]).split())
            classes = fields[name].classes
            if classes and array[row].ndim == 0 and 0 <= int(array[row]) < len(classes):
                text += f" ({one_line(classes[int(array[row])])})"
            yield f"  {name:<{width}}  {text[:100]}{' ...' if len(text) > 100 else ''}"


def statistics_lines(source: str, summary: Summary, left: LeftOut) -> Iterator[str]:
    """A table of the fields, then the classes, features and histograms of each."""
    out = f", {left}" if left.count else ""
    yield f"{source}: {summary.examples} examples, {summary.bytes} bytes in memory{out}"
    head = ("field", "dtype", "values", "missing", "infinite", "mean", "std", "low", "high")
    yield from table(head, [_row(name, field) for name, field in summary.fields.items()])
    for name, field in summary.fields.items():
        # Whole numbers without names, such as an age, are classes only where there are few.
        as_classes = bool(field.classes) and (len(field.classes) <= _FEW or not all(map(_is_number, field.classes)))
        if as_classes:
            yield f"\n{name}: {len(field.classes)} classes"
            yield from _bars([one_line(each) for each in field.classes], list(field.classes.values()))
        if len(field.means) > 1:
            yield f"\n{name}: {'features' if len(field.shape) == 1 else 'channels'}"
            rows = [(str(at), _text(mean), _text(std)) for at, (mean, std) in enumerate(zip(field.means, field.stds))]
            yield from table(("number", "mean", "std"), rows[:_SHOWN], numbers=3)
            if len(rows) > _SHOWN:
                yield f"... and {len(rows) - _SHOWN} more; --json has all"
        if field.histogram and not as_classes and field.low is not None and field.high is not None:
            yield f"\n{name}: from {_text(field.low)} to {_text(field.high)}"
            edges = np.linspace(field.low, field.high, len(field.histogram) + 1)
            yield from _bars([_text(float(edge)) for edge in edges[:-1]], field.histogram)


def _row(name: str, field: FieldSummary) -> tuple[str, ...]:
    shape = ", ".join("n" if size is None else str(size) for size in field.shape)
    numbers = (_text(value) for value in (field.mean, field.std, field.low, field.high))
    counts = (str(value) for value in (field.values, field.missing, field.infinite))
    return (name, f"{field.dtype}[{shape}]", *counts, *numbers)


def _bars(names: list[str], counts: list[int]) -> Iterator[str]:
    most, width = max(counts, default=0), max(map(len, names[:_SHOWN]), default=0)
    digits = len(str(most))
    for name, count in list(zip(names, counts))[:_SHOWN]:
        yield f"  {name:<{width}}  {count:>{digits}}  {'#' * round(_BAR * count / max(most, 1))}".rstrip()
    if len(names) > _SHOWN:
        yield f"  ... and {len(names) - _SHOWN} more; --json has all"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdigit()
