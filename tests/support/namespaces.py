"""Networks of their own (Linux network namespaces) with links to this machine's, which can be cut and made slow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from tests.support.serving import SERVE, Server


@cache
def why_not() -> str:
    """Why this machine cannot have networks of their own; empty where it can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs the program ip (iproute2) on Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"archipel-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@dataclass
class Link:
    """A pair of devices; the address `there` is the namespace's. `cut` and `mend` take this machine's end down and up,
    so nothing arrives and nothing is refused: the others wait, as on a link that is gone."""

    device: str
    there: str

    def cut(self) -> None:
        _ip("link", "set", self.device, "down")

    def mend(self) -> None:
        _ip("link", "set", self.device, "up")


@dataclass
class Network:
    """A namespace. `command` runs in it what follows."""

    name: str
    links: list[Link] = field(default_factory=list)

    @property
    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def add_link(self) -> Link:
        """One more link between this machine and the namespace, with a subnet of its own."""
        number, tag = len(self.links), os.getpid() % 0xFFFF
        # Of 198.18.0.0/15, which is for tests of networks (RFC 2544).
        subnet = f"198.{18 + tag % 2}.{tag // 2 % 256}"
        here, there = f"{subnet}.{4 * number + 1}", f"{subnet}.{4 * number + 2}"
        device, other = f"ar{tag:x}h{number}", f"ar{tag:x}n{number}"
        _ip("link", "add", device, "type", "veth", "peer", "name", other, "netns", self.name)
        _ip("addr", "add", f"{here}/30", "dev", device)
        _ip("link", "set", device, "up")
        _ip("-n", self.name, "addr", "add", f"{there}/30", "dev", other)
        _ip("-n", self.name, "link", "set", other, "up")
        self.links.append(Link(device, there))
        return self.links[-1]

    def slow_down(self, mbit: float, loss: float) -> None:
        """Let all links carry so many megabits a second each way, and lose this share of the packets each way.

        By token bucket and packet filter: the kernel's network emulator (tc netem) is not everywhere.
        """
        for number, link in enumerate(self.links):
            rule = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "16kbit", "latency", "400ms"]
            subprocess.run(["tc", "qdisc", "add", "dev", link.device, *rule], check=True, capture_output=True)
            other = f"{link.device.rpartition('h')[0]}n{number}"
            subprocess.run([*self.command, "tc", "qdisc", "add", "dev", other, *rule], check=True, capture_output=True)
        for chain in ("INPUT", "OUTPUT"):
            lose = ["-A", chain, "-m", "statistic", "--mode", "random", "--probability", str(loss), "-j", "DROP"]
            subprocess.run([*self.command, "iptables", *lose], check=True, capture_output=True)


@contextmanager
def open_network() -> Iterator[Network]:
    """A new namespace, which goes with its links at the end."""
    network = Network(f"archipel-{os.getpid()}")
    _ip("netns", "add", network.name)
    try:
        _ip("-n", network.name, "link", "set", "lo", "up")
        yield network
    finally:
        _ip("netns", "del", network.name)


class ServerInside(Server):
    """A server in a namespace, which answers on all of its links."""

    def __init__(self, server: Server, network: Network) -> None:
        super().__init__(server.folder)
        self._network = network

    def start(self, port: int = 0, **settings: str) -> str:
        """Returns its URL over the first link."""
        command, host = self._network.command, self._network.links[0].there
        environment = os.environ | {f"ARCHIPEL_SERVER_{name.upper()}": value for name, value in settings.items()}
        environment |= {"ARCHIPEL_SERVER_HOST": "0.0.0.0", "ARCHIPEL_SERVER_RETRY_AFTER": "0.02",
                        "ARCHIPEL_SERVER_CHECK_IN_WINDOW": "5"}  # fmt: skip
        process = self.process = subprocess.Popen(
            [*command, sys.executable, "-c", SERVE, str(self.folder), str(port)], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("archipel server on "), (line, process.stderr.read())
        self.url = f"http://{host}:{line.strip().rpartition(':')[2]}"
        return self.url


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
