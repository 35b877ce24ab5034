"""Rounds over neighbours that a restart interrupted, as the journal has them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from archipel.client.memory.journal import Journal, OpenRound
from archipel.errors import ClientError, ProtocolError
from archipel.protocol.messages import RoundPlan
from archipel.protocol.policy import plan_digest
from archipel.protocol.sealed import Sealed, decode, unseal


@dataclass(frozen=True)
class Interrupted:
    """A round to go on with: its plan, as the server sealed it too, and its place in the journal."""

    plan: RoundPlan
    sealed: Sealed
    journal: OpenRound


def find_interrupted(journal: Journal, server_key: bytes) -> Interrupted | None:
    """The round that is to be resumed; None if there is none. One whose plan is lost is not: the device leaves it."""
    for opened in journal.unfinished():
        if opened.entry.resumes and opened.keys_sent:
            with suppress(ClientError, ProtocolError):
                sealed = decode("plan", opened.kept.plan(), Sealed)
                # The one that this device began with, whatever else the server may have sealed.
                if plan_digest(sealed) == opened.entry.plan:
                    return Interrupted(unseal("plan", sealed, server_key, RoundPlan), sealed, opened)
    return None
