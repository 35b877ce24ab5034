"""Pauses, resumes and cancels a fit from another thread, or from a signal handler."""

from __future__ import annotations

import time
from collections.abc import Callable

_POLL_SECONDS = 0.02


class Control:
    """Pauses, resumes and cancels the fit that it is given to; its methods take effect between two steps.

    Any thread and any signal handler may call them. Plain flags and no locks, because a signal handler may interrupt
    the thread that holds a lock.

    Example:
        control = Control()
        signal.signal(signal.SIGTERM, lambda *_: control.cancel())
        runtime.fit(x, y, control=control)
    """

    def __init__(self) -> None:
        self._paused = False
        self._cancelled = False
        self._waiting = False

    def pause(self) -> None:
        """Let training wait after the present step; a fit with a checkpoint writes it first."""
        self._paused = True

    def resume(self) -> None:
        """Let training go on."""
        self._paused = False

    def cancel(self) -> None:
        """End training after the present step, paused or not; the fit returns what it has learned."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    @property
    def waiting(self) -> bool:
        """Whether training is paused now, after the step that `pause` let it finish."""
        return self._waiting

    def between_steps(self, on_pause: Callable[[], None]) -> bool:
        """Called by the training thread after each step: waits while paused. Returns False if training shall end."""
        if self._paused and not self._cancelled:
            on_pause()
            self._waiting = True
            try:
                while self._paused and not self._cancelled:
                    time.sleep(_POLL_SECONDS)
            finally:
                self._waiting = False
        return not self._cancelled
