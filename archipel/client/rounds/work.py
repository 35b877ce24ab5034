"""From a plan to the arrays to upload: fetch, check against policy and owner's limits, train, evaluate or analyse."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle import Bundle
from archipel.client.conditions.owner_limits import OwnerLimits
from archipel.client.config import AgentConfig
from archipel.client.connection.identity import DeviceRecord
from archipel.client.connection.session import DeviceSession
from archipel.client.downloads.cache import Cache
from archipel.client.downloads.origins import Origins, check_broadcast
from archipel.client.downloads.pieces import PieceDownload
from archipel.client.downloads.publisher_book import PublisherBook
from archipel.client.memory.decisions import DecisionBook, content_key
from archipel.lite_runtime import DeviceState, Progress, Runtime
from archipel.lite_runtime.slots.loading import differing
from archipel.protocol.measures import measured
from archipel.protocol.messages import RoundPlan
from archipel.protocol.policy import check_plan
from archipel.protocol.uploads import adoption, contribution, metric_arrays, upload_layout, upload_program
from archipel.protocol.vector import Layout

if TYPE_CHECKING:
    from archipel.lite_runtime import ModelRuntime

_CHECK_SECONDS = 0.25


@dataclass(frozen=True)
class Prepared:
    """Everything that a round needs, verified. `parameters` and `broadcast` are what it starts from."""

    bundle: Bundle
    layout: Layout
    parameters: Mapping[str, np.ndarray]
    broadcast: Mapping[str, np.ndarray]


def prepare(
    plan: RoundPlan, record: DeviceRecord, cache: Cache, origins: Origins, session: DeviceSession, limits: OwnerLimits
) -> Prepared:
    """Fetch the plan's bundle and weights, if owner and publisher allow the plan, and see where the weights come from.

    Raises OwnerRefusalError, BundleError (not signed by a pinned publisher, damaged), PolicyError (also of a bundle
    that expired, was replaced or is for others), RuntimeProgramError, ClientError, RefusedError, UnreachableError.
    """
    # Each check comes as soon as what it needs is here: the owner's word on the plan before any download, the
    # publisher's and the owner's on the manifest before the weights, and where the weights come from before any graph.
    limits.check_plan(plan)
    limit = limits.config.max_download_bytes
    download = PieceDownload(session, cache.index)
    bundle = cache.bundle(plan.bundle, record.publisher_keys, download, limit)
    PublisherBook(limits.config.folder / "rounds" / "publishers").check(bundle, record.population, time.time())
    manifest = bundle.manifest
    layout = upload_layout(manifest, plan.kind, plan.program, plan.metrics, count_adoption=plan.count_adoption)
    limits.check_bundle(plan, manifest, layout)
    check_plan(plan, manifest.privacy, layout)
    for_weights = download.for_weights(manifest)
    parameters = cache.weights(plan.weights, for_weights, limit)
    rounds = origins.check(
        bundle,
        plan.weights,
        parameters,
        cache.find_weights,
        session,
        record,
        limits.config,
        use=plan.kind,
        task=plan.task_id,
    )
    broadcast = {} if plan.broadcast is None else cache.weights(plan.broadcast, for_weights, limit)
    if plan.kind == "training":
        check_broadcast(bundle, broadcast, rounds)
    cache.prune(keep=[name for name in (plan.bundle, plan.weights, plan.broadcast) if name is not None])
    return Prepared(bundle, layout, parameters, broadcast)


@dataclass(frozen=True)
class Contribution:
    """What the device has to upload, by output name, and what it took: examples, training steps, the last loss."""

    arrays: Mapping[str, np.ndarray]
    examples: int
    steps: int = 0
    loss: float | None = None


def contribute(
    prepared: Prepared,
    plan: RoundPlan,
    *,
    seed: int,
    fields: Mapping[str, np.ndarray],
    state: DeviceState,
    publisher_keys: Sequence[bytes],
    config: AgentConfig,
    check: Callable[[], None],
    decisions: DecisionBook,
) -> Contribution:
    """The device's part, of the plan's kind. `state` moves on when a training is complete; `check` is called between
    steps and may raise.

    Raises RuntimeInputError, RuntimeProgramError, RuntimeLimitError, NonFiniteLossError, ProtocolError, ClientError, or
    what `check` raises.
    """
    with open_limited(prepared.bundle, publisher_keys, config, state) as runtime:
        if plan.kind == "training":
            return _train(runtime, prepared, plan, seed, fields, check)
        runtime.set_parameters(prepared.parameters)
        count = max((len(array) for array in fields.values()), default=0)
        if plan.kind == "analytics":
            if not count:
                return Contribution({**_nothing(prepared.layout), **contribution(0)}, 0)
            arrays, count = runtime.analyze(fields, program=plan.program, hyperparameters=plan.hyperparameters)
            return Contribution({**arrays, **contribution(count)}, count)
        program = upload_program(prepared.bundle.manifest, plan.kind, plan.program)
        means = measured(program, runtime.evaluate(fields) if count else {}, count)
        arrays = metric_arrays(means.values, plan.metrics, means.count, plan.max_examples)
    if plan.count_adoption:
        counts = config.count_adoption and means.count > 0
        arrays |= adoption(_answer(prepared, plan, decisions) if counts else None)
    return Contribution(arrays, count)


def _answer(prepared: Prepared, plan: RoundPlan, decisions: DecisionBook) -> bool | None:
    """What this device answers about the version that the round evaluates; None where it has not decided about it."""
    own = not differing(prepared.bundle, prepared.parameters)
    return decisions.answer(content_key(prepared.bundle.digest, None if own else plan.weights))


def _nothing(layout: Layout) -> dict[str, np.ndarray]:
    """What a device without examples adds to a sum: the others need its masks, and it is not counted."""
    return {port.name: np.zeros(tuple(map(int, port.shape)), port.dtype) for port in layout.updates}


@contextmanager
def open_limited(
    bundle: Bundle, publisher_keys: Sequence[bytes], config: AgentConfig, state: DeviceState
) -> Iterator[ModelRuntime]:
    """A runtime within the owner's limits, in a child process where the owner wants that; ended afterwards."""
    if not config.isolated:
        yield Runtime(bundle, threads=config.threads, memory_limit=config.max_peak_bytes, state=state)
        return
    from archipel.lite_runtime import IsolatedRuntime

    with IsolatedRuntime(
        bundle,
        publisher_keys,
        threads=config.threads,
        memory_limit=config.max_peak_bytes,
        state=state,
        seconds=config.max_step_seconds,
        cpu_seconds=config.max_cpu_seconds,
        niceness=config.niceness,
    ) as runtime:
        yield runtime


