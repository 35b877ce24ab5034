"""Agents in processes that can be killed at any moment and started again, each with several agents in threads."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from archipel.client import Agent, AgentConfig
from archipel.errors import CertificateError, RefusedError, UnreachableError
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.sealed import decode
from tests.support.linear_bundle import local_data

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.client.storm.fleet"])

CALM = "calm"
"""While a file of this name is in the fleet's folder, conditions hold."""


@dataclass(frozen=True)
class Berth:
    """What one agent is started with, again and again."""

    number: int
    config: dict[str, Any]
    token: bytes


def prepare() -> None:
    """Begin to import what the processes need; they are forked from one that has it."""
    forkserver.ensure_running()


class Ship:
    """One process with its agents; they run until it is killed or told to stop."""

    def __init__(self, folder: Path, berths: list[Berth], seed: int) -> None:
        self._folder, self._berths, self._seed = folder, berths, seed
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        self._line, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(
            target=sail, args=(theirs, self._folder, self._berths, self._seed + self.starts), daemon=True
        )
        self._process.start()
        theirs.close()

    def kill(self) -> None:
        """SIGKILL, whatever its agents are doing."""
        self.check()
        self._process.kill()
        self._process.join()
        self._line.close()

    def check(self) -> None:
        """Raises AssertionError with what ended one of its agents."""
        assert self._process.is_alive(), f"the process ended by itself: {self._process.exitcode}"
        assert not self._line.poll(), self._line.recv()

    def stop(self) -> list[str]:
        """What went wrong, after every agent has left its round."""
        self._line.send("stop")
        errors: list[str] = self._line.recv()
        self._process.join()
        self._line.close()
        return errors

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def sail(line: Connection, folder: Path, berths: list[Berth], seed: int) -> None:
    stop, errors = threading.Event(), list[str]()

    def work(berth: Berth) -> None:
        try:
            live(berth, folder, random.Random(1000 * seed + berth.number), stop)
        except BaseException as error:  # noqa: BLE001 - told to the test
            errors.append(f"agent {berth.number}: {type(error).__name__}: {error}")
            with suppress(OSError):
                line.send(errors)

    threads = [threading.Thread(target=work, args=(berth,), daemon=True) for berth in berths]
    for thread in threads:
        thread.start()
    try:
        line.recv()
    except EOFError:
        os._exit(1)  # the test is gone
    stop.set()
    for thread in threads:
        thread.join()
    line.send(errors)


def live(berth: Berth, folder: Path, rng: random.Random, stop: threading.Event) -> None:
    """One agent, from enrolment on: sometimes it replaces its key, and now and then its owner needs the device."""

    def conditions() -> bool:
        return rng.random() > 0.02 or (folder / CALM).exists()

    config = AgentConfig(**berth.config)
    with Agent(config, examples=lambda: local_data(berth.number), conditions=conditions) as agent:
        token = decode("token", berth.token, EnrolmentToken)
        while not agent.device_id and not stop.wait(0.1):
            with suppress(UnreachableError, RefusedError):
                agent.enrol(token)
        if agent.device_id and rng.random() < 0.3:
            with suppress(UnreachableError, RefusedError, CertificateError):
                agent.rotate_key()
        agent.run_forever(stop)
