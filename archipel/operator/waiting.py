"""Waiting for what ends some time: tasks and rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from archipel.errors import ClientError, RefusedError, UnreachableError
from archipel.operator.connection import OnOutage
from archipel.protocol.problems import TELLS_WHEN

OUTAGE_SECONDS = 600.0
"""How long a server that is away is waited for where the caller gives no time."""


class Ending(Protocol):
    """`ended`: when it ended, in Unix seconds; None until then."""

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
    """Ask every `poll` seconds until `ended` of the answer is set; `on_change` sees each with another `state`.

    A server that has answered once and does so no more is asked until `timeout`, without one for OUTAGE_SECONDS.
    Raises ClientError, with what `describe` says, after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    give_up: float | None = None
    seen: object = None
    while True:
        try:
            found = ask()
        except (UnreachableError, RefusedError) as error:
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
        if on_change is not None and state(found) != seen:
            on_change(found)
        seen = state(found)
        if found.ended is not None:
            return found
        if deadline is not None and time.monotonic() > deadline:
            raise ClientError(f"after {timeout:g} s {describe(found)}")
        time.sleep(poll)
