"""Rounds of some devices over a real server: its processes, and agents in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Bundle, pack
from archipel.cli.start.demo.fleet import POPULATION, Federation
from archipel.cli.start.local.processes import Processes
from archipel.client import Agent, AgentConfig
from archipel.client.rounds import participation
from archipel.client.rounds.work import Contribution, Prepared, contribute
from archipel.operator import TaskRequest
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.messages import RoundPlan
from archipel.protocol.operator.aggregation import Aggregation
from archipel.protocol.sealed import decode
from tests.support.simulation import Client, clients

Groups = list[dict[int, int]]
"""For each round: client -> its group, of a round without groups all of one."""


def run_rounds(
    folder: Path,
    bundle: Bundle,
    key: Ed25519PrivateKey,
    rounds: int,
    seed: Callable[[int, int], int] | None = None,
    examples: list[Client] | None = None,
    groups: Groups | None = None,
    root: int | None = None,
    agents: Callable[[int], dict[str, Any]] = lambda client: {},
    **task: Any,
) -> dict[str, np.ndarray]:
    """All rounds with all four clients of tests.support.simulation; the last version's parameters.

    `key` is the bundle's publisher's. `seed`: a round's number and a client's -> what its device draws from, in place
    of its secret. `examples`: clients in place of those four. `groups`: takes who was in which secure group. `root`:
    the client whose device the task trusts, for rule fltrust. `agents`: a client's further settings. `task`: fields of
    the request in place of those here.
    """
    pack(bundle.folder, folder / "model.bundle")
    processes = Processes(folder)
    try:
        federation = Federation(folder, processes, key.public_key().public_bytes_raw())
        given = clients() if examples is None else examples
        return _run(
            federation, folder, bundle, rounds, seed, given, [] if groups is None else groups, root, agents, task
        )
    finally:
        processes.close()


def _enrolled(ids: dict[str, int], client: int) -> str:
    """The id of the client's device, once it has one."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = [device for device, index in list(ids.items()) if index == client]
        if found:
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"client {client} did not enrol")


def _run(
    federation: Federation,
    folder: Path,
    bundle: Bundle,
    rounds: int,
    seed: Callable[[int, int], int] | None,
    examples: list[Client],
    groups: Groups,
    root: int | None,
    agents: Callable[[int], dict[str, Any]],
    task_fields: dict[str, Any],
) -> dict[str, np.ndarray]:
    field = bundle.program("predict").inputs[0].name
    stop, ids = threading.Event(), dict[str, int]()

    def device(index: int) -> None:
        x, y = examples[index]
        config = AgentConfig(
            folder=folder / "devices" / str(index), isolated=False, allow_plain=task_fields.get("privacy") == "plain",
            **agents(index),
        )  # fmt: skip
        with Agent(config, examples=lambda: {field: x, "label": y}) as agent:
            ids[agent.enrol(decode("token", federation.mint(), EnrolmentToken))] = index
            agent.run_forever(stop)

    def contribute_from(prepared: Prepared, plan: RoundPlan, **given: Any) -> Contribution:
        assert seed is not None
        return contribute(prepared, plan, **{**given, "seed": seed(plan.number, int(given["config"].folder.name))})

    operator = federation.operator
    with ThreadPoolExecutor(len(examples)) as pool, ExitStack() as stack:
        if seed is not None:
            stack.enter_context(patch.object(participation, "contribute", contribute_from))
        running = [pool.submit(device, index) for index in range(len(examples))]
        info = operator.bundles.upload(folder / "model.bundle")
        if root is not None:
            task_fields = {**task_fields, "aggregation": Aggregation(rule="fltrust", root=_enrolled(ids, root))}
        task = operator.tasks.create(
            TaskRequest(
                name="small", population=POPULATION, bundle=info.digest, rounds=rounds,
                **{"min_cohort": 4, "cohort": 4, "threshold": 3, **task_fields},
            )
        )  # fmt: skip
        deadline = time.monotonic() + 90
        while operator.tasks.get(task.task_id).state == "running" and time.monotonic() < deadline:
            if any(future.done() for future in running):
                break
            time.sleep(0.2)
        stop.set()
    for future in running:
        future.result()
    done = list(operator.tasks.rounds(task.task_id))
    assert [each.reason for each in done if each.phase != "committed"] == []
    by_number: dict[int, list[list[str]]] = {}
    for each in done:
        by_number.setdefault(each.number, []).append(each.survivors)
    assert len(by_number) == rounds
    groups += [
        {ids[device]: place for place, members in enumerate(by_number[number]) for device in members}
        for number in sorted(by_number)
    ]
    last = operator.tasks.get(task.task_id).model
    assert last is not None
    return dict(operator.weights.read(last))
