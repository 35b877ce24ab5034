"""What commands print: tables for people, JSON for scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click
import msgspec

if TYPE_CHECKING:
    from archipel.lite_runtime.confinement import Holding

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def show(values: msgspec.Struct | Sequence[msgspec.Struct], as_json: bool, lines: Iterable[str]) -> None:
    """`values` as JSON, or `lines` for people."""
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(values), indent=2).decode())
        return
    for line in lines:
        click.echo(line)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be."""
    everything = [head, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in everything]


def protection_rows(found: Iterable[Holding]) -> list[tuple[str, str, str]]:
    """Rows of the table of what protects a machine."""
    return [(each.name, "yes" if each.holds else "no", each.what) for each in found]


def one_line(text: str) -> str:
    """What a server said, harmless in a terminal and in a log."""
    return "".join(each if each.isprintable() else "?" for each in text)
