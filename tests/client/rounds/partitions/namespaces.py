"""Network namespaces of this process, joined by virtual cables that can be cut in several ways.

A namespace has no name: it is there as long as a file of this process is open or a thread is in it, so that nothing is
left behind, however the process ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000
NOWHERE = "02:00:00:00:00:99"
"""An address on the cable that is nobody's: what goes there is dropped without a word."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class UnsupportedError(Exception):
    """This machine, or this user, cannot make namespaces or cables; the text says what failed."""


class Namespace:
    """A network of its own, with loopback."""

    def __init__(self) -> None:
        """Raises UnsupportedError."""
        made: list[int | OSError] = []

        def make() -> None:
            # The thread ends, and with it nothing is left but the open file.
            if _LIBC.unshare(CLONE_NEWNET):
                made.append(OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
            else:
                made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise UnsupportedError(f"no network namespaces: {made[0].strerror}")
        self.file = made[0]
        self.run("ip", "link", "set", "lo", "up")

    def enter(self) -> None:
        """Put the calling thread into it."""
        if _LIBC.setns(self.file, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.enter()
            yield
        finally:
            _LIBC.setns(before, CLONE_NEWNET)
            os.close(before)

    def run(self, *command: str) -> str:
        """A command in it. Raises UnsupportedError."""
        with self.entered():
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                raise UnsupportedError(f"{command[0]} is not installed") from None
        if done.returncode:
            raise UnsupportedError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        os.close(self.file)


class Cable:
    """Between a device's namespace and the server's, whose ends are 10.9.NUMBER.1 and 10.9.NUMBER.2."""

    def __init__(self, device: Namespace, server: Namespace, number: int) -> None:
        """Raises UnsupportedError."""
        self._ends = {device: (f"device{number}", f"10.9.{number}.1"), server: (f"server{number}", f"10.9.{number}.2")}
        self._device, self._server = device, server
        (here, _), (there, self.address) = self._ends.values()
        device.run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        # A path, as the namespace has no name.
        device.run("ip", "link", "set", there, "netns", f"/proc/{os.getpid()}/fd/{server.file}")
        for namespace, (name, address) in self._ends.items():
            namespace.run("ip", "address", "add", f"{address}/24", "dev", name)
            namespace.run("ip", "link", "set", name, "up")

    def cut(self, how: str) -> None:
        """ "down": unplugged at the device; "far end down": at the server; "silent": everything is lost on its way;
        "requests lost", "answers lost": what goes one way."""
        if how in ("down", "far end down"):
            namespace = self._device if how == "down" else self._server
            namespace.run("ip", "link", "set", self._ends[namespace][0], "down")
        for namespace, lost in ((self._device, "requests lost"), (self._server, "answers lost")):
            if how in ("silent", lost):
                self._neighbour(namespace, NOWHERE)

    def mend(self) -> None:
        for namespace, (name, _) in self._ends.items():
            namespace.run("ip", "link", "set", name, "up")
            other = self._server if namespace is self._device else self._device
            [end] = json.loads(other.run("ip", "-json", "link", "show", "dev", self._ends[other][0]))
            self._neighbour(namespace, end["address"])

    def spoil(self, *what: str) -> None:
        """Delay or loss at both ends, as `tc qdisc` has it. Raises UnsupportedError."""
        for namespace, (name, _) in self._ends.items():
            namespace.run("tc", "qdisc", "replace", "dev", name, "root", *what)

    def _neighbour(self, namespace: Namespace, address: str) -> None:
        name, _ = self._ends[namespace]
        [there] = [at for other, (_, at) in self._ends.items() if other is not namespace]
        namespace.run("ip", "neighbour", "replace", there, "lladdr", address, "nud", "permanent", "dev", name)


@dataclass
class Network:
    """The first device is alone on its cable."""

    alone: Namespace
    others: Namespace
    cable: Cable
    other_cable: Cable
