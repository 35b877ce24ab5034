"""A task's rounds as lines while they happen: a line for what is news, and one for how it stands now."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import islice

from archipel.cli.input_output.distributions import describe_distribution
from archipel.cli.input_output.remote import metrics_line
from archipel.cli.input_output.tables import one_line
from archipel.protocol.operator.progress import DONE, ModelPlace, PhaseProgress, RoundProgress, TaskProgress

SLOW_SECONDS = 10.0
"""A wait or a phase that takes so long is worth a line."""
SHOWN_DEVICES = 3
"""So many missing devices of a round are named."""
EARLIER_ROUNDS = 3
"""So many rounds that had ended before are told of at first."""
_RUNNING = ("proposed", "running", "paused")


class WatchLines:
    """What to print of a task that is asked again and again. Each piece of news comes once, in the order of time."""

    def __init__(self) -> None:
        self._first = True
        self._begun: set[str] = set()
        self._told: set[str] = set()
        self._evaluated: set[str] = set()
        self._slow: set[str] = set()
        self._waits, self._waits_since = "", 0.0
        self._state = ""
        self._spoiled = 0
        self._failed: dict[str, int] = {}

    def news(self, now: TaskProgress) -> Iterator[str]:
        """The lines of what has happened since the last call."""
        yield from map(one_line, self._news(now))

    def _news(self, now: TaskProgress) -> Iterator[str]:
        ended = list(reversed(now.newest))
        if self._first:
            yield (
                f"{now.name}: {now.kind} over {now.population}, {now.privacy}, {now.rounds_committed} of {now.rounds} "
                f"rounds{'' if now.ended is None else f', {now.state}'}"
            )
            told, ended = ended[:-EARLIER_ROUNDS], ended[-EARLIER_ROUNDS:]
            self._told |= {each.round_id for each in told}
            if now.rounds_committed > EARLIER_ROUNDS and told:
                yield f"earlier rounds: archipel round list {now.task_id}"
        for each in ended:
            if each.round_id not in self._told:
                self._told.add(each.round_id)
                yield from self._ended(each)
            if each.evaluation_state in ("completed", "failed", "cancelled") and each.round_id not in self._evaluated:
                self._evaluated.add(each.round_id)
                yield _evaluation(each)
        for each in now.running:
            if each.assigned and each.round_id not in self._begun:
                self._begun.add(each.round_id)
                yield f"round {each.number}: began {clock(each.started)}, {count(each.assigned, 'device')} assigned"
            elif each.round_id not in self._slow and is_slow(each):
                self._slow.add(each.round_id)
                yield f"round {each.number}: {phase_line(each)}"
        if now.spoiled_rounds > self._spoiled:
            yield f"{now.spoiled_rounds} rounds spoiled since the last good one: {now.search}"
        self._spoiled = now.spoiled_rounds
        yield from self._waiting(now)
        if now.state != self._state and not self._first and now.ended is None:
            yield f"the task is {now.state}"
        self._first, self._state = False, now.state

    def _ended(self, each: RoundProgress) -> Iterator[str]:
        if each.outcome == "committed":
            yield f"round {each.number}: {_committed(each)}"
        else:
            said = ", ".join(f"{reason} {number}" for reason, number in sorted(each.refused.items()))
            yield (
                f"round {each.number}: {each.outcome} after {each.seconds:.1f} s: {each.reason}"
                + (f" (devices said: {said})" if said else "")
            )
        if each.missing:
            yield f"  missing {each.missing} of {each.assigned}: {missing_line(each)}"
        faulty = ", ".join(f"{fault.device_id[:8]}: {fault.reason}" for fault in islice(each.faults, SHOWN_DEVICES))
        if faulty or each.set_aside:
            aside = f"; set aside: {', '.join(name[:8] for name in each.set_aside[:SHOWN_DEVICES])}"
            yield f"  faults: {faulty or 'none of one device'}{aside if each.set_aside else ''}"
        for device in each.missing_devices:
            self._failed[device.reason] = self._failed.get(device.reason, 0) + 1
        if each.missing > len(each.missing_devices):
            more = each.missing - len(each.missing_devices)
            self._failed["not told"] = self._failed.get("not told", 0) + more

    def _waiting(self, now: TaskProgress) -> Iterator[str]:
        # Numbers do not count: they change whenever a device comes or goes.
        waits, at = re.sub(r"[0-9]+", "", now.waiting_for), time.monotonic()
        if waits != self._waits:
            self._waits, self._waits_since = waits, at
        elif not self._first and not (waits and at - self._waits_since >= SLOW_SECONDS):
            return
        if now.waiting_for and (self._first or at - self._waits_since >= SLOW_SECONDS):
            self._waits_since = float("inf")
            yield f"waits: {now.waiting_for}"

    def end(self, now: TaskProgress) -> Iterator[str]:
        """The lines for a task that has ended: how, who failed in how many rounds, and where the model is."""
        yield from map(one_line, self._end(now))

    def _end(self, now: TaskProgress) -> Iterator[str]:
        seconds = (now.ended or now.now) - now.created
        why = f": {now.reason}" if now.reason else ""
        yield f"{now.state}: {now.rounds_committed} of {now.rounds} rounds in {seconds:.0f} s{why}"
        if self._failed:
            told = ", ".join(f"{reason} ({number} times)" for reason, number in sorted(self._failed.items()))
            yield f"devices that failed: {told}"
        if now.model is not None:
            yield f"model: {model_line(now.model, now.task_id)}"


def status(now: TaskProgress) -> str:
    """How it stands, in one line for a terminal."""
    if not now.running:
        return f"{now.rounds_committed} of {now.rounds} rounds; {now.waiting_for or now.state}"
    first = now.running[0]
    more = f" (and {len(now.running) - 1} more)" if len(now.running) > 1 else ""
    return f"round {first.number}, {first.seconds:.0f} s: {phase_line(first)}{more}"


def is_slow(current: RoundProgress) -> bool:
    """Whether the round's present phase takes long."""
    last = current.phases[-1] if current.phases else None
    return last is not None and (last.seconds or 0.0) >= SLOW_SECONDS


