"""The study's main table: each scheme on each float model, against a limit of the points of accuracy it may cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cells import Cells
from evaluation import Difference, accuracy, difference
from latency import BASE, THREADS, measured, runner
from made import Facts, compressed_facts, float_facts
from recipe_files import recipe_text
from subjects import Subject

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

    Accuracies in percent of the test part. `us` and `ratio` by number of threads, of one example, to the float model.
    """

    scheme: Scheme
    model: str
    seeds: tuple[int, ...]
    before: float
    after: float
    change: Difference
    validation: float
    nbytes: tuple[int, int]
    zipped: tuple[int, int]
    flops: tuple[int, int]
    us: dict[int, float]
    ratio: dict[int, float]
    seconds: float
    recipe: str

    @property
    def reached(self) -> bool:
        return -self.change.points <= self.scheme.limit


@dataclass(frozen=True)
class Failure:
    """A scheme that gave no model."""

    scheme: Scheme
    model: str
    reason: str


def results(subjects: Sequence[Subject], cells: Cells, quick: bool) -> Iterator[Result | Failure]:
    """One for each scheme, without those that train if `quick`; `subjects` are the seeds of one model."""
    first = subjects[0]
    schemes = [scheme for scheme in SCHEMES if not (quick and scheme.trains)]
    found: dict[str, list[Facts]] = {BASE: [float_facts(subject, cells) for subject in subjects]}
    failures = []
    for scheme in schemes:
        try:
            found[scheme.name] = [compressed_facts(subject, scheme.name, cells) for subject in subjects]
        except ArchipelError as error:
            failures.append(Failure(scheme, first.name, str(error)))
    of_first = {name: facts[0] for name, facts in found.items()}
    times = {threads: _latencies(first, of_first, cells, threads, quick) for threads in THREADS}
    count = len(first.test)
    before = found.pop(BASE)
    for scheme in schemes:
        if scheme.name not in found:
            continue
        after = found[scheme.name]
        yield Result(
            scheme, first.name, tuple(subject.seed for subject in subjects),
            float(np.mean([accuracy(each["correct"], count) for each in before])),
            float(np.mean([accuracy(each["correct"], count) for each in after])),
            difference([(a["correct"], b["correct"]) for a, b in zip(before, after)], count),
            float(np.mean([each["validation"][1] - each["validation"][0] for each in after])),
            (before[0]["bytes"], after[0]["bytes"]), (before[0]["zipped"], after[0]["zipped"]),
            (before[0]["flops"], after[0]["flops"]),
            {threads: each[scheme.name]["us"] for threads, each in times.items()},
            {threads: each[scheme.name]["ratio"] for threads, each in times.items()},
            sum(each["seconds"] for each in after), recipe_text(scheme.name, first.name),
        )  # fmt: skip
    yield from failures


def _latencies(subject: Subject, made: Mapping[str, Facts], cells: Cells, threads: int, quick: bool) -> dict[str, Any]:
    example = subject.test.inputs[:1]

    def measure() -> dict[str, Any]:
        files = {name: subject.made / facts["files"][0] for name, facts in made.items()}
        return measured([runner(name, path, threads, example) for name, path in files.items()], quick)

    key = {"threads": threads, "quick": quick, "files": {name: facts["digest"] for name, facts in made.items()}}
    times: dict[str, Any] = cells.get(f"{subject.title} latency, {threads} threads", key, measure)["times"]
    return times
