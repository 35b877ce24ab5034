"""Run the test suite room by room and print the seconds of each; with the long suites the coverage of all together.

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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET_SECONDS = 75
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", action="store_true", help="with the long suites, and without the time budget")
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
            lambda pair: [run_room(room, options.slow, counts) for room in taken(*pair)],
            ((waiting, computing), (computing, waiting)),
        )
        rows = sorted(row for lane in done for row in lane)
    whole = time.monotonic() - started
    if options.slow:
        subprocess.run([sys.executable, "-m", "coverage", "combine", "--quiet"], cwd=ROOT, check=False)
        report = ["report", "--skip-covered", "--skip-empty", "--sort=cover"]
        subprocess.run([sys.executable, "-m", "coverage", *report], cwd=ROOT, check=False)
    print("\nseconds per room, two at a time")
    for room, seconds, ok in rows:
        late = "" if options.slow or seconds <= BUDGET_SECONDS else f"  over its {BUDGET_SECONDS} s"
        print(f"  {room:<22}{seconds:7.1f}{'' if ok else '  FAILED'}{late}")
    print(f"  {'all':<22}{whole:7.1f}\n")
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    print(f"{passed} passed, {failed} failed, {counts.get('skipped', 0)} skipped")
    return 0 if passed and all(ok for _, _, ok in rows) else 1


def taken(own: deque[str], others: deque[str]) -> Iterator[str]:
    """Rooms of the lane's own, and when there are none left those at the other's end."""
    while True:
        try:
            yield own.popleft() if own else others.pop()
        except IndexError:  # both are empty
            return


def run_room(room: str, slow: bool, counts: dict[str, int]) -> tuple[str, float, bool]:
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
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - started
    with SHOWING:
        print(f"== {room}\n{done.stdout}", end="", flush=True)
        last = next((line for line in reversed(done.stdout.splitlines()) if SUMMARY.search(line)), "")
        for number, word in SUMMARY.findall(last):
            counts[word] = counts.get(word, 0) + int(number)
    return room, seconds, done.returncode in (0, NO_TESTS_COLLECTED)


if __name__ == "__main__":
    sys.exit(main())
