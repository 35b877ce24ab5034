"""Pausing, resuming and cancelling a fit from another thread, or from a signal handler."""

from __future__ import annotations

import time
from collections.abc import Callable

_POLL_SECONDS = 0.02


class Control:
    """Give one to `fit(control=...)` and call its methods from anywhere; they take effect between two steps.

    Plain flags and no locks: a signal handler may run in the middle of anything.
    """

    def __init__(self) -> None:
        self._paused = False
        self._cancelled = False
        self._waiting = False

    def pause(self) -> None:
        """Hold training after the present step; a fit with a checkpoint writes it first."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def cancel(self) -> None:
        """End training after the present step, paused or not; the fit returns what it has learned."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def waiting(self) -> bool:
        """Whether training stands still now."""
        return self._waiting

    def between_steps(self, on_pause: Callable[[], None]) -> bool:
        """Called by the one that trains: False if it shall end."""
        if self._paused and not self._cancelled:
            on_pause()
            self._waiting = True
            try:
                while self._paused and not self._cancelled:
                    time.sleep(_POLL_SECONDS)
            finally:
                self._waiting = False
        return not self._cancelled
