"""A secure round, from the keys to its result (archipel/protocol/secagg has the cryptography).

Where a device leaves, the server counts it as dropped out, and the others' shares make up for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from archipel.client.rounds.exchange import Ended, GoneError, RoundExchange
from archipel.errors import RoundAbandonedError
from archipel.protocol.messages import (
    Cohort,
    Complaints,
    Confirmations,
    ConfirmRequest,
    Receipt,
    Shares,
    Survivors,
)
from archipel.protocol.narrow import pack_masked
from archipel.protocol.sealed import encode
from archipel.protocol.secagg import Participant
from archipel.protocol.vector import Layout, Vector


class SecureRound(RoundExchange):
    """The part of one device in one secure round."""

    def run(
        self,
        participant: Participant,
        layout: Layout,
        vector: Callable[[int], Vector],
        on_counted: Callable[[Sequence[str]], None],
    ) -> Ended:
        """Carry out all phases, with `vector(staleness)` (uint32 [length]) as the update of this `layout`.

        `on_counted(devices in the sum)` is called when the server has named them, this device among them, and before
        the device confirms them; it may raise PolicyError.

        Raises RoundAbandonedError, or ProtocolError for a message of the server that the device must not answer.
        """
        # The order is the protocol's: each message depends on those that all devices sent in the phase before.
        try:
            self._put("advertising", "advertisement", participant.advertise())
            self._report("advertised", {})
            cohort = self._get("sharing", "cohort", Cohort)
            self._put("sharing", "shares", participant.share(cohort))
            self._report("shared", {"cohort": len(cohort.members)})
            inbox = self._get("complaining", "shares", Shares)
            self._put("complaining", "complaints", participant.complain(inbox))
            self._send_masked(participant, layout, vector, self._get_complaints())
            # The device signs the set of survivors before it reveals a share: a server that names one set to some
            # devices and another set to others cannot collect `threshold` signatures for both.
            survivors = self._get("confirming", "survivors", Survivors)
            confirmation = participant.confirm(survivors)
            # Before the confirmation leaves: once it has, the update may be in the sum, so the state must be on disk.
            on_counted(survivors.devices)
            self._put("confirming", "confirmation", ConfirmRequest(confirmation=confirmation))
            self._report("confirmed", {"survivors": len(survivors.devices)})
            confirmations = self._get("unmasking", "confirmations", Confirmations)
            self._put("unmasking", "unmasking", participant.unmask(confirmations))
            self._report("unmasked", {})
        except GoneError as error:
            # Before the server counted the device, its update missed the phase. After that, only its help for the
            # others is late, and the round's result still matters.
            if not self._journal.counted:
                raise RoundAbandonedError(str(error)) from None
        return self._await_result()

    def _get_complaints(self) -> Complaints:
        """The complaints of the round. Mostly there are none, which the round's status says without a request.

        The status needs no proof: a later confirmation is a signature over the complaints, too.
        """
        if not self._await("masking").complaints:
            return Complaints(complaints=[])
        return self._get("masking", "complaints", Complaints)

    def _send_masked(
        self, participant: Participant, layout: Layout, vector: Callable[[int], Vector], complaints: Complaints
    ) -> None:
        staleness = 0 if self._plan.staleness_exponent is None else self._fetch_status().staleness
        self._check()  # before masking: the device must not store masked bytes for a round that it leaves
        masked = pack_masked(layout, participant.mask(vector(staleness), complaints), self._plan)
        digest = hashlib.sha256(masked).hexdigest()
        self._journal.store_masked(masked, digest)
        self._report("masked", {"bytes": len(masked)})
        self._upload("masking", masked, digest)

    def _put(
        self,
        step: Literal["advertising", "sharing", "complaining", "confirming", "unmasking"],
        path: str,
        message: msgspec.Struct,
    ) -> None:
        body = encode(message)
        # Before the first byte leaves the device: after a restart it must not begin this round again with other keys.
        self._journal.advance(step)
        self._deliver(step, lambda: self._session.call("PUT", f"{self._url}/{path}", Receipt, body=body))
