"""How long check-ins take while many devices poll, beside an empty WSGI application under the same gunicorn.

10,000 devices come every 30 s. 100,000 come as the server's pace tells them to: after exponential waits, so that all
together come at random (a Poisson process) with the rate `check_ins_per_second`, which is the same. A task waits for
other devices, so the coordinator searches among those that wait again and again, as it does in life.
"""

from __future__ import annotations

import asyncio
import random
import resource
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import Report, Row
from server_load import POPULATION, Fleet, bare, processor
from server_swarm import Swarm

from archipel.operator import OperatorClient, TaskRequest

PEER = "empty WSGI"
UNITS = {"p50": "ms", "p99": "ms", "processor": "ms", "processor of the devices": "ms", "a second": "1/s"}


@dataclass(frozen=True)
class Case:
    """So many devices, of which each comes every `every` seconds on average: exactly so often, or at random."""

    devices: int
    every: float
    at_random: bool
    workers: tuple[int, ...]
    turns: int
    seconds: float
    warm_up: float


QUICK = Case(1000, 3.0, False, (1,), 2, 4.0, 1.0)
STEADY = Case(10_000, 30.0, False, (1, 2), 3, 40.0, 10.0)
AT_RANDOM = Case(100_000, 300.0, True, (2, 4), 3, 40.0, 10.0)


def measure_polling(report: Report, case: Case, folder: Path, database: str, url: str) -> None:
    """Add rows for each number of web processes: p50 and p99, how many check-ins a second, and the processor time of
    one in all processes of the server, and in this one, which is what the devices here cost by themselves."""
    # Each device has a connection, to either server; the servers inherit the limit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    shortest = 3.0 if case.every < 30 else 30.0
    fleet = Fleet(
        folder / "data", case.devices, polled_every=case.every, database=url, retry_after=shortest,
        check_in_window=3 * shortest, check_ins_per_second=case.devices / case.every if case.at_random else 1e4,
    )  # fmt: skip
    bundle = fleet.bundle(16)
    waits = False
    for workers in case.workers:
        with ExitStack() as stack:
            host, port, ours = stack.enter_context(fleet.serving(workers=workers))
            peer_host, peer_port, theirs = stack.enter_context(
                bare(folder / "bare", app="empty_wsgi:app", workers=workers, threads=fleet.settings.all_threads)
            )
            if not waits:
                client = stack.enter_context(OperatorClient(f"http://{host}:{port}", fleet.operator_token))
                _let_a_task_wait(client, bundle)
                waits = True
            swarms = {
                "ours": _swarm(fleet, case, (host, port), told=True),
                "peer": _swarm(fleet, case, (peer_host, peer_port), told=False),
            }
            found = asyncio.run(_take_turns(swarms, {"ours": ours, "peer": theirs}, case))
        where = f"{case.devices:,} devices, {workers} web, {database}"
        for name, unit in UNITS.items():
            a, b = found["ours"][name], found["peer"][name]
            ratio = statistics.median(x / y for x, y in zip(a, b))
            row = Row(
                "server", f"check-in {name}, {where}", statistics.median(a), statistics.median(b), PEER, ratio, unit
            )
            report.add([row])


def _swarm(fleet: Fleet, case: Case, where: tuple[str, int], *, told: bool) -> Swarm:
    """`told`: waits are those in the answers; else they are drawn, from the same distribution."""
    rng = random.Random(1)

    def first() -> float:
        # What is left of an exponential wait is exponential, too.
        return rng.expovariate(1 / case.every) if case.at_random else rng.uniform(0, case.every)

    def wait(answer: Any) -> float:
        if told:
            return float(answer["retry_after"])
        return first() if case.at_random else case.every

    return Swarm(where, fleet.tokens, first, wait, keep=not case.at_random)


async def _take_turns(swarms: dict[str, Swarm], pids: dict[str, int], case: Case) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {name: {case: [] for case in UNITS} for name in swarms}
    for turn in range(case.turns + 1):
        for name, swarm in swarms.items():
            before, here, began = processor(pids[name]), time.process_time(), time.perf_counter()
            # In the turn before the first one each device opens its connection.
            seconds, warm_up = (case.seconds, case.warm_up) if turn else (case.every if swarm.keeps else 1.0, 0.0)
            times = await swarm.turn(seconds, warm_up)
            took, here, used = time.perf_counter() - began, time.process_time() - here, processor(pids[name]) - before
            if turn:
                measured = {
                    "p50": float(np.percentile(times, 50)), "p99": float(np.percentile(times, 99)),
                    "processor": used / swarm.asked * 1e3, "processor of the devices": here / swarm.asked * 1e3,
                    "a second": swarm.asked / took,
                }  # fmt: skip
                for each, value in measured.items():
                    found[name][each].append(value)
    for swarm in swarms.values():
        swarm.close()
    return found


def _let_a_task_wait(client: OperatorClient, bundle: Path) -> None:
    """A task for devices that speak a protocol which these do not."""
    digest = client.bundles.upload(bundle).digest
    client.tasks.create(
        TaskRequest(
            name="waiting", population=POPULATION, bundle=digest, rounds=1, cohort=100, min_cohort=10,
            protocol="neighbours",
        )
    )  # fmt: skip
