"""The gate that the agent passes before work, between training steps and between messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from archipel.client.conditions.pause import paused
from archipel.client.events import EventName
from archipel.errors import RoundAbandonedError

MayWork = Callable[[], bool | str]
"""Whether the device may work: True or an empty text for yes, False or a reason for no."""


class Gate:
    """Asks the owner's pause and `may_work` whether the device may work.

    `report` gets the events. While the answer is no, the gate asks again every `ask_again` seconds, for at most
    `resume_within` seconds. Setting `stop` ends work and waiting.
    """

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
        """Empty if the device may work, else the reason in one line for the owner."""
        # The owner's pause first: then the program's own function need not be called.
        reason = paused(self._folder)
        if reason or self._may_work is None:
            return reason
        answer = self._may_work()
        if isinstance(answer, str):
            return answer and f"the conditions for work do not hold: {answer}"
        return "" if answer else "the conditions for work do not hold"

    def pass_or_wait(self) -> None:
        """Return at once if the device may work, else wait until it may, and send nothing to the server meanwhile.

        Raises RoundAbandonedError after `resume_within` seconds, or when `stop` is set.
        """
        if self.stop.is_set():
            raise RoundAbandonedError("the agent was stopped")
        reason = self.why_not()
        if not reason:
            return
        self._report("paused", {"reason": reason})
        # By the monotonic clock, because the owner may set the other one while the device waits.
        deadline = time.monotonic() + self._resume_within
        while reason:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RoundAbandonedError(f"{reason}, for {self._resume_within:g} seconds (setting resume_within)")
            self.pause(min(self._ask_again, left))
            reason = self.why_not()
        self._report("resumed", {})

    def pause(self, seconds: float) -> None:
        """Wait. Raises RoundAbandonedError when `stop` is set."""
        if self.stop.wait(seconds):
            raise RoundAbandonedError("the agent was stopped")
