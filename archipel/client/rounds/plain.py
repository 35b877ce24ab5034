"""A plain round: one upload, and the wait for the round's result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from archipel.client.rounds.exchange import Ended, GoneError, RoundExchange
from archipel.errors import RoundAbandonedError


class PlainRound(RoundExchange):
    """The part of one device in one plain round."""

    def run(self, update: bytes, on_counted: Callable[[Sequence[str]], None]) -> Ended:
        """Send `update` (bytes of protocol.plain), call `on_counted([])` when the server has it, and await the result.

        In a buffered round there is no result to await. Raises RoundAbandonedError.
        """
        # The same record on the disk as for masked bytes: after a kill these bytes, and no others, are sent again.
        digest = hashlib.sha256(update).hexdigest()
        self._journal.store_masked(update, digest)
        try:
            self._upload("buffering" if self._plan.buffered else "updating", update, digest)
        except GoneError as error:
            raise RoundAbandonedError(str(error)) from None
        on_counted([])
        # The server adds a buffered update to the next version, whatever becomes of this round.
        return Ended(True) if self._plan.buffered else self._await_result()
