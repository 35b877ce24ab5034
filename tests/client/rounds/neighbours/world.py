"""The agent in rounds over neighbours, and what must be true of every such round."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from archipel.client import Agent, Event, Outcome
from archipel.lite_runtime import Runtime
from archipel.protocol.policy import plan_digest
from tests.client.answers.world import Killed, World
from tests.client.rounds.kills.victim import DURABLE
from tests.client.rounds.neighbours.server import NeighbourServer, digests
from tests.support.federation import round_seed
from tests.support.in_thread import in_thread
from tests.support.linear_bundle import W0, local_data

STEPS = ("member", "neighbours", "dealt", "refused", "update", "included", "answer")


class NeighbourWorld(World):
    """`events` are those of all starts; `kept` is what the disk had when the agent was killed."""

    server: NeighbourServer

    def killed_at(self, event: str) -> None:
        """Begin a round that the agent is killed in at that event."""
        self.server.begin()
        self._killed(lambda kill: self._at_event(self.agent, event, kill))

    def killed_after(self, points: int) -> bool:
        """Begin a round that the agent is killed in, so many durable points after its training. Returns whether it
        was."""
        self.server.begin()
        return self.killed_again_after(points)

    def killed_again_after(self, points: int) -> bool:
        """Go on with the round until it is killed, so many durable points later."""
        return self._killed(lambda kill: self._at_point(points, kill))

    def _killed(self, arm: Callable[[Callable[[], None]], Callable[[], None]]) -> bool:
        folder, copy = self.agent.config.folder, self.folder / "copy"

        def kill() -> None:
            disarm()
            shutil.copytree(folder, copy)
            raise Killed

        disarm = arm(kill)
        try:
            while self.agent.run_once().kind == "paused":
                pass
        except Killed:
            pass
        finally:
            disarm()
        if not copy.exists():
            return False
        self.agent.close()
        shutil.rmtree(folder)
        copy.rename(folder)
        self.agent = self.start()
        return True

    @staticmethod
    def _at_event(agent: Agent, name: str, kill: Callable[[], None]) -> Callable[[], None]:
        def on_event(event: Event) -> None:
            if event.name == name:
                kill()

        agent._on_event = on_event
        return lambda: setattr(agent, "_on_event", None)

    def _at_point(self, points: int, kill: Callable[[], None]) -> Callable[[], None]:
        real = {name: getattr(os, name) for name in DURABLE}
        # From the training on, or at once where a round is resumed, which trains no more.
        left = {"armed": bool(self.agent._device.journal.unfinished()), "points": points}
        self.passed = 0

        def on_event(event: Event) -> None:
            self.events.append(event.name)
            left["armed"] |= event.name == "trained"

        self.agent._on_event = on_event

        def point() -> None:
            if left["armed"]:
                self.passed += 1
                left["points"] -= 1
                if left["points"] == 0:
                    kill()

        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                point()
                result = function(*arguments, **named)
                point()
                return result

            return call

        for name, function in real.items():
            setattr(os, name, watched(function))

        def disarm() -> None:
            for name, function in real.items():
                setattr(os, name, function)

        return disarm

    def finish(self) -> Outcome:
        """Let the agent work until its round is over."""
        for _ in range(20):
            outcome = self.agent.run_once()
            if outcome.kind != "paused":
                break
        return outcome

    def check_committed(self, rounds: int = 1) -> None:
        """The device's update is in the sum, once, and everything that it sent for one step was the same."""
        assert {step: len(found) for step, found in digests(self.server).items() if len(found) > 1} == {}
        entry = self.agent.rounds[-1]
        assert (entry.step, entry.result) == ("closed", "took_part")
        assert self.seen == 4.0 * rounds
        np.testing.assert_array_equal(self.server.total, self.expected())
        self.check_erased()

    def check_erased(self) -> None:
        left = {path.name for path in (self.agent.config.folder / "rounds").iterdir()}
        assert {Path(name).suffix for name in left} <= {".json", ""}, left

    def expected(self) -> np.ndarray:
        """The device's own vector, by a runtime of the test's, without any mask: its peers' are zeros."""
        seed = round_seed(self.agent.config.folder, plan_digest(self.server.sealed))
        update = Runtime(self.server.opened).local_round(local_data(0), seed=seed, parameters={"w": W0})
        return self.server.layout.encode(update.arrays, modulus_bits=32, max_cohort=6)


@contextmanager
def opened(folder: Path, server: str = "malicious", **options: Any) -> Iterator[NeighbourWorld]:
    """An enrolled agent and its server, which the policy takes to be malicious or semi-honest. `options` are others of
    the bundle."""
    with in_thread(NeighbourServer(folder, server, **options)) as double:
        made = NeighbourWorld(folder, double)
        try:
            yield made
        finally:
            made.agent.close()
