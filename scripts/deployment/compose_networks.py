"""The networks of a Compose file's services as network namespaces of Linux, joined by bridges. Needs root and iproute2.

Each service has a namespace of its own, with a device in each network that the file gives it; the names of the others
in these networks lead to their addresses there, and nothing leads further. The namespace in which the bridges lie has
an address in all of them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compose_file import Port, Service

SUBNET = "10.77"
CHUNK = 64 << 10


@dataclass
class Networks:
    """Files in `folder` are the services' namespaces, and the texts of their /etc/hosts.

    A namespace lasts as long as a process in it and the mount of its file, which is of this process's mount namespace.
    """

    folder: Path
    _addresses: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of each service, by network."""

    def open(self, services: Iterable[Service]) -> None:
        """Make bridges in this process's own namespace, which must be new, and the services' namespaces.

        Raises ValueError where this machine cannot.
        """
        if shutil.which("ip") is None:
            raise ValueError("networks of its own need the program ip; install iproute2")
        found = list(services)
        self.folder.mkdir(parents=True, exist_ok=True)
        _ip("link set lo up")
        networks = list(dict.fromkeys(name for each in found for name in each.networks))
        for number in range(len(networks)):
            _ip(f"link add n{number} type bridge", f"addr add {SUBNET}.{number}.1/24 dev n{number}",
                f"link set n{number} up")  # fmt: skip
        for place, service in enumerate(found):
            numbers = [networks.index(name) for name in service.networks]
            self._add(service, place, numbers)

    def enter(self, service: Service) -> list[str]:
        """The command that runs what follows in the service's namespace."""
        return ["nsenter", f"--net={self._file(service)}"]

    def hosts(self, service: Service) -> Path:
        """Its /etc/hosts: names of all with which it shares a network."""
        own = self._addresses[service.name]
        known = {
            name: next(address for network, address in theirs.items() if network in own)
            for name, theirs in self._addresses.items()
            if set(theirs) & set(own)
        }
        return self._write(service.name, known)

    def all_hosts(self) -> Path:
        """The same with the names of all."""
        return self._write("", {name: self.address(name) for name, theirs in self._addresses.items() if theirs})

    def address(self, name: str) -> str:
        """Where the service is reached from the namespace of the bridges."""
        return next(iter(self._addresses[name].values()))

    def _add(self, service: Service, place: int, numbers: list[int]) -> None:
        file = self._file(service)
        file.touch()
        subprocess.run(["unshare", f"--net={file}", "true"], check=True)
        commands, own = ["link set lo up"], {}
        for index, (number, name) in enumerate(zip(numbers, service.networks, strict=True)):
            own[name] = f"{SUBNET}.{number}.{place + 2}"
            commands += [
                f"link add eth{index} type veth peer name n{number}s{place} netns {os.getpid()}",
                f"addr add {own[name]}/24 dev eth{index}", f"link set eth{index} up",
            ]  # fmt: skip
        _ip(*commands, within=self.enter(service))
        _ip(*(f"link set n{number}s{place} master n{number} up" for number in numbers))
        self._addresses[service.name] = own

    def _file(self, service: Service) -> Path:
        return self.folder / f"{service.name}.net"

    def _write(self, name: str, known: Mapping[str, str]) -> Path:
        file = self.folder / f"{name}.hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {other}" for other, address in known.items())]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file


def listen(ports: Iterable[Port]) -> tuple[dict[Port, socket.socket], list[str]]:
    """Sockets that wait in this process's namespace, and what is to be said of ports that are in use."""
    opened, refused = {}, []
    for port in ports:
        waiting = socket.socket()
        # As servers do, so that the connections of the last run keep nobody from it.
        waiting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            waiting.bind((port.host, port.outside))
            waiting.listen()
        except OSError as error:
            waiting.close()
            refused.append(f"{port.service}: not shown at {port.host}:{port.outside} ({error.strerror})")
            continue
        waiting.set_inheritable(True)
        opened[port] = waiting
    return opened, refused


def forward(waiting: socket.socket, address: str, port: int) -> None:
    """Lead each connection of `waiting`, wherever that was opened, to this address of the present namespace, for as
    long as the process lives."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(CHUNK):
                target.write(data)
                await target.drain()
            target.write_eof()
        except OSError:
            target.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to_there = await asyncio.open_connection(address, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, to_there), copy(there, writer))
        to_there.close()
        writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(lead, sock=waiting) as server:
            await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()


def _ip(*commands: str, within: Iterable[str] = ()) -> None:
    done = subprocess.run(
        [*within, "ip", "-batch", "-"], input="\n".join(commands) + "\n", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"networks cannot be made here: {done.stderr.strip()}")
