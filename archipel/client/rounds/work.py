"""From a plan to the arrays to upload: fetch, check policy and owner's limits, then train, evaluate or analyse."""

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
from archipel.lite_runtime.latency import first_example, time_prediction
from archipel.lite_runtime.slots.loading import changed_parameters
from archipel.protocol.messages import RoundPlan
from archipel.protocol.metrics.measures import PREDICT_MS, measured
from archipel.protocol.metrics.training_metrics import training_arrays
from archipel.protocol.origin import check_origin
from archipel.protocol.policy import check_plan
from archipel.protocol.uploads import adoption, contribution, metric_arrays, plan_layout, upload_program
from archipel.protocol.vector import Layout

if TYPE_CHECKING:
    from archipel.lite_runtime import ModelRuntime
    from archipel.lite_runtime.isolated.starter import Starter

_CHECK_SECONDS = 0.25


@dataclass(frozen=True)
class Prepared:
    """Everything that a round needs, verified. It starts from `parameters` and `broadcast`, arrays by name."""

    bundle: Bundle
    layout: Layout
    parameters: Mapping[str, np.ndarray]
    broadcast: Mapping[str, np.ndarray]


def prepare(
    plan: RoundPlan, record: DeviceRecord, cache: Cache, origins: Origins, session: DeviceSession, limits: OwnerLimits
) -> Prepared:
    """Fetch the plan's bundle and weights, if owner and publisher allow the plan, and check the weights' origin.

    Raises OwnerRefusalError, BundleError (damaged, or not signed by a pinned publisher), PolicyError (also for a bundle
    that has expired, was replaced or is for others), RuntimeProgramError, ClientError, RefusedError, UnreachableError.
    """
    # Each check comes as soon as what it needs is here: the owner's limits on the plan before any download, the
    # publisher's and the owner's on the manifest before the weights, and the weights' origin before any graph runs.
    bundle, layout = prepare_bundle(plan, record, cache, session, limits)
    limit = limits.config.max_download_bytes
    for_weights = PieceDownload(session, cache.index).for_weights(bundle.manifest)
    parameters = cache.weights(plan.weights, for_weights, limit)
    rounds = origins.check(
        bundle, plan.weights, parameters, cache.find, session, record.of_log(bundle.manifest), limits.config,
        use=plan.kind, task=plan.task_id,
    )  # fmt: skip
    broadcast = {} if plan.broadcast is None else cache.weights(plan.broadcast, for_weights, limit)
    if plan.kind == "training":
        check_broadcast(bundle, broadcast, rounds)
    # Only now: before, `origins.check` may have needed older weights from the cache.
    cache.prune(keep=[name for name in (plan.bundle, plan.weights, plan.broadcast) if name is not None])
    return Prepared(bundle, layout, parameters, broadcast)


def prepare_bundle(
    plan: RoundPlan, record: DeviceRecord, cache: Cache, session: DeviceSession, limits: OwnerLimits
) -> tuple[Bundle, Layout]:
    """Fetch the plan's bundle, if owner and publisher allow the plan; returns it with the layout of what is uploaded.

    Raises what `prepare` raises."""
    limits.check_plan(plan)
    download = PieceDownload(session, cache.index)
    bundle = cache.bundle(plan.bundle, record.publisher_keys, download, limits.config.max_download_bytes)
    PublisherBook(limits.config.folder / "rounds" / "publishers").check(bundle, record.population, time.time())
    layout = plan_layout(plan, bundle.manifest)
    limits.check_bundle(plan, bundle.manifest, layout)
    check_plan(plan, bundle.manifest.privacy, layout)
    check_origin(plan, bundle.manifest, record.root)
    return bundle, layout


