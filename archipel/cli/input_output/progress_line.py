"""One line on stderr that says how far long work is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that writes one line on stderr anew, ten times a second at most; in a terminal only.

    An empty text removes the line, so that something else can be printed."""
    shown = 0.0

    def show(text: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if sys.stderr.isatty() and (not text or now - shown >= 0.1):
            shown = now
            # Padded, so that a shorter text leaves nothing of a longer one behind.
            click.echo(f"\r{text[:76]:<76}" + ("" if text else "\r"), nl=False, err=True)

    yield show
    if shown:
        click.echo(f"\r{'':<76}\r", nl=False, err=True)
