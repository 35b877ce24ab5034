"""A server on which three devices have finished a training, an evaluation and an analysis, for examples of its API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from archipel.operator import RolloutRequest, Stage, VersionRequest
from archipel.protocol import unseal
from tests.support.federation import open_federation
from tests.support.linear_bundle import POPULATION

PHASES = ("assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking")
PATIENCE = 60.0
"""Seconds for each phase: no round fails on a busy machine, so that there is one of each task."""


@contextmanager
def open_example_server(folder: Path) -> Iterator[dict[str, Any]]:
    """The names that the examples of `archipel.operator` take for granted: a client, and ids of what is there."""
    with open_federation(folder, "127.0.0.1") as federation:
        client = federation.operator
        bundle = federation.publish()
        client.models.create("digits", POPULATION)
        first = client.models.register("digits", VersionRequest(bundle=bundle))
        client.models.promote("digits", first.number)
        agents = [federation.agent(number) for number in range(3)]
        usual: dict[str, Any] = {"bundle": bundle, "cohort": 3, "deadlines": dict.fromkeys(PHASES, PATIENCE)}
        trained = federation.task(**usual)
        measured = federation.task(**usual, kind="evaluation", metrics={"mse": 100.0}, threshold=None)
        counted = federation.task(**usual, kind="analytics", threshold=None)
        tasks = [trained.task_id, measured.task_id, counted.task_id]
        federation.run(agents, lambda: all(client.tasks.get(each).state == "completed" for each in tasks))
        second = client.models.register("digits", VersionRequest(task_id=trained.task_id, task_version=1))
        rollout = client.rollouts.create(
            RolloutRequest(
                model="digits", version=second.number, stages=[Stage(percent=50, soak_seconds=3600)], gate="none"
            )
        )
        [made] = client.tasks.rounds(trained.task_id)
        yield {
            "client": client,
            "unseal": unseal,
            "task_id": trained.task_id,
            "evaluation_id": measured.task_id,
            "analysis_id": counted.task_id,
            "round_id": made.round_id,
            "rollout_id": rollout.rollout_id,
            "device_id": agents[0].device_id,
            "digest": bundle,
        }
