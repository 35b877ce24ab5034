"""What every benchmark shares: interleaved timing, rows, the table."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One comparison; `ratio` = ours / peer, so below 1 is better for times and bytes."""

    benchmark: str
    case: str
    ours: float
    peer: float
    peer_name: str
    ratio: float
    unit: str


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions: under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object a row on standard output, nothing else")
    return parser


PAUSE = 0.003
"""Seconds between two engines' turns: the threads of an engine look for more work for up to a few milliseconds after a
call, and would take the processor from whoever comes next."""


def interleave(runs: Mapping[str, Callable[[], object]], seconds: float, warmup: int = 3) -> dict[str, list[float]]:
    """Time each callable once a round, round after round, for about `seconds` each. Milliseconds a call, by name.

    Machines have slow phases; in a round all see the same one. Before its turn each rests for PAUSE and is called once
    without being timed, so that the others' threads sleep and its own are awake.
    """
    for run in runs.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, run in runs.items():
            time.sleep(PAUSE)
            run()
            started = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - started) * 1e3)
    return times


def compare(benchmark: str, case: str, ours: str, times: Mapping[str, list[float]], unit: str = "ms") -> list[Row]:
    """Rows of `ours` against every other: medians, and the median of the rounds' ratios."""
    return [
        Row(
            benchmark,
            case,
            statistics.median(times[ours]),
            statistics.median(values),
            name,
            statistics.median(a / b for a, b in zip(times[ours], values)),
            unit,
        )
        for name, values in times.items()
        if name != ours
    ]


class Report:
    """Prints rows as they come: a table for people, JSON lines for programs."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        if not as_json:
            print(f"{'case':<28}{'ours':>10}{'peer':>10}{'ratio':>8}  unit  peer")

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if self._json:
                print(json.dumps(asdict(row)))
            else:
                print(
                    f"{row.case:<28}{row.ours:>10.3f}{row.peer:>10.3f}{row.ratio:>8.2f}  {row.unit:<4}  {row.peer_name}"
                )
        sys.stdout.flush()
