"""What host processes tell the process that started them: one line of JSON for each event of a device."""

from __future__ import annotations

import sys
import threading

import msgspec

from archipel.client import Event


class HostEvent(msgspec.Struct, forbid_unknown_fields=True):
    """One line of output. Bytes are of this round so far."""

    device: str
    event: str
    device_id: str = ""
    round_id: str = ""
    sent: int = 0
    received: int = 0
    text: str = ""


class Output:
    """Standard output of all devices' threads; the lock keeps their lines whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, event: HostEvent) -> None:
        with self._lock:
            sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
            sys.stdout.buffer.flush()

    def tell(self, device: str, event: Event, text: str) -> None:
        """Write what an agent told, with these words about it."""
        self.write(
            HostEvent(
                device=device,
                event=event.name,
                device_id=event.device_id,
                round_id=event.round_id,
                sent=event.bytes_sent,
                received=event.bytes_received,
                text=text,
            )
        )
