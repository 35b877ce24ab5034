"""Waits after failed attempts: each is longer than the one before, or as long as the server asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """`first` seconds after the first failure, `growth` times as long after each further one, at most `longest`.

    `longest_asked` is the most seconds where the server says how long to wait; None: `longest`. `jitter`: each wait is
    longer or shorter by up to this share of it (from 0 to below 1), so that devices do not ask all at once.
    """

    first: float
    growth: float = 2.0
    longest: float = float("inf")
    jitter: float = 0.0
    longest_asked: float | None = None

    def after(self, failures: int, *, retry_after: float | None = None, draw: float = 0.5) -> float:
        """Seconds to wait after `failures` (from 1) attempts in a row have failed.

        `retry_after` is the wait that the server asks for instead (Retry-After, in seconds). `draw` is uniform in
        [0, 1); 0.5 leaves the wait as it is.
        """
        if retry_after is not None:
            most = self.longest if self.longest_asked is None else self.longest_asked
            return self.jittered(min(retry_after, most), draw)
        try:
            seconds = self.first * float(self.growth) ** (failures - 1)
        except OverflowError:
            seconds = self.longest
        return self.jittered(min(seconds, self.longest), draw)

    def jittered(self, seconds: float, draw: float) -> float:
        """`seconds`, longer or shorter by up to the share `jitter`; `draw` is uniform in [0, 1)."""
        return seconds * (1 + self.jitter * (2 * draw - 1))
