"""How rounds end for this device: at once, when their result is known, or after a restart."""

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
    """Closes rounds in the journal, and keeps what the device learned in them if they count."""

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
    ) -> Outcome:
        """Close the round in the journal. `reason` is for the owner, `why` for the server, where it is told that the
        device leaves."""
        if not journal.keys_sent:
            self.leave(journal.entry.round_id, why)
        traffic = self._transport.traffic
        journal.close(kind, reason, sent=traffic.sent, received=traffic.received)
        entry = journal.entry
        if kind != "took_part":
            detail = {"reason": reason, "limit": why} if kind == "refused" else {"reason": reason}
            self._device.emit(kind, detail, entry.round_id)
        return Outcome(kind, wait, entry.round_id, reason, entry.examples, traffic.sent, traffic.received)

    def leave(self, round_id: str, why: LeaveReason) -> None:
        """Whatever comes of it, the device sends nothing in the round: the others need not wait for it."""
        body = encode(LeaveRequest(reason=why if self._device.config.tell_why else None))
        with suppress(ArchipelError):
            self._session.call("POST", f"/v1/rounds/{round_id}/leave", Receipt, body=body)

    def conclude(self, journal: OpenRound, ended: Ended, wait: float) -> Outcome:
        """The round's result is known."""
        if not ended.counted:
            return self.end(journal, "dropped", f"the round failed: {ended.reason}", wait)
        reason = ""
        try:
            new_state = journal.state()
        except ClientError as error:
            new_state, reason = None, f"what the device was to remember of this round is lost: {error}"
        if new_state is not None:
            # Not before: what the device remembers must agree with what was counted. Nor is the round closed first:
            # after a kill in between, it is settled once more, and the same state is written again.
            self._device.vault.write(self._device.state_folder / journal.entry.state, new_state)
        self._device.emit("committed", {"reason": reason} if reason else {}, journal.entry.round_id)
        return self.end(journal, "took_part", reason, wait)

    def settle(self, journal: OpenRound, wait: float) -> Outcome | None:
        """Ask what became of a round in which this device's update counted; None if that is not known yet."""
        # The server took the update for whatever version comes next: there is no result to wait for.
        if journal.entry.buffered:
            return self.conclude(journal, Ended(True), wait)
        try:
            status = self._session.call("GET", f"/v1/rounds/{journal.entry.round_id}", RoundStatus)
        except SessionRefusedError:
            raise
        except RefusedError as error:
            return None if error.status in LATER else self.end(journal, "dropped", str(error), wait)
        except (UnreachableError, RoundAbandonedError):
            return None
        if status.phase not in ("committed", "failed"):
            return None
        return self.conclude(journal, Ended(status.phase == "committed", status.reason), wait)

    def recover(self) -> str:
        """See to rounds that were interrupted after keys were sent; their secrets are gone with the process.

        Empty, or the id of a round that this device's update is in and whose result is still to come. Until then no
        other may begin: it would train on a state that this one's result replaces.
        """
        pending = ""
        for journal in self._device.journal.unfinished():
            if journal.counted:
                # The device has confirmed, so its part may be in the sum: only the server knows.
                if self.settle(journal, 0.0) is None:
                    pending = journal.entry.round_id
            elif journal.keys_sent:
                self._abandon(journal)
        return pending

    def _abandon(self, journal: OpenRound) -> None:
        reason = "the agent was restarted in the round"
        stored = journal.masked()
        if stored is not None:
            # These very bytes, and no others, may still become part of the sum: the peers' shares unmask them.
            try:
                send_update(self._session, journal.entry.round_id, *stored)
                reason += "; the stored update was sent"
            except RefusedError as error:
                if error.status in LATER or isinstance(error, SessionRefusedError):
                    raise
                reason += f"; the stored update was not taken ({error})"
        journal.close("dropped", reason)
        self._device.emit("dropped", {"reason": reason}, journal.entry.round_id)
