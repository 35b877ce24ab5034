"""The agent that the answers are given to, and the cases of the table."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archipel.client import Agent, AgentConfig, Event, Outcome
from tests.support.federation import states
from tests.support.linear_bundle import local_data
from tests.support.scripted_server import Change, Reply, Scripted, before

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "agent-answers.md").read_text()
SECTION = PAGE.partition("## What the server may answer\n")[2].partition("\n## ")[0]
NO_ANSWER: tuple[Change, ...] = (
    before(503), lambda reply: None, lambda reply: reply.raw()[:-1], lambda reply: Reply(200, b"<html>"),
    before(429, Retry_After="0"), lambda reply: Reply(200, b" " * (17 << 20)),
)  # fmt: skip
"""Of different kinds; the last is too large for a message."""


def rows() -> Iterator[tuple[str, str]]:
    table = ""
    for line in SECTION.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| answer"):
            table = cells[0]
        elif line.startswith("|") and not line.startswith("|---"):
            yield table, cells[0]


class World:
    """An enrolled agent, the server that plays its part, and the agent's events."""

    def __init__(self, folder: Path, server: Scripted) -> None:
        self.server, self.folder = server, folder
        self.agent = self.start()
        self.agent.enrol(server.token())
        server.forget()

    def start(self, name: str = "device", **changes: Any) -> Agent:
        quick = {
            "attempts": 2, "backoff": 0.001, "max_wait": 0.01, "patience": 2.0, "read_timeout": 1.0,
            "pause_seconds": 0.01, "max_offline_wait": 0.02, "isolated": False, "allow_plain": True,
        }  # fmt: skip
        self.events: list[str] = []
        return Agent(
            AgentConfig(folder=self.folder / name, **{**quick, **changes}),
            examples=lambda: local_data(0),
            on_event=lambda event: self.events.append(event.name),
        )

    def restart(self, **changes: Any) -> None:
        self.agent.close()
        self.agent = self.start(**changes)

    def answers(self, step: str, *changes: Change | None) -> None:
        self.server.changes[step] = list(changes)

    def round(self, **plan: Any) -> Outcome:
        self.server.begin(**plan)
        return self.agent.run_once()

    def asked(self, step: str) -> int:
        return self.server.steps.count(step)

    @property
    def same(self) -> bool:
        """Whether everything that was sent for one step of the last round was the same."""
        return all(len(set(bodies)) == 1 for step, bodies in self.server.bodies.items() if step in SENT)

    @property
    def seen(self) -> float:
        return sum(float(each.state["seen"]) for each in states(self.agent.config.folder))

    def works(self) -> None:
        """In the next round it takes part."""
        self.server.forget()
        assert self.round().kind == "took_part"

    def runs_on(self) -> None:
        """`run_forever` goes on until the next round's end."""
        stop = threading.Event()
        self.agent._on_event = lambda event: stop.set() if event.name == "committed" else None
        timer = threading.Timer(10, stop.set)
        timer.start()
        self.agent.run_forever(stop)
        timer.cancel()
        assert self.agent.rounds[-1].result == "took_part"

    def interrupted(self, after: str) -> None:
        """A round that the agent is killed in at that event: what was on its disk then is what there is."""
        folder, copy = self.agent.config.folder, self.folder / "copy"

        def on_event(event: Event) -> None:
            if event.name == after:
                shutil.copytree(folder, copy)
                raise Killed

        self.agent._on_event = on_event
        with pytest.raises(Killed):
            self.round()
        self.agent.close()
        shutil.rmtree(folder)
        copy.rename(folder)
        self.agent = self.start()
        self.server.forget()


class Killed(BaseException):
    """By SIGKILL."""


SENT = ("advertisement", "shares", "complaints", "update", "confirmation", "unmasking")
STEPS = ("advertisement", "cohort", "shares", "inbox", "complaints", "update", "survivors", "confirmation",
         "confirmations", "unmasking")  # fmt: skip
CASES: dict[tuple[str, str], Callable[[World], None]] = {}


def case(table: str, answer: str) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    def register(function: Callable[[World], None]) -> Callable[[World], None]:
        CASES[f"answer {table}", answer] = function
        return function

    return register
