"""Rounds of four devices over a real server: its processes, agents in threads, and secure aggregation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
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
from archipel.protocol.sealed import decode
from tests.support.simulation import clients


def run_rounds(
    folder: Path,
    bundle: Bundle,
    key: Ed25519PrivateKey,
    rounds: int,
    seed: Callable[[int, int], int] | None = None,
    *,
    privacy: Literal["secure", "plain"] = "secure",
) -> dict[str, np.ndarray]:
    """All rounds with all four clients of tests.support.simulation; the last version's parameters.

    `key` is the bundle's publisher's. `seed`: a round's number and a client's -> what its device draws from, in place
    of its secret.
    """
    pack(bundle.folder, folder / "model.bundle")
    processes = Processes(folder)
    try:
        return _run(
            Federation(folder, processes, key.public_key().public_bytes_raw()), folder, bundle, rounds, seed, privacy
        )
    finally:
        processes.close()


def _run(
    federation: Federation,
    folder: Path,
    bundle: Bundle,
    rounds: int,
    seed: Callable[[int, int], int] | None,
    privacy: Literal["secure", "plain"],
) -> dict[str, np.ndarray]:
    field = bundle.program("predict").inputs[0].name
    stop = threading.Event()

    def device(index: int) -> None:
        x, y = clients()[index]
        config = AgentConfig(folder=folder / "devices" / str(index), isolated=False, allow_plain=privacy == "plain")
        with Agent(config, examples=lambda: {field: x, "label": y}) as agent:
            agent.enrol(decode("token", federation.mint(), EnrolmentToken))
            agent.run_forever(stop)

    def contribute_from(prepared: Prepared, plan: RoundPlan, **given: Any) -> Contribution:
        assert seed is not None
        return contribute(prepared, plan, **{**given, "seed": seed(plan.number, int(given["config"].folder.name))})

    operator = federation.operator
    with ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        if seed is not None:
            stack.enter_context(patch.object(participation, "contribute", contribute_from))
        running = [pool.submit(device, index) for index in range(4)]
        info = operator.bundles.upload(folder / "model.bundle")
        task = operator.tasks.create(
            TaskRequest(
                name="small", population=POPULATION, bundle=info.digest, rounds=rounds,
                min_cohort=4, cohort=4, privacy=privacy,
                threshold=3 if privacy == "secure" else None,
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
    assert [each.reason for each in done if each.weights_out is None] == []
    assert len(done) == rounds
    last = done[-1].weights_out
    assert last is not None
    return dict(operator.weights.read(last))
