"""The comparison of two versions of a model on the device's own examples: may the new one replace the running one?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from archipel.bundle import Bundle, Program
from archipel.bundle.roles import Label
from archipel.client.device import Device
from archipel.client.rounds.work import draw_examples, open_limited, state_name
from archipel.errors import ArchipelError, ClientError, RoundAbandonedError
from archipel.lite_runtime.training.driver import find_program, need_program
from archipel.protocol.metrics.measures import ACCURACY, measured, measures

LOSS = "loss"
MAX_EXAMPLES = 10_000
"""The most examples for a comparison; of more, a sample is drawn, the same for both versions."""


class ExamplesError(ClientError):
    """The device's examples cannot be read, which says nothing about the version."""


@dataclass(frozen=True)
class Content:
    """A version. `learned` has the tensors that replace those of the bundle (Runtime.restore)."""

    version: int
    bundle: Bundle
    learned: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """Whether to adopt the new version, and why. `values` are those of `metric`, of the new version and of the running
    one; empty if nothing was measured."""

    adopt: bool
    reason: str
    metric: str = ""
    values: tuple[float, ...] = ()


def compare(device: Device, publisher_keys: Sequence[bytes], new: Content, running: Content) -> Verdict:
    """Evaluate both versions with the device's personal tensors on the same examples, and compare loss or accuracy.

    Raises ExamplesError if `device.examples` raises an ArchipelError or OSError (its other errors pass through), what
    evaluating the new version raises, and RoundAbandonedError if the device may not work any more.
    """
    name = find_program(new.bundle, "evaluate")
    if name is None:
        return Verdict(True, "after the self-test alone: its bundle has no evaluate program")
    program = new.bundle.program(name)
    # The loss if both versions have it, else the accuracy if both have that, else what the new one has.
    metrics = [name for name in (LOSS, ACCURACY) if name in measures(program)]
    shared = [name for name in metrics if name in _measures(running)]
    metric = next(iter(shared or metrics), "")
    if not metric:
        return Verdict(True, f"after the self-test alone: it measures neither {LOSS} nor {ACCURACY}")
    try:
        fields = draw_examples(device.examples(), MAX_EXAMPLES, seed=0)
    except (ArchipelError, OSError) as error:
        raise ExamplesError(f"not compared, the examples cannot be read: {error}") from error
    if not _has_labels(program, fields):
        return Verdict(True, "after the self-test alone: there are no labelled examples on this device")
    # The new version first: if it cannot be evaluated, that decides already.
    value = _evaluate(device, publisher_keys, new, fields).get(metric, math.nan)
    device.gate.pass_or_wait()
    try:
        before = _evaluate(device, publisher_keys, running, fields).get(metric, math.nan)
    except RoundAbandonedError:
        raise
    except ArchipelError as error:
        # The new version works here and the running one fails, which is a reason to adopt.
        before, why = math.nan, f" ({error})"
    else:
        why = ""
    values = (value, before)
    if not math.isfinite(value):
        return Verdict(False, f"{metric} is {value:g}, expected a finite number", metric, values)
    if not math.isfinite(before):
        return Verdict(True, f"version {running.version} has no {metric} here{why}", metric, values)
    # Relative to the running version's value, so that one setting serves losses of any scale.
    worse = (before - value if metric == ACCURACY else value - before) - device.config.max_worse * abs(before)
    comparison = f"{metric} {value:.6g} on this device, of version {running.version} {before:.6g}"
    if worse > 0:
        return Verdict(False, f"{comparison}: worse by more than {device.config.max_worse:g} of that", metric, values)
    return Verdict(True, comparison, metric, values)


def _measures(content: Content) -> Collection[str]:
    name = find_program(content.bundle, "evaluate")
    return () if name is None else measures(content.bundle.program(name))


def _has_labels(program: Program, fields: Mapping[str, np.ndarray]) -> bool:
    labels = [port.name for port in program.inputs if isinstance(port, Label)]
    return any(len(array) for array in fields.values()) and all(len(fields.get(name, ())) for name in labels)


def _evaluate(
    device: Device, publisher_keys: Sequence[bytes], content: Content, fields: Mapping[str, np.ndarray]
) -> Mapping[str, float]:
    program = content.bundle.program(need_program(content.bundle, "evaluate", "be compared"))
    state = device.state(state_name(content.bundle))
    with open_limited(content.bundle, publisher_keys, device.config, state, device.starter) as runtime:
        runtime.restore(content.learned)
        count = max(len(array) for array in fields.values())
        return measured(program, runtime.evaluate(fields), count).values
