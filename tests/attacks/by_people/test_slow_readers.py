"""Strangers read the demo page, or the API's description, as slowly as they can.

Who: anybody who reaches the server, from several addresses. What they want: to keep every thread of the server busy, so
that nobody else is answered. What stops them: downloads have threads of their own or a part of all, so that those for
requests stay free, and a reader that is too slow is cut off. Or they keep connections open that the server closes: it
waits for them in threads of their own. Or they open more connections than a process may have files: the server raises
that limit where it may, and takes no further connections where it may not.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Protocol

import msgspec
import psutil
import pytest
import urllib3

from archipel.server.processes import children
from archipel.server.settings import Settings
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    world,
)
from tests.support.world import World

MEBIBYTES = 8
"""More than the kernel keeps of one connection for a reader that does not read."""
STALL_SECONDS = 2.0


class Serve(Protocol):
    """Starts the server's web processes, after calling `limit` in theirs; returns the port."""

    def __call__(self, settings: Settings, limit: Callable[[], None] | None = None) -> int: ...


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return {"demo": True, "stall_seconds": STALL_SECONDS, "threads": 4, "concurrent_requests": 3}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start the server's web processes, with their own configuration, for a page in `tmp_path`; gives the port."""
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_bytes(b"<!doctype html>")
    (page / "large.bin").write_bytes(bytes(MEBIBYTES << 20))
    (tmp_path / "served.py").write_text(
        "from pathlib import Path\n"
        "from archipel.server.app import create_app\n"
        "from archipel.server.processes.web import settings\n"
        f"def application():\n    return create_app(settings, demo_page=Path({str(page)!r}))\n"
    )
    with ExitStack() as stack:

        def start(settings: Settings, limit: Callable[[], None] | None = None) -> int:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
            ready, writer = os.pipe()
            environment = children.child_environment(settings)
            environment |= {children.LISTEN_FD: str(listener.fileno()), children.READY_FD: str(writer)}
            command = [sys.executable, "-m", "gunicorn", "-c", "python:archipel.server.processes.web"]
            server = stack.enter_context(
                subprocess.Popen(
                    [*command, "--pythonpath", str(tmp_path), "served:application()"],
                    env=environment,
                    pass_fds=[listener.fileno(), writer],
                    preexec_fn=limit,
                )
            )
            stack.callback(server.terminate)
            os.close(writer)
            with open(ready, "rb") as pipe:
                assert pipe.read(1) == b"1"
            return int(listener.getsockname()[1])

        yield start


def slow_reader(port: int, address: str, path: str) -> socket.socket:
    """Ask for `path` from `address`, and read nothing."""
    reader = socket.socket()
    # Small segments, for which the server's kernel keeps little.
    reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 500)
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.settimeout(10)
    reader.bind((address, 0))
    reader.connect(("127.0.0.1", port))
    reader.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    return reader


@pytest.mark.sampled(every=4)
def test_slow_readers_keep_nobody_from_being_answered(world: World, serve: Serve) -> None:  # noqa: F811
    port = serve(world.settings)
    with ExitStack() as stack:
        # Twice as many as the server has threads for requests.
        readers = [
            stack.enter_context(slow_reader(port, f"127.0.0.{2 + number}", "/demo/large.bin"))
            for number in range(2 * world.settings.threads)
        ]
        assert [reader.recv(12) for reader in readers] == [b"HTTP/1.1 200"] * len(readers)
        assert seconds_of_an_operator(world, port) < 1.0
        # While they read and while they are cut off; gunicorn waits for clients whose connections it closes.
        ended = time.monotonic() + 1.5 * STALL_SECONDS
        while time.monotonic() < ended:
            assert seconds_of_an_operator(world, port) < 1.0
            time.sleep(0.05)  # more requests than that the server's limit of an address refuses
        assert rest(readers[0]) < MEBIBYTES << 20


def rest(reader: socket.socket) -> int:
    """How many bytes still come."""
    received = 0
    with suppress(ConnectionResetError):
        while part := reader.recv(1 << 20):
            received += len(part)
    return received


def seconds_of_an_operator(world: World, port: int) -> float:  # noqa: F811
    """How long an operator waits for an answer."""
    begun = time.monotonic()
    headers = {"Authorization": f"Bearer {world.operator_token}", "Connection": "close"}
    answer = urllib3.request("GET", f"http://127.0.0.1:{port}/v1/tasks", headers=headers, timeout=10, retries=False)
    assert answer.status == 200
    return time.monotonic() - begun


@pytest.mark.sampled(every=8)
def test_clients_that_never_close_keep_nobody_from_being_answered(world: World, serve: Serve) -> None:  # noqa: F811
    port = serve(world.settings)
    with ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"GET /v1/health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            assert client.recv(9) == b"HTTP/1.1 "
        assert seconds_of_an_operator(world, port) < 1.0


@pytest.mark.sampled(every=4)
def test_slow_readers_of_the_description_keep_nobody_from_being_answered(world: World, serve: Serve) -> None:  # noqa: F811
    """Where the demo is off: the one large answer for strangers."""
    port = serve(msgspec.structs.replace(world.settings, demo=False))
    with ExitStack() as stack:
        readers = [
            stack.enter_context(slow_reader(port, f"127.0.0.{2 + number}", "/v1/openapi.json"))
            for number in range(2 * world.settings.threads)
        ]
        # One is given it, slowly; the others wait for no thread.
        assert {reader.recv(12) for reader in readers} <= {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        assert seconds_of_an_operator(world, port) < 1.0


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("soft", "hard", "number"), [(256, 3000, 1000), (600, 600, 650)], ids=["more", "no more"])
def test_more_connections_than_open_files_end_no_process(
    world: World,  # noqa: F811
    serve: Serve,
    soft: int,
    hard: int,
    number: int,
) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    bundle = world.publish()
    port = serve(msgspec.structs.replace(world.settings, demo=False), limit)
    with ExitStack() as stack:
        # Already open, as of a device that waits for its round. It would be cut off with the process.
        device = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        assert ask(device) == 200
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(number)
        ]
        wait_until_no_more_are_taken()
        # They say nothing, and none of them keeps a thread, or the files that an answer needs.
        assert seconds(lambda: ask(device)) < 1.0
        assert ask(device, f"/v1/bundles/{bundle}", world.operator_token) == 200
        if number < hard:
            assert ask(strangers[-1]) == 200
            assert seconds_of_an_operator(world, port) < 1.0
        for each in strangers:
            each.close()
        assert seconds_of_an_operator(world, port) < 2.0
        assert ask(device) == 200


def wait_until_no_more_are_taken(still_seconds: float = 0.4) -> None:
    """Until this process's children have had the same number of files for some time."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < still_seconds:
        now = sum(child.num_fds() for child in psutil.Process().children(recursive=True))
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.05)


def seconds(act: Callable[[], object]) -> float:
    begun = time.monotonic()
    act()
    return time.monotonic() - begun


def ask(client: socket.socket, path: str = "/healthz", token: str = "") -> int:
    """The status of the answer, which is read to its end."""
    authorization = f"Authorization: Bearer {token}\r\n" if token else ""
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\n{authorization}\r\n".encode())
    answer = HTTPResponse(client)
    answer.begin()
    answer.read()
    return answer.status
