"""The messages between a device and the server in a round.

Each answer of the server has one next step: docs/agent-answers.md, "What the server may answer".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from archipel.client.config import AgentConfig
from archipel.client.connection.session import DeviceSession
from archipel.client.events import EventName
from archipel.client.memory.journal import OpenRound
from archipel.errors import RefusedError, RoundAbandonedError, UnreachableError
from archipel.protocol.backoff import Backoff
from archipel.protocol.messages import PART_BYTES, Phase, Receipt, RoundPlan, RoundStatus, UpdateParts
from archipel.protocol.problems import TRY_AGAIN

T = TypeVar("T")

Report = Callable[[EventName, dict[str, str | float]], None]

ORDER: tuple[Phase, ...] = (
    "assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking", "buffering", "updating",
    "aggregating", "committed", "failed",
)  # fmt: skip
LATER = {401, *TRY_AGAIN}
"""Statuses of a server that cannot answer now. 401 is one of them: the session has retried it with a new token."""
WHOLE_BYTES = 8 << 20
"""Longer updates are uploaded in parts, so that a connection that breaks costs one part and not all of it."""
_SHORTEST_WAIT = 0.01


@dataclass(frozen=True)
class Ended:
    """How a round ended for a device whose update the server has: it counts, or the round failed for `reason`."""

    counted: bool
    reason: str = ""


@dataclass(frozen=True)
class Owner:
    """What a round asks of its agent between messages.

    pause    waits (seconds); raises RoundAbandonedError when the agent is stopped
    check    waits while the owner's conditions do not hold; raises RoundAbandonedError when the device must leave
    report   reports an event to the program that embeds the agent
    """

    pause: Callable[[float], None]
    check: Callable[[], None]
    report: Report


class RoundExchange:
    """The part of one device in one round: it sends, polls and waits within the owner's patience."""

    def __init__(
        self,
        plan: RoundPlan,
        session: DeviceSession,
        journal: OpenRound,
        config: AgentConfig,
        owner: Owner,
    ) -> None:
        self._plan = plan
        self._session = session
        self._journal = journal
        self._config = config
        # Twice `backoff`: the transport has used waits of `backoff` already, in its own attempts.
        self._backoff = Backoff(2 * config.backoff, longest=config.max_wait)
        self._pause, self._check, self._report = owner.pause, owner.check, owner.report
        self._url = f"/v1/rounds/{plan.round_id}"
        self._started = self._last_answer = time.monotonic()

    def _upload(self, phase: Phase, data: bytes, digest: str) -> None:
        self._deliver(phase, lambda: send_update(self._session, self._plan.round_id, data, digest, self._hear))
        self._report("uploaded", {"bytes": len(data)})

    def _await_result(self) -> Ended:
        status = self._await("committed")
        return Ended(status.phase == "committed", status.reason)

    def _deliver(self, phase: Phase, call: Callable[[], Receipt]) -> None:
        """Send a message of `phase`, the same bytes each time, until the server has it."""
        while True:
            self._check()
            try:
                self._send(call)
                return
            except TooEarlyError as error:
                # 409 means too early, or that another message of this device is stored; the round's phase tells which.
                if ORDER.index(self._fetch_status().phase) >= ORDER.index(phase):
                    # Not too early, so the server has another message of this device.
                    raise RoundAbandonedError(str(error)) from None
            self._await(phase)

    def _get(self, phase: Phase, path: str, kind: type[T]) -> T:
        """Get a message of `phase`, once the round has reached it."""
        return self._ask(phase, lambda: self._session.call("GET", f"{self._url}/{path}", kind))

    def _ask(self, phase: Phase, call: Callable[[], T]) -> T:
        """What `call` gets from the server, once the round has reached `phase`."""
        while True:
            status = self._await(phase)
            try:
                return self._send(call)
            except TooEarlyError:
                # Two web processes may answer the two requests, and the second may not know of the new phase yet.
                self._wait(status.retry_after)

    def _send(self, call: Callable[[], T]) -> T:
        """Call, with an exception for each refusal that has a next step of its own."""
        try:
            return self._call_patiently(call)
        except RefusedError as error:
            text = f"round {self._plan.round_id}: {error}"
            if error.status == 410:
                raise GoneError(text) from None
            if error.status == 409:
                raise TooEarlyError(text) from None
            raise RoundAbandonedError(text) from None

    def _await(self, phase: Phase) -> RoundStatus:
        """Poll until the round is in `phase` or later. Raises RoundAbandonedError when it failed before that."""
        while True:
            status = self._fetch_status()
            # A failure is a result for `_await_result`; for every other phase it means that the phase never comes.
            if status.phase == "failed" and phase != "committed":
                raise RoundAbandonedError(f"round {self._plan.round_id} failed: {status.reason}")
            # "Or later": a phase may pass between two polls.
            if ORDER.index(status.phase) >= ORDER.index(phase):
                return status
            self._wait(status.retry_after)

    def _fetch_status(self) -> RoundStatus:
        try:
            return self._call_patiently(lambda: self._session.call("GET", self._url, RoundStatus))
        except RefusedError as error:
            raise RoundAbandonedError(f"round {self._plan.round_id}: {error}") from None

    def _call_patiently(self, call: Callable[[], T]) -> T:
        """Call until there is an answer, or until the server has been silent for `patience` seconds."""
        failures = 0
        while True:
            heard = self._last_answer
            try:
                result = call()
            except UnreachableError as error:
                self._give_up_if_late(error)
                wait = None
            except RefusedError as error:
                if error.status not in LATER:
                    # A refusal is an answer, so the silence is over.
                    self._hear()
                    raise
                self._give_up_if_late(error)
                wait = error.retry_after
            else:
                self._hear()
                return result
            # Where something arrived on the way, the link carries, and the waits begin anew.
            failures = failures + 1 if self._last_answer == heard else 1
            self._wait(self._backoff.after(failures, retry_after=wait))

    def _hear(self) -> None:
        self._last_answer = time.monotonic()

    def _give_up_if_late(self, error: Exception) -> None:
        if time.monotonic() - self._last_answer > self._config.patience:
            raise SilentError(f"round {self._plan.round_id}: {error}") from None

    def _wait(self, seconds: float) -> None:
        if time.monotonic() - self._started > self._config.round_timeout:
            raise RoundAbandonedError(
                f"round {self._plan.round_id}: not over after {self._config.round_timeout:g} s (setting round_timeout)"
            )
        self._check()
        # At least the shortest wait: with a `retry_after` of 0 the device would ask without a pause.
        self._pause(min(max(seconds, _SHORTEST_WAIT), self._config.max_wait))


