"""What the commands of `archipel data` read, and the options that say how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from archipel.datasets import CsvStream, Dataset, Stream, open_file
from archipel.errors import CommandError

_CSV = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".data.gz")
_LISTS = ("columns", "names", "missing_values")

Function = TypeVar("Function", bound=Callable[..., Any])


def source_options(function: Function) -> Function:
    """The argument SRC and the options that `open_source` takes."""
    for decorate in reversed(
        (
            click.argument("source", metavar="SRC", type=click.Path(path_type=Path)),
            click.option("--field", "fields", metavar="NAME=COLUMN,...", multiple=True,
                         help="A field of a CSV file: one column, or several of numbers as one array."),
            click.option("--classes", metavar="COLUMN=TEXT,...", multiple=True,
                         help="The texts of the labels 0, 1, ... of a column; by default all of them, sorted."),
            click.option("-o", "--option", "options", metavar="NAME=VALUE", multiple=True,
                         help="An option of the reader, such as size=32x32 (pictures), samples=16000 (sounds), "
                         "length=64 (texts), columns=a,b (Parquet, Arrow), names=a,b skip=1 missing=nan (CSV)."),
        )
    ):  # fmt: skip
        function = decorate(function)
    return function


def on_bad_option(default: str) -> Callable[[Function], Function]:
    """The option --on-bad."""
    return click.option(
        "--on-bad", type=click.Choice(["error", "skip"]), default=default, show_default=True,
        help="Stop at an example that is damaged, or leave such examples out and count them.",
    )  # fmt: skip


def open_source(
    source: Path, fields: tuple[str, ...], classes: tuple[str, ...], options: tuple[str, ...], for_csv: dict[str, Any]
) -> Dataset | Stream:
    """The examples of a file or folder. A CSV file is read in pieces, so it may be larger than memory.

    Arguments:
        source: the file or folder.
        fields, classes, options: what the user says.
        for_csv: what holds for CSV files where the user says nothing.

    Raises CommandError for an option that cannot be read, DatasetError as the reader does.
    """
    given: dict[str, Any] = {}
    for text in options:
        name, value = _pair("--option", text)
        given[name] = value.split(",") if name in _LISTS else _number_or_text(name, value)
    if fields:
        pairs = [_pair("--field", text) for text in fields]
        given["fields"] = {name: tuple(value.split(",")) if "," in value else value for name, value in pairs}
    if classes:
        given["classes"] = {name: value.split(",") for name, value in (_pair("--classes", text) for text in classes)}
    if not (source.name.lower().endswith(_CSV) and source.is_file()):
        return open_file(source, **given)
    known = sorted(CsvStream.__init__.__kwdefaults__ or {})
    if unknown := sorted(set(given) - set(known)):
        raise CommandError(f"{source}: CSV files have no option {unknown[0]!r}; they have {', '.join(known)}")
    return CsvStream(source, **{**for_csv, **given})


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CommandError(f"{option} {text}: expected NAME=VALUE")
    return name, value


def _number_or_text(name: str, value: str) -> Any:
    if name == "size":
        height, _, width = value.partition("x")
        if not (height.isascii() and height.isdigit() and width.isascii() and width.isdigit()):
            raise CommandError(f"--option size={value}: expected HEIGHTxWIDTH, such as 32x32")
        return int(height), int(width)
    return int(value) if value.isascii() and value.isdigit() else value
