"""PruneChannels: structured pruning by a share of the channels, the FLOPs, the bytes or the latency."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from archipel.compression.arguments import check_choices, check_whole
from archipel.compression.fine_tune import FineTune
from archipel.compression.latency import latencies
from archipel.compression.layer_weights import find_mask, refuse_quantized
from archipel.compression.part import Need
from archipel.compression.prune.dependency import ChannelGroup, channel_groups, fixed_channels
from archipel.compression.prune.importance import Criterion, magnitudes, taylor
from archipel.compression.prune.removal import remove_channels
from archipel.errors import CompressionError
from archipel.graph import Model, check_model
from archipel.graph.flops import flops_per_example, network_flops_per_example

if TYPE_CHECKING:
    from archipel.compression.compressed import CompressedModel
    from archipel.compression.work import Work

Scope = Literal["global", "layer"]
Drop = dict[str, np.ndarray]
_GOALS = ("ratio", "flops", "size", "latency")
_STEPS = 1000  # how finely a share of each layer is searched


@dataclass(frozen=True)
class PruneChannels:
    """Remove the least important channels, hidden units and attention heads from the graph.

        compress(model, [PruneChannels(flops=0.5, fine_tune=FineTune(epochs=2))], data=(images, labels))

    Arguments:
        ratio, flops, size, latency: exactly one, the share that is removed (0.5: half) of the units that are not
            excluded, of FLOPs, of the parameters' bytes, or of the measured time for one example on one thread.
        criterion: the importance of a unit: "taylor" (needs labelled data), or by its weights, "l1" or "l2".
        scope: "global" ranks all units together ("taylor": importance per cost), "layer" removes the same share of
            each layer.
        iterations: in how many equal steps to prune; `fine_tune` trains after each.
        exclude: globs of names of weights whose channels stay.
        keep: the least share of each layer's units that stays.
        round_to: layers keep a multiple of so many channels; layers with fewer than twice as many stay as they are.
            ONNX Runtime's blocked convolutions need multiples of 4 (on one x86-64 machine 30 channels took 1.8 times as
            long as 32).
        examples: how many training examples "taylor" reads.
        fine_tune: training after each iteration; None: none.

    Raises CompressionError for a field out of range; from `apply` where the goal cannot be reached, nothing can be
    removed, or the model has masks or is quantized.

    Example:
        faster, report = archipel.compress(model, [PruneChannels(ratio=0.5, examples=256)], data=data)
    """

    ratio: float | None = None
    flops: float | None = None
    size: float | None = None
    latency: float | None = None
    criterion: Criterion = "taylor"
    scope: Scope = "global"
    iterations: int = 1
    exclude: tuple[str, ...] = ()
    keep: float = 0.1
    round_to: int = 4
    examples: int = 1024
    fine_tune: FineTune | None = None

    def __post_init__(self) -> None:
        given = [name for name in _GOALS if getattr(self, name) is not None]
        if len(given) != 1:
            raise CompressionError(
                f"PruneChannels: give exactly one of {', '.join(_GOALS)}, got {', '.join(given) or 'none'}"
            )
        if not 0 < self._share < 1:
            raise CompressionError(f"PruneChannels: {given[0]} must lie between 0 and 1, is {self._share!r}")
        check_choices(self, criterion=get_args(Criterion), scope=get_args(Scope))
        check_whole(self, "iterations", "round_to", "examples")
        if not 0 <= self.keep <= 1:
            raise CompressionError(f"PruneChannels: keep must lie between 0 and 1, is {self.keep!r}")

    @property
    def _goal(self) -> str:
        return next(name for name in _GOALS if getattr(self, name) is not None)

    @property
    def _share(self) -> float:
        share: float = getattr(self, self._goal)
        return share

    @property
    def needs(self) -> tuple[Need, ...]:
        trains = self.criterion == "taylor" or self.fine_tune is not None
        data: tuple[Need, ...] = ("data",) if trains else ()
        return (*data, "calibration") if self._goal == "latency" else data

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        _refuse_changed(model)
        units = {group.name: group.size for group in self._groups(model)}
        measure = self._measure(model, units, work)
        before = measure(model)
        result = model
        for iteration in range(1, self.iterations + 1):
            # Of the original measure, and limits by the original units: iterations do not compound.
            target = before * (1 - self._share * iteration / self.iterations)
            groups = self._groups(result)
            scores = self._scores(result, groups, work)
            drop = self._plan(result, groups, units, scores, measure, target)
            result = remove_channels(result, drop)
            work.progress(iteration, self.iterations, "pruning channels")
            if self.fine_tune is not None:
                result = work.train(result, self.fine_tune)
        check_model(result.ir)
        sizes = _sizes(result)
        work.note(
            goal=self._goal,
            before=before,
            after=measure(result),
            flops={"before": flops_per_example(model), "after": flops_per_example(result)},
            parameter_bytes={"before": parameter_bytes(model), "after": parameter_bytes(result)},
            units={name: {"before": size, "after": sizes.get(name, 1)} for name, size in units.items()},
            fixed=fixed_channels(model),
        )
        return result

    def _measure(self, model: CompressedModel, units: dict[str, int], work: Work) -> Callable[[CompressedModel], float]:
        if self._goal == "flops":
            return network_flops_per_example
        if self._goal == "size":
            return parameter_bytes
        if self._goal == "ratio":
            return lambda pruned: _count_units(pruned, units)
        feed = dict(work.need_calibration(self).take(slice(0, 1)).fields)
        original = model.deployed()
        whole = latencies([original], feed)[0] / 1e3

        def milliseconds(pruned: CompressedModel) -> float:
            # In turns with the original: the machine may be slower, or faster, than when that was measured.
            before, after = latencies([original, pruned.deployed()], feed)
            return whole * after / before

        return milliseconds

    def _groups(self, model: Model) -> list[ChannelGroup]:
        groups = channel_groups(model)
        weights = {m.tensor for group in groups for m in group.members if m.role == "weight"}
        for pattern in self.exclude:
            if not any(_matches(name, pattern) for name in model.parameter_names):
                raise CompressionError(
                    f"PruneChannels: exclude {pattern!r} matches no parameter; channels are made by: "
                    f"{', '.join(sorted(weights))}"
                )
        chosen = [
            group
            for group in groups
            if not any(_matches(m.tensor, p) for m in group.members if m.role == "weight" for p in self.exclude)
        ]
        if not chosen:
            reasons = "; ".join(f"{name}: {why}" for name, why in fixed_channels(model).items())
            raise CompressionError(f"PruneChannels: the model has no channels that can be removed ({reasons})")
        return chosen

    def _scores(self, model: CompressedModel, groups: list[ChannelGroup], work: Work) -> dict[str, np.ndarray]:
        if self.criterion != "taylor":
            return magnitudes(model, groups, self.criterion)
        data = work.need_data(self)
        rows = np.sort(np.random.default_rng(work.seed).permutation(len(data))[: self.examples])
        return taylor(model, groups, work.loss, data.take(rows))

    def _plan(
        self,
        model: CompressedModel,
        groups: list[ChannelGroup],
        units: dict[str, int],
        scores: dict[str, np.ndarray],
        measure: Callable[[CompressedModel], float],
        target: float,
    ) -> Drop:
        """The fewest of the least important units without which `measure` is at most `target`.

        `units` are the sizes of the groups before the first iteration.
        """
        order = {group.name: np.argsort(scores[group.name], kind="stable") for group in groups}
        # Taylor importance, a change of the loss, can be divided by a cost; norms cannot. FLOPs stand in for latency,
        # which is too noisy to show a single unit.
        if self._goal != "ratio" and self.criterion == "taylor":
            scores = _per_cost(model, groups, scores, flops_per_example if self._goal == "latency" else measure)
        # A step is a number of units, or a thousandth of each layer: the more steps, the more goes, so that bisection
        # finds the fewest that reach the target.
        limits = {group.name: group.size - max(1, math.ceil(self.keep * units[group.name])) for group in groups}
        ranking = self._ranking(groups, scores)
        steps = _STEPS if self.scope == "layer" else len(ranking)

        def counts(step: int) -> dict[str, int]:
            if self.scope == "layer":
                wanted = [round(step / _STEPS * group.size) for group in groups]
            else:
                wanted = np.bincount(ranking[:step], minlength=len(groups)).tolist()
            capped = (min(count, limits[group.name]) for group, count in zip(groups, wanted))
            return {group.name: _round_count(group, count, self.round_to) for group, count in zip(groups, capped)}

        def least_important(chosen: dict[str, int]) -> Drop:
            return {name: np.sort(order[name][:count]) for name, count in chosen.items() if count > 0}

        def measure_without(chosen: dict[str, int]) -> float:
            return measure(remove_channels(model, least_important(chosen)))

        low, high = 0, steps
        if (least := measure_without(counts(high))) > target:
            raise CompressionError(
                f"PruneChannels: {self._goal}={self._share:g} cannot be reached: with keep={self.keep:g} and "
                f"round_to={self.round_to} {least:.4g} is left where {target:.4g} was asked for; lower keep or "
                "round_to, or exclude less"
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if measure_without(counts(middle)) <= target else (middle, high)
        removed = counts(high)
        # Units go in blocks, so the last step may have removed too much. Blocks come back where the target allows it,
        # the most important ones first.
        pruned_groups = [group for group in groups if removed[group.name]]
        for group in sorted(pruned_groups, key=lambda g: -scores[g.name][order[g.name][removed[g.name] - 1]]):
            fewer = {**removed, group.name: max(removed[group.name] - _block(group, self.round_to), 0)}
            if measure_without(fewer) <= target:
                removed = fewer
        return least_important(removed)

    def _ranking(self, groups: list[ChannelGroup], scores: dict[str, np.ndarray]) -> np.ndarray:
        """The groups' numbers in the order in which their units go."""
        owner = np.repeat(np.arange(len(groups)), [group.size for group in groups])
        return owner[np.argsort(np.concatenate([np.sort(scores[group.name]) for group in groups]), kind="stable")]


