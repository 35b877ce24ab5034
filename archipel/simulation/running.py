"""Runs a bundle's rounds to their end: chooses the engine, measures, saves, and goes on where a run was stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Bundle
from archipel.engine_registry import ENGINES
from archipel.errors import SimulationError
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.engines.delegates import split_device
from archipel.protocol.metrics.measures import measured
from archipel.protocol.uploads import upload_program
from archipel.simulation.attacks import spoil_clients
from archipel.simulation.choosing import AT_ONCE, CPU, ClientAxis, choose_client_axis
from archipel.simulation.clients import Clients, fingerprint
from archipel.simulation.crews.actors import Actors
from archipel.simulation.crews.processes import Processes
from archipel.simulation.crews.worker import Crew, WorkerSettings
from archipel.simulation.evaluation import DeviceTests, Evaluation
from archipel.simulation.lane_program import open_lane_engine
from archipel.simulation.lanes import Lanes
from archipel.simulation.masked import Masked
from archipel.simulation.one_by_one import OneByOne
from archipel.simulation.result import Result
from archipel.simulation.rounds import RoundRow, Rounds, RoundSettings
from archipel.simulation.saved import STATES, Record, held, keep_version, load, save
from archipel.simulation.secure.protocol import protocol_of_rounds, sizes_of_rounds
from archipel.simulation.several import EachModel, SeveralModels
from archipel.simulation.states import MemoryStates, StateFolder, States
from archipel.simulation.system.overlapping import OverlappingRounds
from archipel.simulation.work import Engine
from archipel.simulation.workers import Workers

SAVE_SECONDS = 30.0
"""How often a run's standing is written; it is in any case after the first round and after the last one."""

Cluster = Literal["local", "ray"]
ONNX_RUNTIME = "onnxruntime"
_BY = ", by "
_AND = "; then "