def draw_examples(fields: Mapping[str, np.ndarray], most: int, seed: int) -> Mapping[str, np.ndarray]:
    """At most so many of the examples, any of them."""
    count = max((len(array) for array in fields.values()), default=0)
    if count <= most:
        return fields
    chosen = np.sort(np.random.default_rng(seed).choice(count, most, replace=False))
    return {name: array[chosen] for name, array in fields.items()}


def _train(
    runtime: ModelRuntime,
    prepared: Prepared,
    plan: RoundPlan,
    seed: int,
    fields: Mapping[str, np.ndarray],
    check: Callable[[], None],
) -> Contribution:
    next_check = time.monotonic()

    def between_steps(progress: Progress) -> None:
        nonlocal next_check
        # Conditions read files and ask the system: a step of a small model takes less time than that.
        if time.monotonic() >= next_check:
            check()
            next_check = time.monotonic() + _CHECK_SECONDS

    update = runtime.local_round(
        fields,
        seed=seed,
        parameters=prepared.parameters,
        broadcast=prepared.broadcast,
        hyperparameters=plan.hyperparameters,
        callbacks=[between_steps],
    )
    loss = update.losses[-1] if update.losses else None
    return Contribution(update.arrays, update.examples, update.steps, loss)


def discount_stale(
    contribution: Contribution, layout: Layout, staleness: int, exponent: float
) -> Mapping[str, np.ndarray]:
    """The arrays with their deltas times (1 + staleness)^-exponent (Nguyen et al. 2022)."""
    scale = np.float32((1.0 + staleness) ** -exponent)
    # Values and the weight stay: the update counts less in the sum, and as much in the number of examples.
    deltas = {port.name for port in layout.updates if port.kind == "delta"}
    return {name: array * scale if name in deltas else array for name, array in contribution.arrays.items()}


def state_name(bundle: Bundle) -> str:
    """The file of the device's state for this model; versions of a model share their name."""
    return f"{hashlib.sha256(bundle.manifest.name.encode()).hexdigest()[:32]}.sealed"