class SilentError(RoundAbandonedError):
    """The server has not answered for `patience` seconds."""


class LostError(Exception):
    """What the round needs after a restart is lost, damaged, or of another round."""


class GoneError(Exception):
    """The phase is over (410)."""


class TooEarlyError(Exception):
    """The phase has not begun, or another message of this device is stored (409)."""


def send_update(
    session: DeviceSession, round_id: str, data: bytes, digest: str, answered: Callable[[], None] = lambda: None
) -> Receipt:
    """Upload the update; the same bytes may be sent again. Raises RefusedError, UnreachableError.

    Args:
        answered: called when the server has a part, which over a slow link is long before the end.
    """
    headers = {"Content-Type": "application/octet-stream", "Digest-SHA256": digest}
    url = f"/v1/rounds/{round_id}/update"
    if len(data) > WHOLE_BYTES and _send_parts(session, f"{url}/parts", data, headers, answered):
        data = b""  # stands for the parts
    return session.call("PUT", url, Receipt, body=data, headers=headers)


def _send_parts(
    session: DeviceSession, url: str, data: bytes, headers: Mapping[str, str], answered: Callable[[], None]
) -> bool:
    """Upload what the server does not have yet; false if it takes no parts."""
    try:
        held = set(session.call("GET", url, UpdateParts).held)
    except RefusedError as error:
        if error.status == 404:  # an older server
            return False
        raise
    for number, start in enumerate(range(0, len(data), PART_BYTES), start=1):
        if number not in held:
            part = data[start : start + PART_BYTES]
            session.call("PUT", f"{url}/{number}", Receipt, body=part, headers=headers)
            answered()
    return True