Test = tuple[NDArray[Any], NDArray[Any]] | Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a simulation runs, which does not change what it computes (but for `client_axis` and `engine`, in the last
    digits).

    Arguments:
        workers: processes, 1 or more; with cluster="ray" 0 stands for one a core, or a GPU.
        client_axis: "on" runs many devices as one graph, "off" one after the other; "auto" measures which is faster.
        threads: of each process, inside one operator.
        engine: what runs the devices' programs: "onnxruntime", on the CPU; "torch", on the machine's GPU where it has
            one, "torch:cpu", "torch:cuda:1" and so on; "openvino", one device after the other.
        cluster: where the workers are: "local", processes of this machine; "ray", actors of a Ray cluster, each with
            `threads` cores, and a GPU for an engine on one. A lost actor's clients go to another.
        masks: secure aggregation is really carried out, with every device's keys, shares and masks, and its sum is
            compared with that of the vectors; the devices then train one after the other.
        folder: keeps where the run stands; a run with the same folder goes on from there.
        keep_rounds: the folder also gets what the server had after each round, as
            versions/round-1.safetensors and so on, for `archipel insight`.
        test_every: the model is measured every so many rounds, and after the last one.
        on_round: called after every round, with its row; if it returns False, the run ends there, and a run with the
            same folder goes on.
        on_begin: called before the first round, with the result as it then is: its bundle, engine and hints.
    """

    workers: int = 1
    client_axis: ClientAxis = "auto"
    threads: int = 1
    engine: str = ONNX_RUNTIME
    cluster: Cluster = "local"
    masks: bool = False
    folder: Path | str | None = None
    keep_rounds: bool = False
    test_every: int = 1
    on_round: Callable[[RoundRow], object] | None = None
    on_begin: Callable[[Result], object] | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "test_every"):
            value = getattr(self, name)
            least = 0 if name == "workers" and self.cluster == "ray" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SimulationError(f"{name}: {value!r} is not a whole number of 1 or more")
        if self.keep_rounds and self.folder is None:
            raise SimulationError("keep_rounds: needs a folder, where the rounds are kept")
        if self.client_axis not in ("auto", "on", "off"):
            raise SimulationError(f"client_axis: {self.client_axis!r} is not 'auto', 'on' or 'off'")
        if self.cluster not in ("local", "ray"):
            raise SimulationError(f"cluster: {self.cluster!r} is not 'local' or 'ray'")
        if split_device(self.engine)[0] not in ENGINES and self.engine != ONNX_RUNTIME:
            raise SimulationError(
                f"engine: {self.engine!r} is not 'onnxruntime', 'torch', 'torch:cuda:1' or 'openvino'"
            )

    @property
    def is_shared(self) -> bool:
        """Whether several processes share what devices keep."""
        return self.workers > 1 or self.cluster != "local"


def run(
    bundle: Bundle,
    clients: Clients,
    settings: RoundSettings,
    rounds: int,
    test: Test | None,
    options: RunOptions,
    evaluated: tuple[Clients, Evaluation] | None = None,
    models: SeveralModels | None = None,
) -> Result:
    """Rounds of a bundle's training over simulated devices, with the server's half of its strategy.

    Arguments:
        bundle: as `open_bundle` returns it; its strategy, schedule and programs are what runs.
        clients: the devices' examples.
        settings: what decides the rounds.
        rounds: how many in all, 1 or more; those that the folder has already are not run again.
        test: examples on which the model is measured, as for the bundle's `evaluate`.
        options: how it runs.
        evaluated: examples of each device that it does not train with, and how devices measure the model on them.
        models: where devices have different models; `bundle` is then the first of them.

    Raises SimulationError, ProtocolError.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise SimulationError(f"rounds: {rounds!r} is not a whole number of 1 or more")
    where = None if options.folder is None else Path(options.folder)
    make = OverlappingRounds if settings.pacing.mode == "asynchronous" else Rounds
    with ExitStack() as stack:
        examples = ""
        if where is not None:
            stack.enter_context(held(where))
            examples = fingerprint(clients)
        record = Record(
            bundle=bundle.digest if models is None else models.digest, population=len(clients), examples=examples,
            settings=settings, engine="", rows=[],
        )  # fmt: skip
        found = None if where is None else load(where, record, bundle)
        course = make(bundle, len(clients), settings, None if found is None else found[1], clients, models)
        standing = course.standing
        clients = spoil_clients(bundle, clients, settings.attack, len(clients) - settings.root, settings.seed)
        record.rows = standing.rows
        engine, states, record.engine = _open_engine(
            (bundle,) if models is None else models, clients, settings, options, where,
            None if found is None else found[0].engine, stack,
        )  # fmt: skip
        result = Result(standing.rows, standing.parameters, bundle, record.engine, course.hints(rounds))
        if found is not None:
            result.clients = {row.client: row for row in found[0].clients}
        measure = None if test is None else _measurer(bundle, test, options.threads)
        device_tests = None
        if evaluated is not None:
            device_tests = DeviceTests(models or bundle, *evaluated, settings.seed, options.threads)
        if options.on_begin is not None:
            options.on_begin(result)
        saved, last_save = len(standing.rows), -math.inf
        while len(standing.rows) < rounds:
            if course.spent:
                result.ended = course.spent
                break
            started = time.perf_counter()
            row, reports = course.run(engine, saved)
            row.seconds = time.perf_counter() - started
            result.add(reports)
            last = row.number == rounds
            if measure is not None and (last or row.number % options.test_every == 0):
                row.tested = measure(standing.parameters)
            if device_tests is not None and device_tests.is_due(row.number, last):
                found_tests = device_tests.measure(standing.parameters, states, row.number)
                row.spread, row.binned = device_tests.describe(found_tests)
                result.add_tests(found_tests)
            ends = options.on_round is not None and options.on_round(row) is False
            if where is not None and options.keep_rounds:
                keep_version(where, row.number, standing.parameters)
            if where is not None and (last or ends or time.monotonic() - last_save > SAVE_SECONDS):
                record.clients = list(result.clients.values())
                save(where, record, standing)
                saved, last_save = row.number, time.monotonic()
            if ends:
                break
        result.parameters = standing.parameters
    return result


