"""The ways to train a model on a cluster, each with the time and memory that it is predicted to need."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import msgspec

from archipel.errors import TrainingError
from archipel.graph import Model
from archipel.training.cloud.planner import cluster as links
from archipel.training.cloud.planner.cluster import Cluster
from archipel.training.cloud.planner.compute import OPTIMIZERS, optimizer_seconds, unit_seconds
from archipel.training.cloud.planner.costs import Costs, Unit, costs
from archipel.training.cloud.planner.division import SEGMENT_BYTES, divide, keep_together
from archipel.training.cloud.planner.schedule import pipeline_seconds
from archipel.training.cloud.planner.search import search
from archipel.training.cloud.planner.shardings import Strategy

_BUCKET = 25 * 2**20  # bytes that DistributedDataParallel sends at once
_NAMED = 3  # operators of one type that a table names
MARGIN = 0.05  # two steps whose predicted times differ by less than this share of the shorter are about equal


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """One way to place the training.

    Attributes:
        name: "ddp", "fsdp", "tensor", "pipeline", "hybrid" or "auto".
        groups: over how many groups of devices the examples are divided.
        devices: in each group.
        seconds: of one step, compute and exchanges; infinity where the way is refused.
        memory_bytes: of the fullest device.
        refused: why this way cannot be taken; "": it can.
        starts: of a pipeline, names of the graph's nodes that begin stages 1, 2, ...
        microbatches: of a pipeline.
        strategies: of "tensor", "hybrid" and "auto", how each operator is divided within a group.
    """

    name: str
    groups: int
    devices: int
    seconds: float
    memory_bytes: float
    refused: str = ""
    starts: tuple[str, ...] = ()
    microbatches: int = 1
    strategies: dict[str, Strategy] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """All alternatives for one model, batch and cluster.

    Attributes:
        alternatives: one for each way, "auto" last.
        kinds: the type of each operator, such as "Conv", by the name that `strategies` have.
    """

    batch_size: int
    optimizer: str
    cluster: Cluster
    alternatives: tuple[Alternative, ...] = field(repr=False)
    kinds: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Alternative:
        """The alternative of this name. Raises KeyError for another name."""
        for alternative in self.alternatives:
            if alternative.name == name:
                return alternative
        raise KeyError(name)

    @property
    def best(self) -> Alternative:
        """What "auto" does."""
        return self["auto"]

    def about_equal(self, name: str) -> tuple[str, ...]:
        """The other ways that are predicted to take as long as this one, within 5 % of the shorter time.

        What "auto" does is one of the others, or a division of its own, and is not named again. Raises KeyError for
        another name.
        """
        found = self[name]
        if found.refused or name == "auto":
            return ()
        return tuple(
            other.name
            for other in self.alternatives[:-1]
            if other is not found and are_about_equal(found.seconds, other.seconds)
        )

    def table(self) -> str:
        """The alternatives as text, one a line, with the reason for each that is refused."""
        lines = [
            f"{self.cluster.devices} devices, batches of {self.batch_size}, {self.optimizer}",
            f"{'way':<9} {'groups x devices':>16} {'step':>12} {'memory/device':>14}  ",
        ]
        for found in self.alternatives:
            shape = f"{found.groups} x {found.devices}"
            time = "-" if math.isinf(found.seconds) else f"{found.seconds * 1e3:.3g} ms"
            remark = f"refused: {found.refused}" if found.refused else _remark(found)
            if equals := self.about_equal(found.name):
                remark = "; ".join([*filter(None, [remark]), f"about equal: {', '.join(equals)}"])
            memory = "-" if not found.memory_bytes else f"{found.memory_bytes / 2**20:.1f} MiB"
            lines.append(f"{found.name:<9} {shape:>16} {time:>12} {memory:>14}  {remark}".rstrip())
        for found in self.alternatives:
            if found.strategies and not found.refused and (whole := self._replicated(found)):
                lines.append(f"{found.name}: each device computes all of {whole}")
        return "\n".join(lines)

    def _replicated(self, found: Alternative) -> str:
        """The operators that are not divided, by type."""
        groups: dict[str, list[str]] = {}
        for name, strategy in found.strategies.items():
            if strategy.name == "replicate":
                groups.setdefault(self.kinds.get(name, "other operators"), []).append(name)
        return "; ".join(
            f"{kind} ({', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''})"
            for kind, names in groups.items()
        )

    def to_json(self) -> bytes:
        """The same as JSON: seconds null where a way is refused, and the strategy of each operator."""
        rows = []
        for found in self.alternatives:
            row = msgspec.to_builtins(found)
            row["seconds"] = None if math.isinf(found.seconds) else found.seconds
            row["about_equal"] = self.about_equal(found.name)
            row["strategies"] = {name: strategy.name for name, strategy in found.strategies.items()}
            rows.append(row)
        content = {"batch_size": self.batch_size, "optimizer": self.optimizer, "alternatives": rows}
        return msgspec.json.format(msgspec.json.encode(content))


def plan(
    model: Model, cluster: Cluster, batch_size: int, optimizer: str = "adam", microbatches: int | None = None
) -> Plan:
    """Predict each way of training `model`, and choose.

    Arguments:
        model: its only symbolic size is the batch.
        cluster: of a file (`read_cluster`) or measured (`measure_cluster`).
        batch_size: examples of the whole batch, a multiple of the devices.
        optimizer: "sgd", "momentum", "adam" or "adamw".
        microbatches: of a pipeline, 1 or more; None: four for each device, or as many as divide the batch.

    Raises TrainingError for settings out of bounds, GraphError for work without a bound.

    Example:
        found = plan(model, read_cluster("cluster.toml"), batch_size=512)
        print(found.table())
    """
    if optimizer not in OPTIMIZERS:
        raise TrainingError(f"a plan knows the optimizers {', '.join(OPTIMIZERS)}, not {optimizer!r}")
    whole = costs(model, batch_size)
    n = cluster.devices
    found = [
        _ddp(whole, cluster, optimizer),
        _fsdp(whole, cluster, optimizer),
        _divided("tensor", model, cluster, batch_size, optimizer, [1]),
        _pipeline(model, whole, cluster, optimizer, microbatches),
        _divided("hybrid", model, cluster, batch_size, optimizer, [g for g in range(2, n) if n % g == 0]),
    ]
    operators = _divided("auto", model, cluster, batch_size, optimizer, [1])
    best = min([*found, operators], key=lambda alternative: (alternative.seconds, alternative.memory_bytes))
    if best.refused:
        best = min(found, key=lambda alternative: alternative.memory_bytes or math.inf)
    # What the best way is stays to be seen in its other fields; a fixed order breaks ties for the simplest.
    found.append(msgspec.structs.replace(best, name="auto") if best is not operators else operators)
    return Plan(batch_size, optimizer, cluster, tuple(found), {unit.name: unit.op_type for unit in whole.units})


def are_about_equal(seconds: float, others: float) -> bool:
    """Whether two predicted times differ by less than predictions can tell."""
    return math.isfinite(seconds + others) and abs(seconds - others) <= MARGIN * min(seconds, others)


def chosen_way(found: Plan) -> str:
    """The name of the way that "auto" takes: one of the others, or "auto" for a division of its own."""
    for alternative in found.alternatives[:-1]:
        if msgspec.structs.replace(alternative, name="auto") == found.best:
            return alternative.name
    return "auto"


def _remark(found: Alternative) -> str:
    if found.starts:
        return f"{found.microbatches} microbatches; stages begin at {', '.join(found.starts)}"
    counts: dict[str, int] = {}
    for strategy in found.strategies.values():
        counts[strategy.name] = counts.get(strategy.name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _judged(alternative: Alternative, cluster: Cluster) -> Alternative:
    """The alternative, refused if it does not fit."""
    if alternative.refused or alternative.memory_bytes <= cluster.memory_bytes:
        return alternative
    need, have = alternative.memory_bytes / 2**20, cluster.memory_bytes / 2**20
    why = f"needs {need:.0f} MiB on a device, which has {have:.0f}"
    return msgspec.structs.replace(alternative, refused=why, seconds=math.inf)


def _uneven(name: str, groups: int, devices: int, batch_size: int) -> Alternative:
    why = f"{groups} groups cannot divide a batch of {batch_size} examples evenly"
    return _refused(name, groups, devices, why)


def _refused(name: str, groups: int, devices: int, why: str) -> Alternative:
    return Alternative(name=name, groups=groups, devices=devices, seconds=math.inf, memory_bytes=0.0, refused=why)


def _compute(whole: Costs, cluster: Cluster, share: float) -> float:
    return sum(unit_seconds(unit, cluster, share) for unit in whole.units)


def _exposed(exchange: float, beside: float, cluster: Cluster) -> float:
    """The part of an exchange for which a step waits, where so many seconds of computing go on beside it."""
    return max(exchange - cluster.overlap * beside, exchange * (1 - cluster.overlap))


def _backward(whole: Costs, cluster: Cluster, share: float) -> float:
    return sum(unit_seconds(u, cluster, share) * u.backward / (1 + u.backward) for u in whole.units)


def _ddp(whole: Costs, cluster: Cluster, optimizer: str) -> Alternative:
    n, nbytes = cluster.devices, whole.parameter_bytes
    if whole.batch_size % n:
        return _uneven("ddp", n, 1, whole.batch_size)
    buckets = max(1, math.ceil(nbytes / _BUCKET))
    exchange = buckets * links.all_reduce_seconds(cluster, nbytes / buckets, n)
    # DistributedDataParallel copies each gradient into a bucket and back.
    copies = 4 * nbytes / cluster.memory_bytes_per_second
    seconds = _compute(whole, cluster, 1 / n) + cluster.fresh_seconds(nbytes) + copies
    seconds += optimizer_seconds(nbytes, len(whole.parameters), cluster, optimizer)
    seconds += _exposed(exchange, _backward(whole, cluster, 1 / n), cluster)
    # DistributedDataParallel keeps its buckets beside the gradients.
    memory = nbytes * (3 + OPTIMIZERS[optimizer][0]) + sum(unit.saved for unit in whole.units) / n
    return _judged(Alternative(name="ddp", groups=n, devices=1, seconds=seconds, memory_bytes=memory), cluster)


def _fsdp(whole: Costs, cluster: Cluster, optimizer: str) -> Alternative:
    n, nbytes = cluster.devices, whole.parameter_bytes
    if whole.batch_size % n:
        return _uneven("fsdp", n, 1, whole.batch_size)
    # As parallel.segments cuts the graph: segments are gathered for each pass, what is not cut once for both. Then
    # gradients are scattered. Each parameter is copied on the way.
    largest = max((sum(tensor.nbytes for tensor in unit.parameters) for unit in whole.units), default=0)
    count = max(nbytes // max(largest, SEGMENT_BYTES), 1)
    gathers = 2 if count > 1 else 1
    part = nbytes / count
    exchange = count * (gathers * links.gather_seconds(cluster, part, n) + links.scatter_seconds(cluster, part, n))
    exchange += count * (gathers + 1) * cluster.exchange_seconds
    copies = count * (gathers + 1) * links.prepare_seconds(cluster, part)
    updated = optimizer_seconds(nbytes / n, len(whole.parameters), cluster, optimizer)
    seconds = _compute(whole, cluster, 1 / n) + cluster.fresh_seconds(nbytes) + copies + updated
    seconds += _exposed(exchange, _backward(whole, cluster, 1 / n), cluster)
    kept = nbytes * (2 + OPTIMIZERS[optimizer][0]) / n
    # One segment with its gradients, and the next one, which is gathered in the meantime.
    memory = kept + (3 if count > 1 else 2) * part + sum(unit.saved for unit in whole.units) / n
    return _judged(Alternative(name="fsdp", groups=n, devices=1, seconds=seconds, memory_bytes=memory), cluster)


def _divided(
    name: str, model: Model, cluster: Cluster, batch_size: int, optimizer: str, groupings: Sequence[int]
) -> Alternative:
    """The best of: so many groups, each of which divides operators over its devices."""
    n = cluster.devices
    if not groupings:
        why = f"{n} devices cannot be divided into groups of several"
        return _refused(name, n, 1, why)
    candidates = []
    for groups in groupings:
        if batch_size % groups:
            candidates.append(_uneven(name, groups, n // groups, batch_size))
            continue
        part, devices = costs(model, batch_size // groups), n // groups
        only = "" if name == "auto" else "tensor"
        division = search(part, cluster, devices, optimizer, only=only)
        if division is None or division.memory_bytes > cluster.memory_bytes:
            tight = search(part, cluster, devices, optimizer, cluster.memory_bytes, only)
            division = tight or division
        if division is None:
            continue
        exchange = 0.0
        if groups > 1:  # all gradients in one tensor, and back
            nbytes = division.gradient_bytes
            exchange = links.all_reduce_seconds(cluster, nbytes, groups) + cluster.fresh_seconds(nbytes)
            exchange += 4 * nbytes / cluster.memory_bytes_per_second
        candidates.append(
            _judged(
                Alternative(
                    name=name,
                    groups=groups,
                    devices=devices,
                    seconds=division.seconds + exchange,
                    memory_bytes=division.memory_bytes,
                    strategies=division.strategies,
                ),
                cluster,
            )
        )
    return min(candidates, key=lambda found: (found.seconds, found.memory_bytes or math.inf))


def _with_followers(units: Sequence[Unit], seconds: Sequence[float]) -> list[float]:
    """Seconds of each operator with parameters, with those that follow it: each stage begins with one, and learns."""
    weights = [0.0] * len(units)
    at = next((place for place, unit in enumerate(units) if unit.parameters), 0)
    for place, (unit, once) in enumerate(zip(units, seconds)):
        at = place if unit.parameters else at
        weights[at] += once
    return weights


def _pipeline(model: Model, whole: Costs, cluster: Cluster, optimizer: str, microbatches: int | None) -> Alternative:
    """Stages of about equal work, in the schedule 1F1B (Narayanan et al. 2019)."""
    n = cluster.devices
    count = math.gcd(4 * n, whole.batch_size) if microbatches is None else microbatches
    if count < 1 or whole.batch_size % count:
        why = f"{count} microbatches cannot divide a batch of {whole.batch_size} examples evenly"
        return _refused("pipeline", 1, n, why)
    part = costs(model, whole.batch_size // count)
    seconds = [unit_seconds(unit, cluster) for unit in part.units]
    # Each microbatch makes gradients, which are added to those before.
    gradients = [sum(parameter.nbytes for parameter in unit.parameters) for unit in part.units]
    seconds = [
        once + cluster.fresh_seconds(nbytes) + 3 * nbytes / cluster.memory_bytes_per_second
        for once, nbytes in zip(seconds, gradients)
    ]
    # What several operators read lies in one stage, with them.
    names = [[parameter.name for parameter in unit.parameters] for unit in part.units]
    weights = keep_together(_with_followers(part.units, seconds), names)
    try:
        edges = [0, *divide(weights, n), len(seconds)]
    except ValueError:
        tied = next((name for name, count in Counter(chain(*names)).items() if count > 1), None)
        why = f"fewer than {n} operators have parameters"
        if tied is not None:
            why += f" of their own: {tied!r} is read by several, which must lie in one stage with all between them"
        return _refused("pipeline", 1, n, why)
    stages = [part.units[a:b] for a, b in pairwise(edges)]
    last_read = {read.name: place for place, unit in enumerate(part.units) for _, read in unit.activations}
    made = {w.name: (place, w.nbytes) for place, unit in enumerate(part.units) for w in unit.writes}
    made.update((tensor.name, (-1, tensor.nbytes)) for tensor in part.inputs)
    forward, backward, updates, memory = list[float](), list[float](), 0.0, 0.0
    for index, stage in enumerate(stages):
        crossing = sum(b for name, (at, b) in made.items() if at < edges[index + 1] <= last_read.get(name, -1))
        sent = 0.0 if index == n - 1 else links.send_seconds(cluster, crossing) + cluster.exchange_seconds
        nbytes = sum(parameter.nbytes for unit in stage for parameter in unit.parameters)
        ahead = sum(unit_seconds(unit, cluster) / (1 + unit.backward) for unit in stage)
        forward.append(ahead + sent)
        backward.append(sum(seconds[edges[index] : edges[index + 1]]) - ahead + sent)
        tensors = sum(len(unit.parameters) for unit in stage)
        # At the end PyTorch divides gradients by the number of microbatches.
        scaled = 2 * nbytes / cluster.memory_bytes_per_second
        updates = max(updates, scaled + optimizer_seconds(nbytes, tensors, cluster, optimizer))
        # A stage keeps what it needs for the backward pass of as many microbatches as there are stages after it.
        kept = min(n - index, count) * sum(unit.saved for unit in stage)
        memory = max(memory, nbytes * (2 + OPTIMIZERS[optimizer][0]) + kept)
    found = Alternative(
        name="pipeline",
        groups=1,
        devices=n,
        seconds=pipeline_seconds(forward, backward, count) + updates,
        memory_bytes=memory,
        starts=tuple(stage[0].name for stage in stages[1:]),
        microbatches=count,
    )
    return _judged(found, cluster)
