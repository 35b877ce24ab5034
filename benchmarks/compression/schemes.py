"""The study's main table: each scheme on each float model, against a limit of the points of accuracy it may cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cells import Cells
from evaluation import Difference, accuracy, difference
from latency import BASE, THREADS, Latency, measured, runner
from made import Facts, compressed_facts, control_facts, float_facts
from recipe_files import recipe_text
from subjects import Subject
from verdict import Outcome, at_least, stricter

from archipel.errors import ArchipelError


@dataclass(frozen=True)
class Scheme:
    """`name` is that of its recipe; `limit`: points of test accuracy that it may lose."""

    name: str
    title: str
    limit: float
    trains: bool = False


SCHEMES = (
    Scheme("int8_ptq", "int8 after training", 0.5),
    Scheme("int8_qat", "int8, trained with rounding", 0.2, trains=True),
    Scheme("prune_half", "half of the FLOPs pruned", 1.0, trains=True),
    Scheme("int4_weights", "4-bit weights", 1.0),
)


@dataclass(frozen=True)
class Result:
    """One scheme on one float model, over its seeds; file sizes, FLOPs and latency are of the first seed.

    Accuracies in percent of the test part. `control`: the change against the float model that got the same training,
    of a scheme that trains, and `controlled` that model's accuracy. `latency` by number of threads, of one example.
    """

    scheme: Scheme
    model: str
    seeds: tuple[int, ...]
    before: float
    after: float
    change: Difference
    controlled: float | None
    control: Difference | None
    nbytes: tuple[int, int]
    zipped: tuple[int, int]
    flops: tuple[int, int]
    latency: dict[int, Latency]
    recipe: str

    @property
    def changes(self) -> list[Difference]:
        """Against the float model and, where there is one, against the control."""
        return [self.change, *([self.control] if self.control else [])]

    @property
    def reached(self) -> Outcome:
        """The stricter of them."""
        first, *others = (at_least(-self.scheme.limit, each.low, each.high) for each in self.changes)
        return stricter(first, *others)


@dataclass(frozen=True)
class Failure:
    """A scheme that gave no model."""

    scheme: Scheme
    model: str
    reason: str


Made = dict[str, list[Facts]]
"""By scheme, BASE for the float model and `control of SCHEME`: the facts of each seed."""


def made(subjects: Sequence[Subject], cells: Cells, quick: bool) -> tuple[Made, list[Failure]]:
    """Everything but latency; without the schemes that train if `quick`. `subjects` are the seeds of one model."""
    found: Made = {BASE: [float_facts(subject, cells) for subject in subjects]}
    failures = []
    for scheme in SCHEMES:
        if quick and scheme.trains:
            continue
        try:
            found[scheme.name] = [compressed_facts(subject, scheme.name, cells) for subject in subjects]
            if scheme.trains:
                found[_control(scheme)] = [control_facts(subject, scheme.name, cells) for subject in subjects]
        except ArchipelError as error:
            failures.append(Failure(scheme, subjects[0].name, str(error)))
    return found, failures


def results(subjects: Sequence[Subject], found: Made, times: Cells, quick: bool) -> Iterator[Result]:
    """One for each scheme that was `made`; measures latency."""
    first = subjects[0]
    files = {name: facts[0] for name, facts in found.items() if name not in map(_control, SCHEMES)}
    latency = {threads: _latencies(first, files, times, threads, quick) for threads in THREADS}
    count = len(first.test)
    before = found[BASE]
    for scheme in SCHEMES:
        if scheme.name not in found:
            continue
        after, control = found[scheme.name], found.get(_control(scheme))
        yield Result(
            scheme, first.name, tuple(subject.seed for subject in subjects),
            _mean(before, count), _mean(after, count), _change(before, after, count),
            _mean(control, count) if control else None, _change(control, after, count) if control else None,
            (before[0]["bytes"], after[0]["bytes"]), (before[0]["zipped"], after[0]["zipped"]),
            (before[0]["flops"], after[0]["flops"]),
            {threads: Latency.of(each[scheme.name]) for threads, each in latency.items()},
            recipe_text(scheme.name, first.name),
        )  # fmt: skip


def _control(scheme: Scheme) -> str:
    return f"control of {scheme.name}"


def _mean(facts: Sequence[Facts], count: int) -> float:
    return float(np.mean([accuracy(each["correct"], count) for each in facts]))


def _change(before: Sequence[Facts], after: Sequence[Facts], count: int) -> Difference:
    return difference([(a["correct"], b["correct"]) for a, b in zip(before, after)], count)


def _latencies(subject: Subject, made: Mapping[str, Facts], times: Cells, threads: int, quick: bool) -> dict[str, Any]:
    example = subject.test.inputs[:1]

    def measure() -> dict[str, Any]:
        files = {name: subject.made / facts["files"][0] for name, facts in made.items()}
        return measured([runner(name, path, threads, example) for name, path in files.items()], quick)

    key = {"threads": threads, "quick": quick, "files": {name: facts["digest"] for name, facts in made.items()}}
    found: dict[str, Any] = times.get(f"{subject.title} latency, {threads} threads", key, measure)["times"]
    return found
