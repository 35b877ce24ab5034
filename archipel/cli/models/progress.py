"""What `compress` and `convert` show while they work, and how Ctrl-C stops them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from archipel.compression import Progress


def resume_hint(folder: Path | None) -> str:
    """What Ctrl-C prints: whether the run can continue from `folder`, the folder of --work."""
    if folder is None:
        return "nothing was kept; with --work FOLDER an interrupted run can go on"
    return f"what is done is in {folder}; run the same command again to go on from it"


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


def progress_callback(check: Callable[[], None], show: Callable[[str], None]) -> Callable[[Progress], None]:
    """The `on_progress` of `compress`: shows the progress, then stops if Ctrl-C was pressed."""

    def on_progress(progress: Progress) -> None:
        show(progress_text(progress))
        check()

    return on_progress


def progress_text(progress: Progress) -> str:
    return f"part {progress.part}/{progress.parts}, {progress.what}, {progress.done}/{progress.total}"