def _per_cost(
    model: CompressedModel,
    groups: list[ChannelGroup],
    scores: dict[str, np.ndarray],
    cost: Callable[[CompressedModel], float],
) -> dict[str, np.ndarray]:
    """Importance divided by what a unit of the group costs: units that save much and matter little go first."""
    total = cost(model)
    per_cost = {}
    for group in groups:
        # All units of a group cost the same.
        saved = total - cost(remove_channels(model, {group.name: [0]}))
        per_cost[group.name] = scores[group.name] / max(saved, np.finfo(np.float64).tiny)
    return per_cost


def parameter_bytes(model: Model) -> int:
    """Bytes of the parameters."""
    return sum(array.nbytes for array in model.parameters.values())


def _count_units(model: Model, units: dict[str, int]) -> int:
    """How many units these groups have in a pruned model. A group with a single unit left is no group any more."""
    sizes = _sizes(model)
    return sum(sizes.get(name, 1) for name in units)


def _sizes(model: Model) -> dict[str, int]:
    return {group.name: group.size for group in channel_groups(model)}


def _round_count(group: ChannelGroup, count: int, multiple: int) -> int:
    """At most `count` units of the group, as many as leave a multiple of `multiple` channels."""
    if group.size * group.granularity < 2 * multiple:
        return count if multiple == 1 else 0
    # Rounds what is left up, so never removes more than `count`.
    left, step = group.size - count, _block(group, multiple)
    return max(group.size - -(-left // step) * step, 0)


def _block(group: ChannelGroup, multiple: int) -> int:
    """The least number of units whose channels are a multiple of `multiple`."""
    return multiple // math.gcd(multiple, group.granularity)


def _refuse_changed(model: CompressedModel) -> None:
    """Raise CompressionError for masks and rounding, which removing channels would not keep."""
    refuse_quantized(model, "PruneChannels")
    names = set(model.parameter_names)
    for name in names:
        if find_mask(model.ir.graph.initializers[name], names) is not None:
            raise CompressionError(
                f"PruneChannels: {name!r} has a mask already; put PruneChannels before the parts that mask weights"
            )


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)
