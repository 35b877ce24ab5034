"""Whether the device may work now: asked before work, between training steps and between messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from archipel.client.conditions.pause import paused
from archipel.client.events import EventName
from archipel.errors import RoundAbandonedError

MayWork = Callable[[], bool | str]
"""True or an empty text: yes. False or a reason: no."""


class Gate:
    """Asks the owner's pause and `may_work`. `stop` ends everything, also waiting."""

    def __init__(
        self,
        folder: Path,
        may_work: MayWork | None,
        report: Callable[[EventName, dict[str, str | float]], None],
        *,
        ask_again: float,
        resume_within: float,
    ) -> None:
        self.stop = threading.Event()
        self._folder = folder
        self._may_work = may_work
        self._report = report
        self._ask_again = ask_again
        self._resume_within = resume_within

    def why_not(self) -> str:
        """Empty, or one line for the owner."""
        reason = paused(self._folder)
        if reason or self._may_work is None:
            return reason
        answer = self._may_work()
        if isinstance(answer, str):
            return answer and f"the conditions for work do not hold: {answer}"
        return "" if answer else "the conditions for work do not hold"

    def pass_or_wait(self) -> None:
        """Return at once while work may go on, else stand still until it may again, for `resume_within` seconds.

        Raises RoundAbandonedError after that, or when stopped. Nothing is asked of the server meanwhile.
        """
        if self.stop.is_set():
            raise RoundAbandonedError("the agent was stopped")
        reason = self.why_not()
        if not reason:
            return
        self._report("paused", {"reason": reason})
        deadline = time.monotonic() + self._resume_within
        while reason:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RoundAbandonedError(f"{reason}, for {self._resume_within:g} seconds (setting resume_within)")
            self.pause(min(self._ask_again, left))
            reason = self.why_not()
        self._report("resumed", {})

    def pause(self, seconds: float) -> None:
        """Raises RoundAbandonedError when stopped."""
        if self.stop.wait(seconds):
            raise RoundAbandonedError("the agent was stopped")
