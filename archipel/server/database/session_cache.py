"""A cache of the session tokens that this process has seen lately, so that not every request queries the database."""

from __future__ import annotations

import threading

CACHE_SECONDS = 5.0
"""How long a session is cached. A session that ends is refused by other web processes after this time at the latest."""
CACHE_ENTRIES = 20_000


class SessionCache:
    """Device ids by the hash of their token, each until its time is over or the device is forgotten."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def get(self, digest: bytes, now: float) -> str | None:
        """The id of the session's device; None: query the database."""
        entry = self._known.get(digest)
        return entry[0] if entry is not None and now < entry[1] else None

    def keep(self, digest: bytes, device_id: str, now: float, expires: float) -> None:
        """Cache a session for CACHE_SECONDS, and never beyond `expires`."""
        with self._lock:
            if len(self._known) >= CACHE_ENTRIES:
                self._known.clear()  # simpler than evicting single entries, which live for seconds anyway
            self._known[digest] = (device_id, min(expires, now + CACHE_SECONDS))

    def drop(self, digest: bytes) -> None:
        """Forget one session."""
        with self._lock:
            self._known.pop(digest, None)

    def forget(self, device_id: str) -> None:
        """Forget every session of a device. To be called after they were deleted from the database."""
        with self._lock:
            for digest in [digest for digest, (owner, _) in self._known.items() if owner == device_id]:
                del self._known[digest]
