"""Pages that follow what happens: open event streams, the thread that looks for news, and what a task's page shows."""

from archipel.server.dashboard.live.changes import read_stamps
from archipel.server.dashboard.live.hub import LivePages, Shown, Viewer
from archipel.server.dashboard.live.streams import (
    LIVE,
    KeptCharts,
    make_shown,
    open_stream,
    show_results,
    show_rounds,
)

__all__ = [
    "LIVE",
    "KeptCharts",
    "LivePages",
    "Shown",
    "Viewer",
    "make_shown",
    "open_stream",
    "read_stamps",
    "show_results",
    "show_rounds",
]
