"""An agent in a process of its own that is killed at its n-th durable point.

The points are not chosen: every fsync, rename, deletion and new folder of the process is one before and one after it
happens, whoever calls it. After SIGKILL another process takes up the same folder.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

from archipel.client import Agent, AgentConfig
from archipel.errors import RefusedError, UnreachableError
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.sealed import decode
from tests.support.linear_bundle import local_data

P = ParamSpec("P")
R = TypeVar("R")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.client.rounds.kills.victim"])
DURABLE = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


class Victim:
    """`kill` 0: never. `token` is a file's bytes: the agent enrols with it if it is not."""

    def __init__(self, config: dict[str, Any], token: bytes, kill: int) -> None:
        self._line, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=_run, args=(theirs, config, token, kill), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def died(self) -> bool:
        """Whether SIGKILL was what ended it. Waits for its end."""
        self._process.join()
        return self._process.exitcode == -signal.SIGKILL

    def stop(self) -> int:
        """Let it leave its round, and return how many points it passed."""
        self._line.send("stop")
        points: int = self._line.recv()
        self._process.join()
        return points

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._line.close()


def watch(point: Callable[[], None]) -> None:
    """Make every durable operation of this process pass a point before and after it."""

    def watched(function: Callable[P, R]) -> Callable[P, R]:
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            point()
            result = function(*arguments, **named)
            point()
            return result

        return call

    for name in DURABLE:
        setattr(os, name, watched(getattr(os, name)))


def _run(line: Connection, config: dict[str, Any], token: bytes, kill: int) -> None:
    passed = 0

    def point() -> None:
        nonlocal passed
        passed += 1
        if passed == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(point)
    stop = threading.Event()
    threading.Thread(target=_wait, args=(line, stop), daemon=True).start()
    with Agent(AgentConfig(**config), examples=lambda: local_data(0)) as agent:
        while not agent.device_id and not stop.wait(0.05):
            try:
                agent.enrol(decode("token", token, EnrolmentToken))
            except (UnreachableError, RefusedError):
                continue
        agent.run_forever(stop)
    line.send(passed)


def _wait(line: Connection, stop: threading.Event) -> None:
    try:
        line.recv()
    except EOFError:
        os._exit(1)  # the test is gone
    stop.set()
