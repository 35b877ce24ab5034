"""`archipel data`: convert data for training, divide it, see what it has, and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from archipel.cli.data.sources import on_bad_option, open_source, source_options
from archipel.cli.data.text import first_lines, statistics_lines
from archipel.cli.input_output.progress_line import progress_line
from archipel.cli.input_output.spelling import rule, spells_options
from archipel.cli.input_output.tables import as_json, show
from archipel.datasets import Dataset, Stream, checked, hold_out, summarize, write_records
from archipel.datasets.dataset import Arrays
from archipel.datasets.left_out import LeftOut, OnBad
from archipel.datasets.taking import take
from archipel.errors import CommandError

RULES = [
    rule(r"with on_bad='skip'", "with --on-bad skip"),
    rule(r"give the delimiter: delimiter='(.+?)', or ','", r"give the delimiter: -o 'delimiter=\1', or -o delimiter=,"),
    rule(r"fields=\{'(.+?)': \[\.\.\.\], '(.+?)': '.+?'\}", r"--field '\1=A,B,...' --field '\2=\2'"),
    rule(r"with fields=\{\.\.\.\}", "with --field"),
    rule(r"names=\[\.\.\.\], skip=1", "-o names=A,B,... -o skip=1"),
    rule(r"names=\[\.\.\.\]", "-o names=A,B,..."),
]
"""How errors of the readers are spelled."""
SPLIT_RULES = [
    *(rule(pattern.pattern, f"archipel data convert with {text}") for pattern, text in RULES[2:]
      if isinstance(text, str) and text.startswith("-")),
    *RULES,
]  # fmt: skip
"""The same for `split`, which has no options of a reader."""


class FieldFacts(msgspec.Struct, frozen=True):
    """A field in JSON."""

    dtype: str
    shape: list[int | None]
    classes: list[str]


class Converted(msgspec.Struct, frozen=True):
    """What `convert` prints as JSON."""

    path: str
    examples: int
    bytes: int
    left_out: int
    first_left_out: list[str]
    fields: dict[str, FieldFacts]


class Inspected(msgspec.Struct, frozen=True):
    """What `inspect` prints as JSON; `examples` is null where only reading everything would tell."""

    path: str
    examples: int | None
    fields: dict[str, FieldFacts]
    first: list[dict[str, Any]]


@click.group()
def data() -> None:
    """Convert data to a fast form for training, divide it, look into it, and compute statistics.

    \b
    archipel data inspect adult.csv                                 fields, dtypes, classes, the first examples
    archipel data stats adult.csv --plot                            mean, deviation, missing values, classes
    archipel data convert adult.csv adult.parquet --on-bad skip --field input=age,hours --field label=income
    archipel data split adult.parquet train.parquet validation.parquet --share 0.2 --by label

    SRC is a CSV file, a Parquet or Arrow file, .npy, .npz, a text, or a folder of any of these, of pictures or of
    sounds (with a folder for each class). It may be larger than memory.
    """


@data.command()
@source_options
@on_bad_option("error")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option("--compression", type=click.Choice(["zstd", "lz4", "snappy", "gzip", "none"]), default="zstd",
              show_default=True, help="How the record file is compressed.")  # fmt: skip
@click.option("--allow-nan", is_flag=True, help="Keep examples with NaN or infinite numbers.")
@click.option("--force", is_flag=True, help="Replace DST.")
@as_json
@spells_options(RULES)
def convert(
    source: Path,
    fields: tuple[str, ...],
    classes: tuple[str, ...],
    options: tuple[str, ...],
    on_bad: str,
    target: Path,
    compression: str,
    allow_nan: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Convert data to a record file (.parquet), and check every example on the way.

    \b
    archipel data convert people.csv train.parquet --field input=age,hours --field label=income
    archipel data convert flowers/ flowers.parquet -o size=64x64 --on-bad skip
    archipel data convert commands/ commands.parquet -o samples=16000

    A record file is Parquet with the fields' shapes and the names of classes in its metadata. Training reads it without
    decoding, in any order, and other programs read it as a table. DST is the old file or the whole new one, whatever
    happens on the way.
    """
    _check_target(target, force)
    opened = open_source(source, fields, classes, options, {"on_bad": on_bad})
    with progress_line() as line:
        skip: OnBad = "skip" if on_bad == "skip" else "error"
        sound = checked(opened, finite=not allow_nan, on_bad=skip, once=True)
        count = write_records(sound, target, compression=compression, progress=_counting(line, opened, "written"))
    left = _left_out(opened, sound)
    size = target.stat().st_size
    result = Converted(str(target), count, size, left.count, left.first, _field_facts(sound))

    def lines() -> Iterator[str]:
        yield f"{target}: {count} examples, {size} bytes"
        yield from field_lines(sound)
        if left.count:
            yield f"{left.count} left out:"
            yield from (f"  {each}" for each in left.first)
            if left.count > len(left.first):
                yield f"  ... and {left.count - len(left.first)} more"

    show(result, as_json, lines())


