"""Health gates: the evaluation that a rollout asks of a stage's devices, and whether its result is good enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

from archipel.errors import ServerError
from archipel.protocol.operator.registry import Gate
from archipel.protocol.operator.results import RoundResult
from archipel.protocol.operator.tasks import TaskRequest
from archipel.server.rounds.machine import DEADLINES


@dataclass(frozen=True)
class Verdict:
    """Whether a gate is passed; if not, `reason` says why.

    With `measured` the version itself was measured and is too bad. Otherwise the evaluation had no usable result, which
    says nothing about the version.
    """

    passed: bool
    reason: str = ""
    measured: bool = False


def check_gate(gate: Gate) -> None:
    """Raises ServerError for a gate that would let everything pass, or nothing."""
    if gate.max_loss is None and gate.worst is None:
        raise ServerError("gate: it says neither max_loss nor worst, so everything would pass")
    # Devices clamp the metric to the range, so a bound beyond it is always met, or never.
    if gate.worst is not None and abs(gate.worst) > gate.range:
        raise ServerError(f"gate: worst {gate.worst:g} is beyond the range of {gate.range:g}")
    if gate.max_devices < gate.min_devices:
        raise ServerError(f"gate: max_devices {gate.max_devices} is below min_devices {gate.min_devices}")


@dataclass(frozen=True)
class EvaluatedRound:
    """The committed round that evaluated the candidate, and how many devices are in its sum."""

    round_id: str
    devices: int


def evaluation_request(
    gate: Gate,
    *,
    name: str,
    population: str,
    bundle: str,
    weights: str | None,
    eligibility: str,
    same_devices_as: EvaluatedRound | None = None,
) -> TaskRequest:
    """The task of one round that evaluates one version; with `same_devices_as` on exactly the devices of that round.

    So a gate compares candidate and baseline on the same data, and not two samples of devices.
    """
    return TaskRequest(
        name=name,
        population=population,
        bundle=bundle,
        weights=weights,
        rounds=1,
        kind="evaluation",
        privacy=gate.privacy,
        min_cohort=gate.min_devices,
        cohort=gate.max_devices if same_devices_as is None else same_devices_as.devices,
        devices_of=None if same_devices_as is None else same_devices_as.round_id,
        program=gate.program,
        metrics={gate.metric: gate.range},
        max_examples=gate.max_examples,
        eligibility=eligibility,
        # Where a stage has fewer devices than may take part, the round begins without the others, with enough of the
        # gate's time left to measure both versions.
        deadlines={"assigning": min(DEADLINES["assigning"], gate.seconds / 4)},
    )


def judge(gate: Gate, candidate: RoundResult | None, baseline: RoundResult | None) -> Verdict | None:
    """The verdict about the results so far; None while another result is needed.

    Arguments:
        gate: A gate that `check_gate` accepts.
        candidate: The result for the rollout's version, None while there is none.
        baseline: The result for the promoted version. Only used if the gate has `max_loss`.
    """
    unusable = _check_result(gate, "candidate", candidate)
    if unusable is None and gate.max_loss is not None:
        unusable = _check_result(gate, "baseline", baseline)
    if unusable is not None:
        return unusable
    if candidate is None:
        return None
    value = candidate.metrics[gate.metric]
    # `not <=` here and below, so that a NaN never passes.
    if gate.worst is not None and not _loss(gate, value, gate.worst) <= 0:
        return Verdict(False, f"{gate.metric} is {value:.6g}, the worst allowed is {gate.worst:.6g}", measured=True)
    if gate.max_loss is None:
        return Verdict(True)
    if baseline is None:
        return None
    before = baseline.metrics[gate.metric]
    loss = _loss(gate, value, before)
    if not loss <= gate.max_loss:
        comparison = f"{gate.metric} is {value:.6g}, of the promoted version {before:.6g}: worse by {loss:.6g}"
        return Verdict(False, f"{comparison}, allowed is {gate.max_loss:.6g}", measured=True)
    return Verdict(True)


def _loss(gate: Gate, value: float, reference: float) -> float:
    """By how much `value` is worse than `reference`; negative where it is better."""
    return reference - value if gate.better == "higher" else value - reference


def _check_result(gate: Gate, which: str, result: RoundResult | None) -> Verdict | None:
    """Why a result is unusable (too few devices or examples, clamped, or no finite number); None if it is usable."""
    if result is None:
        return None
    if result.devices < gate.min_devices:
        return Verdict(False, f"{result.devices} devices evaluated the {which}, {gate.min_devices} needed")
    examples = result.examples or 0.0
    # Sums of secure rounds come in steps of the fixed-point encoding, so the number of examples is not a whole one.
    if round(examples) < gate.min_examples:
        return Verdict(False, f"the {which} was evaluated on {examples:.6g} examples, {gate.min_examples} needed")
    clamped = result.clamped.get(gate.metric, 0.0)
    if clamped:
        # A clamped value is the range's bound and no measurement, and so is a mean with such values in it.
        excess = f"{gate.metric} of the {which} was beyond the range of {gate.range:g}"
        return Verdict(False, f"{excess} on devices with {clamped:.1%} of the examples; give the gate a larger range")
    if not math.isfinite(result.metrics.get(gate.metric, math.nan)):
        return Verdict(False, f"the evaluation of the {which} has no number for {gate.metric}")
    return None
