"""What every benchmark shares: interleaved timing, rows, the table, and the line that says what a run was of."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = ("numpy", "onnxruntime")


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


def print_alone(benchmark: str, case: str, **measured: float) -> None:
    """Print measurements of a case that is compared with nothing: a JSON row for each unit, `peer` and `ratio` null."""
    for unit, ours in measured.items():
        # NaN, as of steps that nobody made, is no JSON.
        row = {"benchmark": benchmark, "case": case, "ours": ours if math.isfinite(ours) else None, "peer": None}
        print(json.dumps({**row, "peer_name": "", "ratio": None, "unit": unit.replace("_", " ")}), flush=True)


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions: under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object a row on standard output, nothing else")
    return parser


def state_run(as_json: bool, libraries: Iterable[str] = LIBRARIES) -> None:
    """Print one line about this run: on standard error with --json, which keeps standard output for rows alone."""
    print(describe_run(libraries), file=sys.stderr if as_json else sys.stdout, flush=True)


def describe_run(libraries: Iterable[str] = LIBRARIES) -> str:
    """Commit, date (UTC), processor, Python and the versions of `libraries` (names of distributions) on one line."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = [_commit(Path(__file__).parent), now, f"{_processor()}, {os.cpu_count()} cores"]
    parts.append(f"Python {platform.python_version()}")
    return "run: " + "; ".join(parts + [f"{name} {_version(name)}" for name in libraries])


def _commit(folder: Path) -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return f"commit {commit}" + " with changes" * bool(changed)


def _processor(told: Path = Path("/proc/cpuinfo")) -> str:
    """The model's name as Linux tells it; of x86 with family, model and stepping, for several share a name."""
    if not told.exists():
        return platform.processor() or platform.machine()
    first = dict(
        (part.strip() for part in line.split(":", 1)) for line in told.read_text().split("\n\n")[0].splitlines()
    )
    name = first.get("model name") or platform.machine()
    numbers = [
        f"{key.removeprefix('cpu ')} {first[key]}" for key in ("cpu family", "model", "stepping") if key in first
    ]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


KEPT_MEMORY = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 32))
"""Environment of a process whose C library keeps what is freed. By default it gives large tensors back to the system,
which then clears their pages for the next step: PyTorch was up to a quarter slower so."""


def keep_memory() -> None:
    """Start this program again with KEPT_MEMORY, unless it has it already."""
    if not KEPT_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEPT_MEMORY)


def least_work(run: Callable[[], object], runs: int) -> float:
    """Milliseconds of processor time of the fastest of several runs: other work on the machine only adds to it."""
    times = []
    for _ in range(runs):
        started = time.process_time()
        run()
        times.append((time.process_time() - started) * 1e3)
    return min(times)


PAUSE = 0.1
"""Seconds between two engines' turns: the threads of an engine look for more work after a call, PyTorch's for up to 10
ms, ONNX Runtime's by default for 2^20 turns of a busy loop (26 ms measured, more where a turn takes longer), and take
the processor from whoever comes next: two threads were no faster than one for whoever came behind ONNX Runtime."""

TURN = 0.002
"""Seconds of a turn: one call of what takes longer, up to 25 of what takes less."""


def interleave(
    runs: Mapping[str, Callable[[], object]],
    seconds: float,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time each callable round after round, for about `seconds` each. Milliseconds a call by `clock`, by name.

    Machines have slow phases; in a round all see the same one. Before its turn each rests for PAUSE and is called once
    without being timed, so that the others' threads sleep and its own are awake. Its time of the round is the median of
    the calls that fit into TURN.
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
            calls: list[float] = []
            while sum(calls) < TURN * 1e3 and len(calls) < 25:
                started = clock()
                run()
                calls.append((clock() - started) * 1e3)
            times[name].append(statistics.median(calls))
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
    """Prints the run, then rows as they come: a table for people, JSON lines for programs."""

    def __init__(self, as_json: bool, libraries: Iterable[str] = LIBRARIES) -> None:
        self._json = as_json
        state_run(as_json, libraries)
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