def phase_line(current: RoundProgress) -> str:
    """The present phase of a round that runs: since when, who is there, and until when."""
    last = current.phases[-1] if current.phases else None
    took = f" for {last.seconds:.0f} s" if last is not None and last.seconds is not None else ""
    return f"{current.phase}{took}{step_text(last)}, until {clock(current.phase_ends)}"


def step_text(step: PhaseProgress | None) -> str:
    """How many devices have done what a phase asks for, such as ", 7 of 10 masked"."""
    if step is None or step.answered is None:
        return ""
    return f", {step.answered} of {step.expected} {DONE[step.phase]}"


def missing_line(each: RoundProgress) -> str:
    """The first missing devices: how far each came, when, and why it is missing."""
    told = [
        f"{device.device_id[:8]} {DONE[device.furthest]}"
        + ("" if device.answered is None else f" {clock(device.answered)}")
        + f", {device.reason}"
        for device in each.missing_devices[:SHOWN_DEVICES]
    ]
    more = each.missing - len(told)
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def model_line(model: ModelPlace, task_id: str) -> str:
    """Where the model is, and the command that downloads it."""
    size = "" if model.bytes is None else f", {size_text(model.bytes)}"
    named = "".join(
        f", version {each.version} of {each.model}{' (promoted)' if each.promoted else ''}" for each in model.registered
    )
    if model.deleted is not None:
        return f"weights {model.weights[:12]} of round {model.number}{named}: deleted {clock(model.deleted)}"
    where = f"archipel task download {task_id} FILE"
    return f"weights {model.weights[:12]} of round {model.number}{size}{named}: {where}"


def size_text(size: int) -> str:
    """Bytes with a unit of 1000s, such as "1.2 MB"."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{size} B" if units[0] == "B" else f"{value:.3g} {units[0]}"


def clock(seconds: float) -> str:
    """Unix seconds as the time of the day in UTC."""
    return time.strftime("%H:%M:%SZ", time.gmtime(seconds))


def count(number: int, what: str) -> str:
    """A number of things, with an s where it is not one."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _committed(each: RoundProgress) -> str:
    parts = [f"committed in {each.seconds:.1f} s", f"{each.in_sum} of {count(each.assigned, 'device')} in the sum"]
    down = "" if each.bytes_down is None else f" and {size_text(each.bytes_down)} down"
    parts.append(f"{size_text(each.bytes_up)} up{down}")
    own = {name: value for name, value in each.metrics.items() if not _is_of_evaluation(each, name)}
    if own:
        parts.append(metrics_line(own, each.clamped))
    if each.clipped is not None:
        parts.append(f"{each.clipped} clipped")
    if each.evaluation_state is None:
        parts += _spreads(each)
    return ", ".join(parts) + (f" ({each.reason})" if each.reason else "")


def _is_of_evaluation(each: RoundProgress, name: str) -> bool:
    """Whether the metric is of the evaluation of the version, and not of the round itself."""
    return each.evaluation_state is not None and name.startswith("evaluation ")


def _spreads(each: RoundProgress) -> list[str]:
    found = sorted(each.distributions.items())
    return [f"{name} over the devices: {describe_distribution(spread)}" for name, spread in found]


def _evaluation(each: RoundProgress) -> str:
    means = {name: value for name, value in each.metrics.items() if name.startswith("evaluation ")}
    if not means:
        return f"  version {each.number}: not evaluated, its evaluation is {each.evaluation_state}"
    spread = "; ".join(["", *_spreads(each)])
    return f"  version {each.number}: {metrics_line(means, {})}{spread}"
