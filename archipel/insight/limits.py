"""What a page may hold at most. Models and logs come from anybody, so each limit is checked before memory is taken."""

from __future__ import annotations

MAX_NODES = 100_000
"""Nodes of one file's graphs, those of bodies and functions included."""
MAX_PAGE_NODES = 120_000
"""Nodes of all graphs of a page."""
MAX_FILE_BYTES = 2**31 - 1
"""Bytes of an ONNX file with its external data."""
MAX_TEXT = 300
"""Characters of a name or a text; longer ones are cut, and end in an ellipsis."""
MAX_ATTRIBUTES = 64
MAX_SCOPE_DEPTH = 32
MAX_TENSORS = 20_000
"""Tensors of a page of which statistics are shown."""
MAX_VERSIONS = 200
"""Versions of the weights, or rounds."""
MAX_EVENT_BYTES = 256 << 20
"""Bytes of all event files of a folder."""
MAX_RECORD_BYTES = 64 << 20
"""Bytes of one record of an event file."""
MAX_POINTS = 2_000
"""Points of one curve; of a longer one each so manieth is shown, and the last."""
MAX_CURVES = 500
MAX_HISTOGRAMS = 2_000
"""Tensors with histograms over rounds."""
MAX_HISTORY_BYTES = 64 << 20
"""Bytes of a file of a run's history."""
MAX_PAGE_BYTES = 128 << 20
"""Bytes of a whole page."""
BINS = 40
"""Bars of a histogram."""


def cut(text: str) -> str:
    """The text with at most MAX_TEXT characters."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "\N{HORIZONTAL ELLIPSIS}"
