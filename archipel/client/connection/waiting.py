"""Check-ins that the server may keep back until the device is in a round, so that it learns of that at once.

On the way to the server something may cut a connection off that is silent for long. That is an ordinary end of waiting:
the device checks in once more, without waiting, and for a while it asks for less time than it was cut off after.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from msgspec.structs import replace

from archipel.client.config import AgentConfig
from archipel.client.connection.session import DeviceSession
from archipel.errors import RefusedError, RoundAbandonedError, UnreachableError
from archipel.protocol.messages import CheckIn, CheckInResponse
from archipel.protocol.sealed import encode

T = TypeVar("T")

_SHORTEST = 1.0
"""Seconds: for less, the server need not keep anything back."""
_CAUTIOUS_SECONDS = 3600.0
"""For how long a device asks for less after it was cut off."""
_LOOK_SECONDS = 0.25
"""How often a device that waits looks whether it was stopped."""
_CUT = frozenset({502, 504})
"""What proxies answer that do not wait for the server any longer."""


class Waiting:
    """How long this device lets the server keep check-ins back."""

    def __init__(self, config: AgentConfig) -> None:
        # A silence of `read_timeout` would be taken for a broken connection.
        self._most = min(config.wait_seconds, config.read_timeout / 1.5)
        self._less, self._until = 0.0, 0.0

    def seconds(self) -> float:
        """How long the next check-in may be kept back; 0.0: not at all."""
        seconds = self._less if time.monotonic() < self._until else self._most
        return round(seconds, 3) if seconds >= _SHORTEST else 0.0

    def check_in(self, session: DeviceSession, told: CheckIn, stop: threading.Event | None) -> CheckInResponse:
        """Check in. With `stop` the server may keep its answer back, and the check-in ends as soon as that is set.

        Raises RoundAbandonedError when `stop` is set, UnreachableError or RefusedError. The session must not be used
        again after RoundAbandonedError: its answer may still come.
        """
        seconds = 0.0 if stop is None else self.seconds()
        if stop is None or not seconds:
            return _send(session, told)
        began = time.monotonic()
        try:
            return _unless_stopped(lambda: _send(session, replace(told, wait=seconds)), stop)
        except (UnreachableError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.status not in _CUT:
                raise
        self._less = 0.8 * min(time.monotonic() - began, seconds)
        self._until = time.monotonic() + _CAUTIOUS_SECONDS
        return _send(session, told)


def _send(session: DeviceSession, told: CheckIn) -> CheckInResponse:
    return session.call("POST", "/v1/check-ins", CheckInResponse, body=encode(told), retry=not told.wait)


def _unless_stopped(work: Callable[[], T], stop: threading.Event) -> T:
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised in the other thread
            result.set_exception(error)

    # A daemon: where the device was stopped, nobody waits for the answer.
    threading.Thread(target=run, name="check-in", daemon=True).start()
    while not stop.is_set():
        if futures.wait([result], _LOOK_SECONDS).done:
            return result.result()
    raise RoundAbandonedError("the agent was stopped")
