"""How much resident memory this process takes at most, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

_PROCESS = Path("/proc/self")


class ResidentPeak:
    """The rise of the process's resident memory from when this is made.

    It counts the whole process: other threads too, and nothing where memory is used again that the process had before.
    """

    def __init__(self) -> None:
        self._before: int | None = None
        try:
            (_PROCESS / "clear_refs").write_text("5")  # the peak so far is forgotten: it is what is resident now
            self._before = _peak()
        except OSError:
            pass  # not Linux, or a system that does not let a process do this

    def bytes_since(self) -> int | None:
        """Bytes at the highest moment since then; None where the system does not say."""
        return None if self._before is None else _peak() - self._before


def _peak() -> int:
    lines = (_PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
