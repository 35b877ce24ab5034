"""Run the test suite room by room and print the seconds of each and what failed.

`--all` adds the long suites, the coverage of all rooms together, and the mutations at the end. Nothing that fails stops
the rest, and a room that never ends is stopped.

Two rooms run at a time: one of those that mostly wait for other processes, and one of those that mostly compute, as
long as there are both.
Measuring coverage doubles the time of rooms that are busy in Python, so the short suite goes without. A room is a
folder in tests/ with test files of its own, as tests/graph and tests/graph/passes. It has 75 seconds; one that takes
longer is named, so that it gets split or sped up.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
BUDGET_SECONDS = 75
LIMIT_SECONDS = {False: 900, True: 6 * 3600}
"""After which a room counts as hanging, in the short and in the long suite."""
NO_TESTS_COLLECTED = 5
WAITING = {
    "browser",
    "cli",
    "client",
    "docs",
    "end_to_end",
    "examples",
    "install",
    "lite_runtime",
    "server",
    "web",
    "web_library",
}
SHOWING = threading.Lock()
SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|error)")


@dataclass(frozen=True, order=True)
class Row:
    """What became of a room. `failures` are pytest's lines of tests that failed."""

    room: str
    seconds: float
    passed: bool
    failures: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the long suites too, without the time budget; mutations")
    parser.add_argument("rooms", nargs="*", help="rooms to run; all by default")
    options = parser.parse_args()
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    rooms = options.rooms or sorted(map(str, folders))
    for stale in ROOT.glob(".coverage*"):
        stale.unlink()
    counts: dict[str, int] = {}
    lanes = [[room for room in rooms if (room.split(os.sep)[0] in WAITING) == waits] for waits in (True, False)]
    started = time.monotonic()
    waiting, computing = map(deque, lanes)
    with ThreadPoolExecutor(len(lanes)) as pool:
        done = pool.map(
            lambda pair: [run_room(room, options.all, counts) for room in taken(*pair)],
            ((waiting, computing), (computing, waiting)),
        )
        rows = sorted(row for lane in done for row in lane)
    whole = time.monotonic() - started
    if options.all:
        subprocess.run([sys.executable, "-m", "coverage", "combine", "--quiet"], cwd=ROOT, check=False)
        report = ["report", "--skip-covered", "--skip-empty", "--sort=cover"]
        subprocess.run([sys.executable, "-m", "coverage", *report], cwd=ROOT, check=False)
        rows.append(run_mutants())
    show(rows, whole, None if options.all else BUDGET_SECONDS)
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    print(f"{passed} passed, {failed} failed, {counts.get('skipped', 0)} skipped")
    return 0 if passed and all(row.passed for row in rows) else 1


def show(rows: list[Row], whole: float, budget: float | None) -> None:
    """The table; `whole` is the seconds of all rooms, which ran two at a time."""
    print("\nseconds per room, two at a time")
    for row in rows:
        late = f"  over its {budget} s" if budget is not None and row.seconds > budget else ""
        print(f"  {row.room:<22}{row.seconds:7.1f}{'' if row.passed else '  FAILED'}{late}")
        for line in row.failures:
            print(f"      {line}")
    print(f"  {'all rooms':<22}{whole:7.1f}\n")


def taken(own: deque[str], others: deque[str]) -> Iterator[str]:
    """Rooms of the lane's own, and when there are none left those at the other's end."""
    while True:
        try:
            yield own.popleft() if own else others.pop()
        except IndexError:  # both are empty
            return


def run_room(room: str, slow: bool, counts: dict[str, int]) -> Row:
    """Run one room, show its output when it is over, and add what it counted to `counts`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / room).glob("test_*.py")),
        *(["-p", "pytest_cov", "--cov", "--cov-report=", "-m", ""] if slow else ["-m", "not slow"]),
    ]
    environment = {**os.environ, "COVERAGE_FILE": str(ROOT / f".coverage.{room.replace(os.sep, '-')}")}
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    stopped = threading.Event()
    timer = threading.Timer(LIMIT_SECONDS[slow], stop, (process.pid, stopped))
    timer.start()
    said = process.communicate()[0]
    timer.cancel()
    seconds = time.monotonic() - started
    with SHOWING:
        print(f"== {room}\n{said}", end="", flush=True)
        last = next((line for line in reversed(said.splitlines()) if SUMMARY.search(line)), "")
        for number, word in SUMMARY.findall(last):
            counts[word] = counts.get(word, 0) + int(number)
    failures = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if stopped.is_set():
        failures.append(f"stopped after {LIMIT_SECONDS[slow]} s")
    return Row(room, seconds, process.returncode in (0, NO_TESTS_COLLECTED), tuple(failures))


def stop(pid: int, stopped: threading.Event) -> None:
    """Kill a room with all processes that its tests have started."""
    stopped.set()
    room = psutil.Process(pid)
    for process in [*room.children(recursive=True), room]:
        process.kill()


def run_mutants() -> Row:
    """What is printed is shown at once."""
    print("== mutants", flush=True)
    started = time.monotonic()
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "mutants.py")], cwd=ROOT, check=False)
    failures = () if done.returncode == 0 else (f"scripts/mutants.py ended with {done.returncode}: see above",)
    return Row("mutants", time.monotonic() - started, done.returncode == 0, failures)


if __name__ == "__main__":
    sys.exit(main())
