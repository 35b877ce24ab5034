"""What `compress` and `convert` show while they work, and what Ctrl-C prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from archipel.compression import Progress


def resume_hint(folder: Path | None) -> str:
    """What Ctrl-C prints: whether the run can continue from `folder`, the folder of --work."""
    if folder is None:
        return "nothing was kept; with --work FOLDER an interrupted run can go on"
    return f"what is done is in {folder}; run the same command again to go on from it"


def progress_callback(check: Callable[[], None], show: Callable[[str], None]) -> Callable[[Progress], None]:
    """The `on_progress` of `compress`: shows the progress, then stops if Ctrl-C was pressed."""

    def on_progress(progress: Progress) -> None:
        show(progress_text(progress))
        check()

    return on_progress


def progress_text(progress: Progress) -> str:
    return f"part {progress.part}/{progress.parts}, {progress.what}, {progress.done}/{progress.total}"
