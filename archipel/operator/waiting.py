"""Waits for the end of a task or a rollout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from archipel.errors import ClientError, RefusedError, UnreachableError
from archipel.operator.connection import OnOutage
from archipel.protocol.problems import TELLS_WHEN

OUTAGE_SECONDS = 600.0
"""How long to wait for a server that does not answer, where the caller gives no timeout."""


class Ending(Protocol):
    """A task or a rollout; `ended` is when it ended, in Unix seconds, and None until then."""

    @property
    def ended(self) -> float | None: ...


E = TypeVar("E", bound=Ending)


def wait_until_ended(
    ask: Callable[[], E],
    state: Callable[[E], object],
    describe: Callable[[E], str],
    *,
    timeout: float | None,
    poll: float,
    on_change: Callable[[E], None] | None,
    on_outage: OnOutage | None = None,
) -> E:
    """Call `ask` every `poll` seconds until `ended` of its answer is set; return that answer.

    `on_change` is called with each answer whose `state` differs from that of the one before. Where the server has
    answered once and then stops, this keeps asking until `timeout`, or for OUTAGE_SECONDS without a timeout. Raises
    ClientError, with the text of `describe`, after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    give_up: float | None = None
    seen: object = None
    while True:
        try:
            answer = ask()
        except (UnreachableError, RefusedError) as error:
            # The first call must succeed: a wrong address or token should not look like an outage.
            if seen is None or (isinstance(error, RefusedError) and error.status not in TELLS_WHEN):
                raise
            if give_up is None:
                give_up = deadline or time.monotonic() + OUTAGE_SECONDS
                if on_outage is not None:
                    on_outage(error)
            if time.monotonic() > give_up:
                raise
            time.sleep(poll)
            continue
        if give_up is not None:
            give_up = None
            if on_outage is not None:
                on_outage(None)
        if on_change is not None and state(answer) != seen:
            on_change(answer)
        seen = state(answer)
        # Before the deadline, so that an end that came in time is never reported as a timeout.
        if answer.ended is not None:
            return answer
        if deadline is not None and time.monotonic() > deadline:
            raise ClientError(f"after {timeout:g} s {describe(answer)}")
        time.sleep(poll)
