"""A stand-in for a child process that has been taken over."""

from __future__ import annotations

import socket
import threading

import numpy as np

from archipel.lite_runtime.isolated.messages import Channel, Done, Learn, Open, Reply


class TakenOver:
    """Stands where the child process does, and answers what the test says."""

    script: list[tuple[Reply, dict[str, np.ndarray]]] = []

    def __init__(self, request: Open, max_reply: int, starter: object = None) -> None:
        ours, self._theirs = socket.socketpair()
        self.channel = Channel(ours, max_reply)
        self.opened = True
        self.last_words = ""
        self.ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        other = Channel(self._theirs, 1 << 30)
        try:
            for reply, arrays in self.script:
                while isinstance(other.receive(10.0)[0], Learn):
                    other.send(Done())
                other.send(reply, arrays)
        except (EOFError, OSError):
            return

    def end(self) -> int:
        if not self.ended:
            self.ended = True
            self.channel.close()
            self._thread.join(10)
            self._theirs.close()
        return -9
