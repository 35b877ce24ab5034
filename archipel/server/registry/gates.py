"""Health gates: what is asked of a stage's devices, and whether what they found lets a rollout go on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from archipel.errors import ServerError
from archipel.protocol.operator.registry import Gate
from archipel.protocol.operator.tasks import RoundResult, TaskRequest


@dataclass(frozen=True)
class Verdict:
    """`reason` is empty where the gate is passed. With `measured` it is the version that was found wanting, and not the
    evaluation that came to nothing."""

    passed: bool
    reason: str = ""
    measured: bool = False


def check_gate(gate: Gate) -> None:
    """Raises ServerError for a gate that would let everything pass, or nothing."""
    if gate.max_loss is None and gate.worst is None:
        raise ServerError("gate: it says neither max_loss nor worst, so everything would pass")
    if gate.worst is not None and abs(gate.worst) > gate.range:
        raise ServerError(f"gate: worst {gate.worst:g} is beyond the range of {gate.range:g}")
    if gate.max_devices < gate.min_devices:
        raise ServerError(f"gate: max_devices {gate.max_devices} is below min_devices {gate.min_devices}")


@dataclass(frozen=True)
class Heard:
    """The round that evaluated the candidate, and how many devices are in its sum."""

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
    heard: Heard | None = None,
) -> TaskRequest:
    """The task that evaluates one version, of one round; with `heard` on the same devices."""
    return TaskRequest(
        name=name,
        population=population,
        bundle=bundle,
        weights=weights,
        rounds=1,
        kind="evaluation",
        privacy=gate.privacy,
        min_cohort=gate.min_devices,
        cohort=gate.max_devices if heard is None else heard.devices,
        devices_of=None if heard is None else heard.round_id,
        program=gate.program,
        metrics={gate.metric: gate.range},
        max_examples=gate.max_examples,
        eligibility=eligibility,
    )


def judge(gate: Gate, candidate: RoundResult | None, baseline: RoundResult | None) -> Verdict | None:
    """What the results say that are there already; None: another one has to be waited for.

    `baseline` is only looked at where the gate compares with it.
    """
    found = _found_wanting(gate, "candidate", candidate)
    if found is None and gate.max_loss is not None:
        found = _found_wanting(gate, "baseline", baseline)
    if found is not None:
        return found
    if candidate is None:
        return None
    value = candidate.metrics[gate.metric]
    if gate.worst is not None and not _loss(gate, value, gate.worst) <= 0:
        return Verdict(False, f"{gate.metric} is {value:.6g}, the worst allowed is {gate.worst:.6g}", measured=True)
    if gate.max_loss is None:
        return Verdict(True)
    if baseline is None:
        return None
    before = baseline.metrics[gate.metric]
    loss = _loss(gate, value, before)
    if not loss <= gate.max_loss:
        said = f"{gate.metric} is {value:.6g}, of the promoted version {before:.6g}: worse by {loss:.6g}"
        return Verdict(False, f"{said}, allowed is {gate.max_loss:.6g}", measured=True)
    return Verdict(True)


def _loss(gate: Gate, value: float, reference: float) -> float:
    """By how much `value` is worse than `reference`; negative where it is better."""
    return reference - value if gate.better == "higher" else value - reference


def _found_wanting(gate: Gate, which: str, result: RoundResult | None) -> Verdict | None:
    """A result that says too little: of too few devices or examples, or without a number."""
    if result is None:
        return None
    if result.devices < gate.min_devices:
        return Verdict(False, f"{result.devices} devices evaluated the {which}, {gate.min_devices} needed")
    examples = result.examples or 0.0
    # Sums of secure rounds come in steps of the fixed-point encoding: not a whole number of examples.
    if round(examples) < gate.min_examples:
        return Verdict(False, f"the {which} was evaluated on {examples:.6g} examples, {gate.min_examples} needed")
    clamped = result.clamped.get(gate.metric, 0.0)
    if clamped:
        said = f"{gate.metric} of the {which} was beyond the range of {gate.range:g}"
        return Verdict(False, f"{said} on devices with {clamped:.1%} of the examples; give the gate a larger range")
    if not math.isfinite(result.metrics.get(gate.metric, math.nan)):
        return Verdict(False, f"the evaluation of the {which} has no number for {gate.metric}")
    return None