@dataclass(frozen=True)
class Contribution:
    """What the device uploads, by output name, and how it was made: number of examples, training steps, last loss."""

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
    starter: Starter | None = None,
) -> Contribution:
    """Compute the device's part in the round. A training that is complete changes `state`; `check` is called between
    training steps and may raise; `starter` forks the child process.

    Raises RuntimeInputError, RuntimeProgramError, RuntimeLimitError, NonFiniteLossError, ProtocolError, ClientError, or
    what `check` raises.
    """
    with open_limited(prepared.bundle, publisher_keys, config, state, starter) as runtime:
        if plan.kind == "training":
            return _train(runtime, prepared, plan, seed, fields, check)
        runtime.set_parameters(prepared.parameters)
        count = max((len(array) for array in fields.values()), default=0)
        if plan.kind == "analytics":
            if not count:
                return Contribution({**_nothing(prepared.layout), **contribution(0)}, 0)
            # More would leave the range of the counts, which is made for so many, and one device could decide the sum.
            fields = draw_examples(fields, plan.max_examples, seed)
            arrays, count = runtime.analyze(fields, program=plan.program, hyperparameters=plan.hyperparameters)
            return Contribution({**arrays, **contribution(count)}, count)
        program = upload_program(prepared.bundle.manifest, plan.kind, plan.program)
        means = measured(program, runtime.evaluate(fields) if count else {}, count)
        values = dict(means.values)
        if PREDICT_MS in plan.metrics and PREDICT_MS not in values and means.count:
            values[PREDICT_MS] = 1000 * time_prediction(runtime, first_example(prepared.bundle, fields))
        arrays = metric_arrays(values, plan.metrics, means.count, plan.max_examples, plan.distributions)
    if plan.count_adoption:
        counts = config.count_adoption and means.count > 0
        arrays |= adoption(_answer(prepared, plan, decisions) if counts else None)
    return Contribution(arrays, count)


def _answer(prepared: Prepared, plan: RoundPlan, decisions: DecisionBook) -> bool | None:
    """The device's answer about the version that the round evaluates; None if it has not decided about it."""
    # The bundle's own weights are recorded as None, whatever digest the plan gives them.
    own = not changed_parameters(prepared.bundle, prepared.parameters)
    return decisions.answer(content_key(prepared.bundle.digest, None if own else plan.weights))


def _nothing(layout: Layout) -> dict[str, np.ndarray]:
    """Zeros, which a device without examples adds to a sum: the others need its masks, but it does not count."""
    return {port.name: np.zeros(tuple(map(int, port.shape)), port.dtype) for port in layout.updates}


@contextmanager
def open_limited(
    bundle: Bundle,
    publisher_keys: Sequence[bytes],
    config: AgentConfig,
    state: DeviceState,
    starter: Starter | None = None,
) -> Iterator[ModelRuntime]:
    """Open a runtime within the owner's limits, in a child process if the owner wants that, and end it afterwards."""
    if not config.isolated:
        yield Runtime(
            bundle,
            threads=config.threads,
            memory_limit=config.max_peak_bytes,
            delegates=config.delegates,
            state=state,
        )
        return
    from archipel.lite_runtime import IsolatedRuntime

    with IsolatedRuntime(
        bundle,
        publisher_keys,
        threads=config.threads,
        delegates=config.delegates,
        memory_limit=config.max_peak_bytes,
        state=state,
        seconds=config.max_step_seconds,
        cpu_seconds=config.max_cpu_seconds,
        niceness=config.niceness,
        starter=starter,
    ) as runtime:
        yield runtime


def draw_examples(fields: Mapping[str, np.ndarray], most: int, seed: int) -> Mapping[str, np.ndarray]:
    """At most `most` examples, drawn at random; the same ones for the same `seed`."""
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
        # Not after each step: conditions read files, which takes longer than a step of a small model.
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
    manifest = prepared.bundle.manifest
    finish = upload_program(manifest, plan.kind, plan.program)
    arrays = {**update.arrays, **training_arrays(manifest, finish, update.arrays, update.metrics)}
    return Contribution(arrays, update.examples, update.steps, loss)


def discount_stale(
    contribution: Contribution, layout: Layout, staleness: int, exponent: float
) -> Mapping[str, np.ndarray]:
    """The arrays to upload of an update that is `staleness` versions behind, see `Layout.discount`."""
    return layout.discount(contribution.arrays, staleness, exponent)


def state_name(bundle: Bundle) -> str:
    """The name of the file with the device's state for this model; all versions of a model share it."""
    return f"{hashlib.sha256(bundle.manifest.name.encode()).hexdigest()[:32]}.sealed"