@data.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("train", metavar="TRAIN", type=click.Path(path_type=Path))
@click.argument("validation", metavar="VALIDATION", type=click.Path(path_type=Path))
@click.option("--share", default=0.1, show_default=True, help="How much of the examples goes into VALIDATION.")
@click.option("--by", metavar="FIELD", help="Give both files the labels of this field in the same proportion.")
@click.option("--seed", default=0, show_default=True, help="Decides which examples.")
@click.option("--force", is_flag=True, help="Replace TRAIN and VALIDATION.")
@as_json
@spells_options(SPLIT_RULES)
def split(
    source: Path, train: Path, validation: Path, share: float, by: str | None, seed: int, force: bool, as_json: bool
) -> None:
    """Divide data at random into two record files, to train on and to validate on.

    \b
    archipel data split adult.parquet train.parquet validation.parquet --share 0.2 --by label

    The same seed divides the same data in the same way. Convert SRC first where its reader needs options.
    """
    for target in (train, validation):
        _check_target(target, force)
    if train.resolve() == validation.resolve() or source.resolve() in (train.resolve(), validation.resolve()):
        raise CommandError("SRC, TRAIN and VALIDATION must be three files; give each a name of its own")
    parts = dict(zip((train, validation), hold_out(source, share, seed=seed, by=by)))
    results = []
    for target, part in parts.items():
        with progress_line() as line:
            count = write_records(part, target, progress=_counting(line, part, f"written to {target.name}"))
        results.append(Converted(str(target), count, target.stat().st_size, 0, [], _field_facts(part)))
    show(results, as_json, (f"{each.path}: {each.examples} examples, {each.bytes} bytes" for each in results))


@data.command()
@source_options
@click.option("--rows", default=3, show_default=True, type=click.IntRange(0, 1000), help="Examples to show.")
@as_json
@spells_options(RULES)
def inspect(
    source: Path,
    fields: tuple[str, ...],
    classes: tuple[str, ...],
    options: tuple[str, ...],
    rows: int,
    as_json: bool,
) -> None:
    """Show the fields of data, their dtypes, shapes and classes, and the first examples.

    \b
    archipel data inspect train.parquet
    archipel data inspect people.csv --field input=age,hours --field label=income --rows 5

    Each column of a CSV file is a field unless --field says more; for training, all columns but the label are one
    field, "input".
    """
    by_column = {"fields": "columns", "missing": "nan", "on_bad": "skip"}
    opened = open_source(source, fields, classes, options, by_column)
    first = _first(opened, rows)
    count = len(opened) if isinstance(opened, Dataset) else None
    taken = len(next(iter(first.values()))) if first else 0
    examples = [{name: _plain(array[row]) for name, array in first.items()} for row in range(taken)]
    result = Inspected(str(source), count, _field_facts(opened), examples)

    def lines() -> Iterator[str]:
        yield f"{source}: {'' if count is None else f'{count} examples, '}{len(opened.fields)} fields"
        yield from field_lines(opened)
        yield from first_lines(first, opened.fields)
        if (left := _left_out(opened)).count:
            yield str(left)

    show(result, as_json, lines())


@data.command()
@source_options
@on_bad_option("skip")
@click.option("--plot", is_flag=True, help="Draw histograms in the terminal; reads the data twice.")
@as_json
@spells_options(RULES)
def stats(
    source: Path,
    fields: tuple[str, ...],
    classes: tuple[str, ...],
    options: tuple[str, ...],
    on_bad: str,
    plot: bool,
    as_json: bool,
) -> None:
    """Show how many examples there are, mean, deviation, range, missing values and how often each class comes.

    \b
    archipel data stats train.parquet
    archipel data stats people.csv --plot

    Reads the data in pieces, in bounded memory. Counts NaN and infinite numbers, which do not go into the rest. In a
    CSV file, cells without a value count as missing, and each column is a field unless --field says more.
    """
    by_column = {"fields": "columns", "missing": "nan", "dtype": "float64", "on_bad": on_bad}
    opened = open_source(source, fields, classes, options, by_column)
    with progress_line() as line:
        used = checked(opened, finite=False, on_bad="skip", once=True) if on_bad == "skip" else opened
        summary = summarize(used, bins=20 if plot else 0, progress=_counting(line, opened, "read"))
    left = _left_out(opened, used)
    show(summary, as_json, statistics_lines(str(source), summary, left))


def _check_target(target: Path, force: bool) -> None:
    if target.suffix != ".parquet":
        raise CommandError(f"{target}: a record file must be called NAME.parquet")
    if target.exists() and not force:
        raise CommandError(f"{target} exists; --force replaces it")
    if not target.parent.is_dir():
        raise CommandError(f"{target.parent}: no such folder; make it first")


def field_lines(data: Dataset | Stream) -> Iterator[str]:
    """A line for each field."""
    width = max(map(len, data.fields))
    for name, field in data.fields.items():
        known = ", ".join(repr(each)[1:-1] for each in field.classes[:8]) + (", ..." if len(field.classes) > 8 else "")
        yield f"  {name:<{width}}  {field}" + (f"  {len(field.classes)} classes: {known}" if known else "")


def _field_facts(data: Dataset | Stream) -> dict[str, FieldFacts]:
    return {
        name: FieldFacts(field.dtype.name, list(field.shape), list(field.classes))
        for name, field in data.fields.items()
    }


def _first(data: Dataset | Stream, rows: int) -> Arrays:
    if isinstance(data, Dataset):
        return take(data, np.arange(min(rows, len(data)))) if rows else {}
    for piece in data.read():
        return {name: array[:rows] for name, array in piece.items()}
    return {}


def _counting(line: Callable[[str], None], data: Dataset | Stream, what: str) -> Callable[[int], None]:
    total = f" of {len(data)}" if isinstance(data, Dataset) else ""
    return lambda done: line(f"{done}{total} examples {what}")


def _left_out(*sources: object) -> LeftOut:
    """What the readers left out, and after them the checks."""
    total = LeftOut()
    for each in dict.fromkeys(map(id, sources)):
        source = next(one for one in sources if id(one) == each)
        left = getattr(source, "left_out", None)
        if isinstance(left, LeftOut):
            total.count += left.count
            total.first = (total.first + left.first)[:10]
    return total


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    if array.size > 64:
        return f"{array.dtype}{list(array.shape)}"
    listed = array.tolist()
    # JSON has no NaN and no infinity.
    return listed if array.dtype.kind != "f" or np.isfinite(array).all() else str(listed)
