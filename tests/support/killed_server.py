"""A server in a process of its own that is killed at its n-th durable point.

The points are not chosen: every fsync, rename, deletion and commit of the web application and of the coordinator is
one before and one after it happens. After SIGKILL a new process takes up the same database and folder, and the devices
repeat the request that was not answered, as agents do.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from flask import Flask
from sqlalchemy.orm import Session

from archipel.server.app import create_app
from archipel.server.database.engine import Database
from archipel.server.processes.coordinator import Coordinator
from archipel.server.rounds import folding
from archipel.server.services import Services
from archipel.server.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")


class Died(Exception):
    """The process is gone; another one has taken its place."""


class Server:
    """`kill` 0: never. `points` counts those that were passed until the kill."""

    def __init__(self, settings: Settings, kill: int = 0) -> None:
        self._settings = settings
        self.points = 0
        self.died = False
        self._start(kill)

    def _start(self, kill: int) -> None:
        self._line, theirs = Pipe()
        self._process = os.fork()
        if self._process == 0:
            self._line.close()
            try:
                serve(theirs, self._settings, kill)
            finally:
                os._exit(1)
        theirs.close()

    def ask(self, *what: object) -> Any:
        """Raises Died."""
        try:
            self._line.send(what)
            points, answer = self._line.recv()
        except (EOFError, ConnectionError):
            _, status = os.waitpid(self._process, 0)
            assert os.WIFSIGNALED(status), f"the server ended by itself: {status}"
            assert not self.died, "killed twice"
            self.died = True
            self._line.close()
            self._start(0)
            raise Died from None
        if not self.died:
            self.points = points
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self._line.close()


def serve(line: Connection, settings: Settings, kill: int) -> None:
    passed = 0

    def point() -> None:
        nonlocal passed
        passed += 1
        if passed == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    now = 0.0
    services = Services.open(settings, clock=lambda: now)
    app = create_app(settings, clock=lambda: now)
    coordinator = Coordinator(services)
    coordinator.recover()
    folding.BATCH = 2
    watch(point)
    answer: object
    while True:
        now, what, *arguments = line.recv()
        try:
            answer = coordinator.step() if what == "step" else _request(app, *arguments)
        except BaseException as error:  # noqa: BLE001 - told to the test
            answer = error
        line.send((passed, answer))


def watch(point: Callable[[], None]) -> None:
    """Make every durable operation of this process pass a point before and after it."""

    def watched(function: Callable[P, R]) -> Callable[P, R]:
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            point()
            result = function(*arguments, **named)
            point()
            return result

        return call

    os.fsync = watched(os.fsync)
    os.replace = watched(os.replace)
    os.link = watched(os.link)
    os.rmdir = watched(os.rmdir)
    Path.unlink = watched(Path.unlink)  # type: ignore[method-assign]
    Path.mkdir = watched(Path.mkdir)  # type: ignore[method-assign]
    watch_transactions(point)


def watch_transactions(point: Callable[[], None]) -> None:
    """Make every writing transaction of this process pass a point before its commit and one after it."""
    for name in ("write", "_write_rows", "_note_rows"):
        setattr(Database, name, _watched_transaction(getattr(Database, name), point))


def _watched_transaction(
    transaction: Callable[[Database], AbstractContextManager[R]], point: Callable[[], None]
) -> Callable[[Database], AbstractContextManager[R]]:
    """A point before its commit and one after it."""

    @contextmanager
    def call(database: Database) -> Iterator[R]:
        with transaction(database) as opened:
            yield opened
            if isinstance(opened, Session):
                opened.flush()
            point()
        point()

    return call


def _request(app: Flask, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
    with app.test_client() as client, client.open(path, method=method, data=body, headers=headers) as response:
        return response.status_code, response.get_data()
