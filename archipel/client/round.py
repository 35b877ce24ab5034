"""A secure round, from sent keys to its result. Each answer of the server has one next step:

| answer | next step |
|---|---|
| 200 | go on |
| 409 "too early" | ask for the round's phase until it is reached, then the same bytes again |
| 409 otherwise | another message of this device is stored: leave the round |
| 410 before the survivors are known | the device is too late: leave the round |
| 410 after that | its update is in the sum: wait for the result |
| 400, 403, 404, 411, 413, 415, 422 | leave the round |
| 401 | a new session, and the same again (session.py) |
| 429, 500, 502, 503, 504, 401 again, silence, an answer cut short or undecodable | the same, for `patience` seconds |

Leaving is silent: the server counts the device as dropped out, and the others' shares make up for it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from archipel.client.config import AgentConfig
from archipel.client.events import EventName
from archipel.client.journal import OpenRound
from archipel.client.session import DeviceSession
from archipel.errors import RefusedError, RoundAbandonedError, UnreachableError
from archipel.protocol.messages import (
    AdvertiseRequest,
    Cohort,
    Confirmations,
    ConfirmRequest,
    Phase,
    Receipt,
    RoundPlan,
    RoundStatus,
    Shares,
    Survivors,
)
from archipel.protocol.sealed import encode
from archipel.protocol.secagg import Participant
from archipel.protocol.vector import Vector, pack

T = TypeVar("T")

Report = Callable[[EventName, dict[str, str | float]], None]

_ORDER: tuple[Phase, ...] = (
    "assigning", "advertising", "sharing", "masking", "confirming", "unmasking", "aggregating", "committed", "failed",
)  # fmt: skip
_TRANSIENT = {401, 429, 500, 502, 503, 504}
_SHORTEST_WAIT = 0.01


class SecureRound:
    """One device's way through one round. `check` raises RoundAbandonedError when work must stop; so may `pause`."""

    def __init__(
        self,
        plan: RoundPlan,
        participant: Participant,
        session: DeviceSession,
        journal: OpenRound,
        config: AgentConfig,
        *,
        pause: Callable[[float], None],
        check: Callable[[], None],
        report: Report,
    ) -> None:
        self._plan = plan
        self._participant = participant
        self._session = session
        self._journal = journal
        self._config = config
        self._pause = pause
        self._check = check
        self._report = report
        self._url = f"/v1/rounds/{plan.round_id}"
        self._started = self._last_answer = time.monotonic()

    def run(self, vector: Vector, on_counted: Callable[[], None]) -> RoundStatus:
        """Send `vector` (uint32 [length]), masked; returns the round's last status: committed or failed.

        `on_counted` is called when the server has said that the update is in the sum. Raises RoundAbandonedError, or
        ProtocolError when what the server sent must not be answered.
        """
        try:
            self._put("advertising", "advertisement", AdvertiseRequest(advertisement=self._participant.advertise()))
            self._report("advertised", {})
            cohort = self._get("sharing", "cohort", Cohort)
            self._put("sharing", "shares", self._participant.share(cohort))
            self._report("shared", {"cohort": len(cohort.members)})
            self._upload(vector, self._get("masking", "shares", Shares))
            survivors = self._get("confirming", "survivors", Survivors)
            confirmation = self._participant.confirm(survivors)
            on_counted()
            self._put("confirming", "confirmation", ConfirmRequest(confirmation=confirmation))
            self._report("confirmed", {"survivors": len(survivors.devices)})
            confirmations = self._get("unmasking", "confirmations", Confirmations)
            self._put("unmasking", "unmasking", self._participant.unmask(confirmations))
            self._report("unmasked", {})
        except _GoneError as error:
            if not self._journal.counted:
                raise RoundAbandonedError(str(error)) from None
        return self._await("committed")

    def _upload(self, vector: Vector, inbox: Shares) -> None:
        self._check()  # nothing is masked for a round that this device leaves
        masked = pack(self._participant.mask(vector, inbox), self._plan.modulus_bits)
        digest = hashlib.sha256(masked).hexdigest()
        self._journal.store_masked(masked, digest)
        self._report("masked", {"bytes": len(masked)})
        self._deliver("masking", lambda: send_masked(self._session, self._plan.round_id, masked, digest))
        self._report("uploaded", {"bytes": len(masked)})

    def _put(
        self, step: Literal["advertising", "sharing", "confirming", "unmasking"], path: str, message: msgspec.Struct
    ) -> None:
        body = encode(message)
        # Before the first byte leaves: after a restart nobody may take this round up again.
        self._journal.advance(step)
        self._deliver(step, lambda: self._session.call("PUT", f"{self._url}/{path}", Receipt, body=body))

    def _deliver(self, phase: Phase, call: Callable[[], Receipt]) -> None:
        while True:
            self._check()
            try:
                self._send(call)
                return
            except _TooEarlyError as error:
                if _ORDER.index(self._status().phase) >= _ORDER.index(phase):
                    # Not early at all: the server has another message of this device.
                    raise RoundAbandonedError(str(error)) from None
            self._await(phase)

    def _get(self, phase: Phase, path: str, kind: type[T]) -> T:
        while True:
            status = self._await(phase)
            try:
                return self._send(lambda: self._session.call("GET", f"{self._url}/{path}", kind))
            except _TooEarlyError:
                self._wait(status.retry_after)

    def _send(self, call: Callable[[], T]) -> T:
        try:
            return self._answered(call)
        except RefusedError as error:
            text = f"round {self._plan.round_id}: {error}"
            if error.status == 410:
                raise _GoneError(text) from None
            if error.status == 409:
                raise _TooEarlyError(text) from None
            raise RoundAbandonedError(text) from None

    def _await(self, phase: Phase) -> RoundStatus:
        """Poll until the round is in `phase` or later. Raises RoundAbandonedError when it failed before that."""
        while True:
            status = self._status()
            if status.phase == "failed" and phase != "committed":
                raise RoundAbandonedError(f"round {self._plan.round_id} failed: {status.reason}")
            if _ORDER.index(status.phase) >= _ORDER.index(phase):
                return status
            self._wait(status.retry_after)

    def _status(self) -> RoundStatus:
        try:
            return self._answered(lambda: self._session.call("GET", self._url, RoundStatus))
        except RefusedError as error:
            raise RoundAbandonedError(f"round {self._plan.round_id}: {error}") from None

    def _answered(self, call: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                result = call()
            except UnreachableError as error:
                self._give_up_if_late(error)
                wait = None
            except RefusedError as error:
                if error.status not in _TRANSIENT:
                    self._last_answer = time.monotonic()
                    raise
                self._give_up_if_late(error)
                wait = error.retry_after
            else:
                self._last_answer = time.monotonic()
                return result
            failures += 1
            self._wait(self._config.backoff * 2 ** min(failures, 16) if wait is None else wait)

    def _give_up_if_late(self, error: Exception) -> None:
        if time.monotonic() - self._last_answer > self._config.patience:
            raise RoundAbandonedError(f"round {self._plan.round_id}: {error}") from None

    def _wait(self, seconds: float) -> None:
        if time.monotonic() - self._started > self._config.round_timeout:
            raise RoundAbandonedError(
                f"round {self._plan.round_id}: not over after {self._config.round_timeout:g} s, left"
            )
        self._check()
        self._pause(min(max(seconds, _SHORTEST_WAIT), self._config.max_wait))


class _GoneError(Exception):
    """The phase is over (410)."""


class _TooEarlyError(Exception):
    """The phase has not begun, or another message of this device is stored (409)."""


def send_masked(session: DeviceSession, round_id: str, masked: bytes, digest: str) -> Receipt:
    """PUT the masked bytes. The same bytes may be sent any number of times. Raises RefusedError, UnreachableError."""
    headers = {"Content-Type": "application/octet-stream", "Digest-SHA256": digest}
    return session.call("PUT", f"/v1/rounds/{round_id}/update", Receipt, body=masked, headers=headers)
