"""A way to the object store that can be closed, or breaks in the middle of an answer: real connections, cut."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Listens on `url`. `cut_after`: so many bytes of answers pass on each connection, then it breaks."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.open = True
        self.cut_after: int | None = None
        self.cuts = 0
        self.replaced: tuple[bytes, bytes] | None = None
        """In what the near side sends: these bytes by those."""
        self.replacements = 0
        self.sent = b""
        """The beginnings of what came from the near side, up to 64 KiB in all."""
        self._live: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """From now on every connection is cut at once, those there are too."""
        self.open = False
        for each in self._live:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self.open:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._live += [near, far]
            threading.Thread(target=self._pass, args=(near, far, None, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, self.cut_after), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, left: int | None, note: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if note:
                    self.sent += data[: 65536 - len(self.sent)]
                    if self.replaced is not None:
                        self.replacements += data.count(self.replaced[0])
                        data = data.replace(*self.replaced)
                if left is not None and len(data) >= left:
                    target.sendall(data[:left])
                    self.cuts += 1
                    break
                target.sendall(data)
                left = None if left is None else left - len(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
