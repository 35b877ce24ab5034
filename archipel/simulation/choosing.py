"""Whether many devices run as one graph or one after the other: what is faster here."""

from __future__ import annotations

import time
from typing import Literal

from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.lite_runtime.engines.delegates import Delegates
from archipel.simulation.clients import Clients
from archipel.simulation.draws import draw_cohort
from archipel.simulation.lanes import Lanes
from archipel.simulation.one_by_one import OneByOne
from archipel.simulation.rounds import Rounds, RoundSettings
from archipel.simulation.states import MemoryStates
from archipel.simulation.work import Engine, Work

ClientAxis = Literal["auto", "on", "off"]

AT_ONCE, ONE_BY_ONE = "many devices at once", "one device after the other"
LONG_STEP = 0.0015
"""Seconds. In a longer step calls cost little, and lanes save nothing (docs/performance.md, "Many clients")."""
CPU = "cpu"
"""The delegates of ONNX Runtime on the CPU, for whose steps that holds."""
_MEASURED = 8
_TRIES = 3
_CLEARLY = 4
"""A step that takes so many times LONG_STEP is long, whatever else runs on the machine."""


def choose_client_axis(
    bundle: Bundle,
    clients: Clients,
    settings: RoundSettings,
    wanted: ClientAxis,
    threads: int,
    delegates: Delegates,
) -> tuple[bool, str, Lanes | OneByOne | None]:
    """Whether to run many devices at once, a sentence about it, which begins with AT_ONCE or ONE_BY_ONE, and the engine
    that was measured, if one was: its sessions are open, so it need not be made again (`with_states`).

    "auto" measures a few devices' rounds, of which nothing is kept. Raises SimulationError where "on" cannot be.
    """
    if wanted == "off":
        return False, f"{ONE_BY_ONE}, as asked for", None
    if wanted == "on":
        return True, f"{AT_ONCE}, as asked for", None
    if settings.cohort == 1:
        return False, f"{ONE_BY_ONE}: a round has one device", None
    try:
        lanes = Lanes(bundle, clients, MemoryStates(), threads=threads, delegates=delegates)
    except SimulationError as error:
        return False, f"{ONE_BY_ONE}: {error}", None
    single = OneByOne(bundle, clients, MemoryStates(), threads=threads, delegates=delegates)
    drawn = draw_cohort(len(clients), min(settings.cohort, _MEASURED), settings.seed, 1).tolist()
    work = Rounds(bundle, len(clients), settings, None).first_work()
    # The first run of each makes its sessions.
    _measure(single, work, drawn[:1])
    for _ in range(_TRIES):
        # As below: one of several is enough to say that a step is short.
        seconds, steps = _measure(single, work, drawn[:1])
        if not LONG_STEP * steps < seconds <= _CLEARLY * LONG_STEP * steps:
            break
    if delegates == CPU and seconds > LONG_STEP * steps > 0:
        lanes.close()
        line = f"{ONE_BY_ONE}: a step takes {1e3 * seconds / steps:.1f} ms, nearly all of it arithmetic"
        return False, line, single
    _measure(lanes, work, drawn)
    # In turn, and the shortest of each: whatever else runs on the machine makes a run longer, never shorter.
    turns = [[_measure(engine, work, drawn)[0] for engine in (single, lanes)] for _ in range(2)]
    apart, together = (min(times) for times in zip(*turns))
    lines = f"{len(drawn)} devices take {1e3 * together:.1f} ms at once, {1e3 * apart:.1f} ms one by one"
    if together < apart:
        return True, f"{AT_ONCE}: {lines}", lanes
    lanes.close()
    return False, f"{ONE_BY_ONE}: {lines}", single


def _measure(engine: Engine, work: Work, drawn: list[int]) -> tuple[float, int]:
    """Seconds of these devices' rounds, and their steps."""
    started = time.perf_counter()
    partial = engine.run(work, drawn)
    return time.perf_counter() - started, sum(report.steps for report in partial.reports)
