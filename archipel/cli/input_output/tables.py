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
    """Print `values` as JSON, or `lines` for people.

    Arguments:
        values: the struct or the list of structs that the lines show.
        as_json: the value of the option --json.
        lines: the same as text; not read where JSON is printed.
    """
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(values), indent=2).decode())
        return
    for line in lines:
        click.echo(line)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> list[str]:
    """The lines of a table, each column as wide as its widest cell. All rows have as many cells as `head`.

    The first `numbers` columns are aligned to the right.
    """
    everything = [head, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(head))]
    lines = (
        [cell.rjust(width) if at < numbers else cell.ljust(width) for at, (cell, width) in enumerate(zip(row, widths))]
        for row in everything
    )
    return ["  ".join(cells).rstrip() for cells in lines]


def protection_rows(protections: Iterable[Holding]) -> list[tuple[str, str, str]]:
    """Rows for `table`: name, whether it holds, and what it is, for each protection of this machine."""
    return [(each.name, "yes" if each.holds else "no", each.what) for each in protections]


def one_line(text: str) -> str:
    """A server's text, harmless in a terminal and in a log: "?" for line breaks and for other control characters.

    Without this a server could move the cursor, hide text, or write lines of its own into a device's log.
    """
    return "".join(each if each.isprintable() else "?" for each in text)
