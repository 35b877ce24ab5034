"""An edge's uplink, or its coordinator, in a process of its own that is killed at its n-th durable point.

The points are not chosen: every fsync, rename, deletion, new folder and commit of the process is one before and one
after it happens. After SIGKILL another process takes up the same folder.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any, Literal

from archipel.client import Agent, AgentConfig
from archipel.edge.site import EdgeSite
from archipel.errors import RefusedError, UnreachableError
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.sealed import decode
from archipel.server.processes.coordinator import Coordinator
from archipel.server.processes.stopping import Stop
from archipel.server.services import Services
from archipel.server.settings import Settings
from tests.client.rounds.kills import victim
from tests.support import killed_server

Who = Literal["uplink", "coordinator"]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.edge.kills.victim"])


class Victim:
    """`kill` 0: never. `config` is the uplink's, `token` the bytes with which it enrols."""

    def __init__(self, who: Who, settings: Settings, config: dict[str, Any], token: bytes, kill: int) -> None:
        self._line, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=_run, args=(theirs, who, settings, config, token, kill), daemon=True)
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
        """End it in order. Returns how many points it passed."""
        self._line.send("stop")
        points: int = self._line.recv()
        self._process.join()
        return points

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._line.close()


def _run(line: Connection, who: Who, settings: Settings, config: dict[str, Any], token: bytes, kill: int) -> None:
    passed = 0

    def point() -> None:
        nonlocal passed
        passed += 1
        if passed == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    victim.watch(point)
    killed_server.watch_transactions(point)
    services = Services.open(settings)
    if who == "coordinator":
        stop = Stop()
        threading.Thread(target=_wait, args=(line, stop.set), daemon=True).start()
        Coordinator(services).run(stop)
    else:
        over = threading.Event()
        threading.Thread(target=_wait, args=(line, over.set), daemon=True).start()
        assert settings.upstream is not None
        site = EdgeSite(services, settings.upstream)
        with Agent(AgentConfig(**config), examples=dict, site=site) as agent:
            while not agent.device_id and not over.wait(0.05):
                try:
                    agent.enrol(decode("token", token, EnrolmentToken))
                except (UnreachableError, RefusedError):
                    continue
            agent.run_forever(over)
    line.send(passed)


def _wait(line: Connection, stop: Any) -> None:
    try:
        line.recv()
    except EOFError:
        os._exit(1)  # the test is gone
    stop()