def _open_engine(
    models: SeveralModels | tuple[Bundle],
    clients: Clients,
    settings: RoundSettings,
    options: RunOptions,
    where: Path | None,
    before: str | None,
    stack: ExitStack,
) -> tuple[Engine, States, str]:
    """The engine, what its devices keep, and how it runs and why. A run that goes on keeps to what it began with."""
    states: States
    if where is not None or options.is_shared:
        shared = where / STATES if where is not None else Path(stack.enter_context(TemporaryDirectory()))
        states = StateFolder(shared)
    else:
        states = MemoryStates()
    bundles = models.bundles if isinstance(models, SeveralModels) else models
    known = [None] * len(bundles) if before is None else before.split(_AND)
    engines, reasons = [], []
    for bundle, way in zip(bundles, known, strict=True):
        engine, why = _open_one(bundle, clients, settings, options, states, way, len(bundles))
        engines.append(engine)
        reasons.append(why)
    engine = EachModel(engines, models.of) if isinstance(models, SeveralModels) else engines[0]
    if options.masks:
        if settings.privacy != "secure":
            raise SimulationError(f"masks: a round with privacy {settings.privacy!r} has none; leave masks out")
        if settings.root or settings.attack.over_updates:
            raise SimulationError("masks: hide single updates, which root and attacks over updates need; leave one out")
        manifest = bundles[0].manifest
        protocol = protocol_of_rounds(manifest, settings) or "complete"
        engine = Masked(engine, manifest.privacy, sizes_of_rounds(manifest, settings), protocol)
    stack.callback(engine.close)
    return engine, states, _AND.join(reasons)


def _open_one(
    bundle: Bundle,
    clients: Clients,
    settings: RoundSettings,
    options: RunOptions,
    states: States,
    before: str | None,
    crews: int,
) -> tuple[Engine, str]:
    """The engine of one of so many models, and how it runs and why."""
    delegates = _delegates(options.engine)
    told = f"{_BY}{options.engine}" if options.engine != ONNX_RUNTIME else ""
    axis: bool | RoundSettings
    measured_engine: Lanes | OneByOne | None = None
    if before is not None:
        axis, why = before.startswith(AT_ONCE), before.partition(_BY)[0]
    elif options.is_shared and options.client_axis == "auto":
        axis, why = settings, ""  # a worker measures
    else:
        axis, why, measured_engine = choose_client_axis(
            bundle, clients, settings, options.client_axis, options.threads, delegates
        )
    if isinstance(states, StateFolder) and options.is_shared:
        given = WorkerSettings(
            bundle.folder, bundle.publisher, clients, states.folder, axis, options.threads, delegates
        )
        crew: Crew
        if options.cluster == "ray":
            crew = Actors(given, bundle, options.workers, crews)
        else:
            crew = Processes(given, options.workers)
        return Workers(crew, clients, client_axis=crew.way.client_axis), (crew.way.why or why) + told
    if measured_engine is not None:
        return measured_engine.with_states(states), why + told
    kind = Lanes if axis else OneByOne
    return kind(bundle, clients, states, threads=options.threads, delegates=delegates), why + told


def _delegates(engine: str) -> str:
    """The engine as the runtime calls it. Raises SimulationError for a device that is not there, MissingExtraError."""
    if engine == ONNX_RUNTIME:
        return CPU
    name = split_device(engine)[0]
    ENGINES[name].require()
    if name == "torch":
        open_lane_engine(engine, 1)
    return engine


def _measurer(bundle: Bundle, test: Test, threads: int) -> Callable[[Mapping[str, NDArray[Any]]], dict[str, float]]:
    runtime = Runtime(bundle, threads=threads, delegates="cpu")
    program = upload_program(bundle.manifest, "evaluation")
    x, y = test if isinstance(test, tuple) else (test, None)
    count = len(x if isinstance(x, np.ndarray) else next(iter(x.values())))

    def measure(parameters: Mapping[str, NDArray[Any]]) -> dict[str, float]:
        runtime.set_parameters({name: np.asarray(array) for name, array in parameters.items()})
        return dict(measured(program, runtime.evaluate(x, y), count).values)

    return measure
