"""`simulate`: a federation on this machine, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.training.driver import data_ports
from archipel.protocol.measures import measured
from archipel.protocol.uploads import upload_program
from archipel.simulation.clients import Clients, as_clients
from archipel.simulation.lanes import Lanes
from archipel.simulation.one_by_one import OneByOne
from archipel.simulation.result import Result
from archipel.simulation.rounds import RoundRow, Rounds, RoundSettings
from archipel.simulation.saved import Record, load, save
from archipel.simulation.states import MemoryStates, StateFolder, States
from archipel.simulation.work import Engine

_SAVE_SECONDS = 30.0

Test = tuple[NDArray[Any], NDArray[Any]] | Mapping[str, NDArray[Any]]


def simulate_bundle(
    bundle: Bundle,
    clients: Clients | Sequence[Any],
    *,
    rounds: int,
    cohort: int | None = None,
    test: Test | None = None,
    test_every: int = 1,
    seed: int = 0,
    privacy: str = "secure",
    dropout: float = 0.0,
    hyperparameters: Mapping[str, float] | None = None,
    folder: Path | str | None = None,
    threads: int = 1,
    client_axis: bool = False,
    on_round: Callable[[RoundRow], object] | None = None,
) -> Result:
    """Rounds of a bundle's training over simulated devices, with the server's half of its strategy.

    Arguments:
        bundle: as `open_bundle` returns it; its strategy, schedule and programs are what runs.
        clients: the devices' examples: Clients, or for each a mapping from field to array or a tuple of arrays.
        rounds: how many, 1 or more.
        cohort: devices drawn for each round; None: all.
        test: examples on which the model is measured every `test_every` rounds and after the last one.
        seed: decides cohorts, dropouts and what devices draw.
        privacy: "secure" adds up the whole numbers that secure rounds add up (without masks, which cancel), "plain"
            floating point.
        dropout: the share of drawn devices, 0 to below 1, that leave before their update counts.
        hyperparameters: of the devices' programs and the server's half, as of a task.
        folder: keeps where the run stands; the same call goes on from there after it was stopped or killed.
        threads: inside one operator.
        on_round: called after every round, with its row.

    Raises SimulationError, ProtocolError.
    """
    if rounds < 1:
        raise SimulationError(f"rounds: {rounds} is not 1 or more")
    if not 0 <= dropout < 1:
        raise SimulationError(f"dropout: {dropout} is not from 0 to below 1")
    names = [port.name for port in data_ports(bundle, bundle.manifest.schedule)]
    devices = as_clients(clients, names)
    settings = RoundSettings(
        cohort=len(devices) if cohort is None else cohort, seed=seed, privacy=privacy, dropout=dropout,
        hyperparameters=dict(hyperparameters or {}),
    )  # fmt: skip
    with ExitStack() as stack:
        where = None if folder is None else Path(folder)
        states: States = MemoryStates() if where is None else StateFolder(where / "states")
        make = Lanes if client_axis else OneByOne
        engine: Engine = make(bundle, devices, states, threads=threads)
        stack.callback(engine.close)
        record = Record(
            bundle=bundle.digest, clients=len(devices), settings=settings, engine="one device after the other", rows=[]
        )
        found = None if where is None else load(where, record)
        if where is not None:
            where.mkdir(parents=True, exist_ok=True)
        course = Rounds(bundle, len(devices), settings, None if found is None else found[1])
        standing = course.standing
        record.rows = standing.rows
        result = Result(standing.rows, standing.parameters, bundle, record.engine)
        measure = None if test is None else _measurer(bundle, test, threads)
        saved, last_save = len(standing.rows), time.monotonic()
        while len(standing.rows) < rounds:
            started = time.perf_counter()
            row, reports = course.run(engine, saved)
            row.seconds = time.perf_counter() - started
            result.add(reports)
            last = row.number == rounds
            if measure is not None and (last or row.number % test_every == 0):
                row.tested = measure(standing.parameters)
            if where is not None and (last or time.monotonic() - last_save > _SAVE_SECONDS):
                save(where, record, standing)
                saved, last_save = row.number, time.monotonic()
            if on_round is not None:
                on_round(row)
        result.parameters = standing.parameters
    return result


def _measurer(bundle: Bundle, test: Test, threads: int) -> Callable[[Mapping[str, NDArray[Any]]], dict[str, float]]:
    runtime = Runtime(bundle, threads=threads, delegates="cpu")
    program = upload_program(bundle.manifest, "evaluation")
    x, y = test if isinstance(test, tuple) else (test, None)
    count = len(x if isinstance(x, np.ndarray) else next(iter(x.values())))

    def measure(parameters: Mapping[str, NDArray[Any]]) -> dict[str, float]:
        runtime.set_parameters({name: np.asarray(array) for name, array in parameters.items()})
        return dict(measured(program, runtime.evaluate(x, y), count).values)

    return measure
