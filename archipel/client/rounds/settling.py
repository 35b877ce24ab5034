"""How this device ends rounds: at once, when their result is known, or after a restart."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from archipel.client.connection.session import DeviceSession
from archipel.client.connection.transport import Transport
from archipel.client.device import Device
from archipel.client.events import Outcome
from archipel.client.memory.journal import OpenRound
from archipel.client.rounds.exchange import LATER, Ended, send_update
from archipel.errors import (
    ArchipelError,
    ClientError,
    RefusedError,
    RoundAbandonedError,
    SessionRefusedError,
    UnreachableError,
)
from archipel.protocol.messages import LeaveReason, LeaveRequest, Receipt, RoundStatus
from archipel.protocol.sealed import encode


class Settling:
    """Closes rounds in the journal, and keeps what the device learned in the ones that count."""

    def __init__(self, device: Device, transport: Transport, session: DeviceSession) -> None:
        self._device = device
        self._transport = transport
        self._session = session

    def end(
        self,
        journal: OpenRound,
        kind: Literal["took_part", "dropped", "refused"],
        reason: str,
        wait: float,
        why: LeaveReason = "other",
        *,
        tell: bool = True,
    ) -> Outcome:
        """Close the round in the journal. `reason` is for the owner; `why` is what the server may be told.

        `tell`: whether a device that has sent keys says that it leaves, too. It does not where the server knows, or
        does not answer, or the owner does not want anything to be sent now.
        """
        if tell or not journal.keys_sent:
            self.leave(journal.entry.round_id, why)
        traffic = self._transport.traffic
        journal.close(kind, reason, sent=traffic.sent, received=traffic.received)
        entry = journal.entry
        if kind != "took_part":
            detail = {"reason": reason, "limit": why} if kind == "refused" else {"reason": reason}
            self._device.emit(kind, detail, entry.round_id)
        return Outcome(kind, wait, entry.round_id, reason, entry.examples, traffic.sent, traffic.received)

    def leave(self, round_id: str, why: LeaveReason) -> None:
        """Tell the server that the device leaves, so that the others go on at once.

        Errors are ignored: if the message is lost, the others wait until the phase's time is over.
        """
        body = encode(LeaveRequest(reason=why if self._device.config.tell_why else None))
        with suppress(ArchipelError):
            self._session.call("POST", f"/v1/rounds/{round_id}/leave", Receipt, body=body)

    def conclude(self, journal: OpenRound, ended: Ended, wait: float) -> Outcome:
        """Close a round whose result is known, and keep the device's new state if the round counts."""
        if not ended.counted:
            return self.end(journal, "dropped", f"the round failed: {ended.reason}", wait, tell=False)
        reason = ""
        try:
            new_state = journal.state()
        except ClientError as error:
            new_state, reason = None, f"the device's new state of this round is lost: {error}"
        if new_state is not None:
            # Only now, because the device's state must agree with what was counted. The round is closed after it: after
            # a kill in between, the next start settles the round again, and writes the same state again.
            self._device.vault.write(self._device.state_folder / journal.entry.state, new_state)
        self._device.emit("committed", {"reason": reason} if reason else {}, journal.entry.round_id)
        return self.end(journal, "took_part", reason, wait, tell=False)

    def settle(self, journal: OpenRound, wait: float) -> Outcome | None:
        """Ask the server for the result of a round that has this device's update; None if it is not known yet."""
        # The server has taken the update into its buffer, so it counts whatever becomes of the round.
        if journal.entry.buffered:
            return self.conclude(journal, Ended(True), wait)
        try:
            status = self._session.call("GET", f"/v1/rounds/{journal.entry.round_id}", RoundStatus)
        except SessionRefusedError:
            # Perhaps the server accepts only the device's next key: `Agent` finds that out, and begins anew.
            raise
        except RefusedError as error:
            return None if error.status in LATER else self.end(journal, "dropped", str(error), wait, tell=False)
        except (UnreachableError, RoundAbandonedError):
            return None
        if status.phase not in ("committed", "failed"):
            return None
        return self.conclude(journal, Ended(status.phase == "committed", status.reason), wait)

    def recover(self) -> str:
        """End the rounds that a kill interrupted after keys were sent and that cannot be resumed, as their secrets are
        gone.

        Returns the id of a round that has this device's update and no result yet, or an empty text. Until there is a
        result, no other round may begin: it would train on a state that this result may replace.
        """
        pending = ""
        for journal in self._device.journal.unfinished():
            if journal.counted:
                # The server has counted this device, so its update may be in the sum: only the server knows.
                if self.settle(journal, 0.0) is None:
                    pending = journal.entry.round_id
            elif journal.keys_sent:
                self.abandon(journal, "the agent was restarted in the round", 0.0)
        return pending

    def abandon(self, journal: OpenRound, reason: str, wait: float) -> Outcome:
        """Leave a round with keys sent whose secrets are gone. Raises RefusedError if the server cannot answer now."""
        stored = journal.masked()
        if stored is None:
            self.leave(journal.entry.round_id, "other")
        else:
            # The peers' shares can still unmask these bytes. Other bytes under the same masks would reveal the
            # difference of the two updates, so a stored update is never computed again.
            try:
                send_update(self._session, journal.entry.round_id, *stored)
                reason += "; the stored update was sent"
            except RefusedError as error:
                # The round stays open, and the next check-in sends the bytes again.
                if error.status in LATER or isinstance(error, SessionRefusedError):
                    raise
                reason += f"; the server refused the stored update ({error})"
        journal.close("dropped", reason)
        self._device.emit("dropped", {"reason": reason}, journal.entry.round_id)
        return Outcome("dropped", wait, journal.entry.round_id, reason)
