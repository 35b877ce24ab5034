"""A round with privacy plain: one upload, and the wait for the round's result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from archipel.client.rounds.exchange import Ended, GoneError, RoundExchange
from archipel.errors import RoundAbandonedError


class PlainRound(RoundExchange):
    """One device's way through one plain round."""

    def run(self, update: bytes, on_counted: Callable[[Sequence[str]], None]) -> Ended:
        """Send `update` (see protocol.plain). `on_counted([])` is called when the server has taken it.

        In a buffered round that is all: no later round's end can undo it for this device. Raises RoundAbandonedError.
        """
        digest = hashlib.sha256(update).hexdigest()
        self._journal.store_masked(update, digest)
        try:
            self._upload("buffering" if self._plan.buffered else "updating", update, digest)
        except GoneError as error:
            raise RoundAbandonedError(str(error)) from None
        on_counted([])
        return Ended(True) if self._plan.buffered else self._await_result()
