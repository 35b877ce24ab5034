"""How Ctrl-C stops long work between two of its steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import click


@contextmanager
def catch_ctrl_c(hint: str) -> Iterator[Callable[[], None]]:
    """Let Ctrl-C end the block at its next call of the yielded function, and a second Ctrl-C at once.

    Either way the hint is printed, if there is one, and click.Abort raised.
    """
    # The handler only notes the request. `check` raises KeyboardInterrupt, between two steps, where the work can write
    # a checkpoint of a finished step.
    before = signal.getsignal(signal.SIGINT)
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
    except KeyboardInterrupt:
        if hint:
            click.echo(f"\n{hint}", err=True)
        raise click.Abort from None
    finally:
        signal.signal(signal.SIGINT, before)
