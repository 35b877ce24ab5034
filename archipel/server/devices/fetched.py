"""Counts the bytes that devices are sent, until their next answer in a round takes the count along.

So what a round costs devices to download is stored with what they upload, in the same row, and costs no write of its
own. The counts are in memory: what a web process has sent is lost when it ends, and a device that asks several
processes in turn has a part of its count in each, which its next answer to that process takes along.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

DEVICES = 50_000
"""So many devices are counted: those that were sent something last."""


class FetchedBytes:
    """Of one web process: bytes of answers' bodies, by device."""

    def __init__(self, *, entries: int = DEVICES) -> None:
        self._entries = entries
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, device_id: str, size: int) -> None:
        """Count `size` bytes that the device was sent."""
        with self._lock:
            self._counts[device_id] = self._counts.get(device_id, 0) + size
            self._counts.move_to_end(device_id)
            if len(self._counts) > self._entries:
                self._counts.popitem(last=False)

    def take(self, device_id: str) -> int:
        """How many bytes the device was sent since this was called last; counting begins anew."""
        with self._lock:
            return self._counts.pop(device_id, 0)
