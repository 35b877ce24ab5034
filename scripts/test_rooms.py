"""Run the test suite room by room and print the seconds of each and what failed.

`--lint` runs `make lint` beside the rooms. `--all` adds the long suites, the coverage of all rooms together, and the
mutations at the end. Nothing that fails stops
the rest, and a room that never ends is stopped. All of it is written to build/test-report.txt, anew after every room.

Three rooms run at a time: two of those that mostly wait for other processes, and one of those that mostly compute, as
long as there are both. Their lines come as they are printed, each after the name of its room.
Measuring coverage doubles the time of rooms that are busy in Python, so the short suite goes without. A room is a
folder in tests/ with test files of its own, as tests/graph and tests/graph/passes; a room that is named on the command
line brings those below it along. A room has 75 seconds; one that takes longer is named, so that it gets split or sped
up. In the short suite the rooms of a folder in SHARED run in one process, which is named after the folder.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from processes import Ended, Forker, Lane, Show, run_process
from recorded import Recorded, read_record, remember
from report import failures_of, write_report

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
    "edge",
    "end_to_end",
    "examples",
    "install",
    "lite_runtime",
    "server",
    "web",
    "web_library",
}
SHARED = ("attacks", "bundle", "cli", "converter", "datasets", "graph", "lite_runtime", "training/cloud")
"""The rooms of each run in one process; those of a folder below it that is here too in another one.

Many of these take less than it takes a process to begin. In the long suite each has its own, so that one that kills it
takes no other along.
"""
FIRST = ("web_library", "docs/quickstart", "end_to_end")
"""Rooms of one long test: begun last, they would be all that runs in the end. They are no forks, so they run while the
libraries are imported."""
SYNCING = {"attacks", "client", "edge", "operator", "server"}
"""What a round of a server and its devices takes is mostly waiting for the disk to sync, so these have their folders in
memory. Others stay on the disk: they confine processes, install packages, or cut the power."""
MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 2 << 30
"""That have to be free there, as they are not in many a container."""
FORKED_FROM = 12
"""With so many processes or more, those of the short suite are forks of one that has imported the libraries. In the
long suite each begins anew, as coverage has to see the imports."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Without what is set in many a container, where every process would compile the package and rewrite the tests anew."""
SHOWING = threading.Lock()


@dataclass(frozen=True)
class Row:
    """What became of a room, or of several in one process. `trouble`: what went wrong beside tests that failed."""

    room: str
    seconds: float
    passed: bool
    recorded: Recorded = field(default_factory=Recorded)
    trouble: str = ""
    rooms: int = 1


class Rooms:
    """The rooms that are run, and the rows of those that are over.

    `rooms`: those of each process, by its name; `slow`: with the long suites; `memory`: a folder there, if there is
    enough of it.
    """

    def __init__(self, rooms: Mapping[str, Sequence[str]], slow: bool, folder: Path, memory: Path | None) -> None:
        self.slow = slow
        self.rows: list[Row] = []
        self.coverage: Sequence[str] = ()
        self.mutants: Sequence[str] = ()
        self._rooms = rooms
        self._folder = folder
        self._memory = memory
        self._width = max(len(room) for room in (*rooms, "mutants"))
        self._started = time.monotonic()

    def lint(self) -> None:
        """A process that is no room: mypy takes two minutes of one core, in which others run."""
        ended = self._run_process("lint", ["make", "--no-print-directory", "lint"])
        trouble = "" if ended.code == 0 else f"make lint ended with {ended.code}: see above, or run it alone"
        with SHOWING:
            self.rows.append(Row("lint", ended.seconds, ended.code == 0, trouble=trouble))
            self.write_report()

    def run(self, *, lint: bool = False) -> None:
        """The rooms; with `lint` that, too."""
        ordered = sorted(self._rooms, key=lambda room: room not in FIRST)
        waiting = deque(room for room in ordered if room.split(os.sep)[0] in WAITING)
        computing = deque(room for room in self._rooms if room.split(os.sep)[0] not in WAITING)
        # Two cores would be idle for a fifth of the time with one lane of each kind.
        kinds = (waiting, computing), (computing, waiting), (waiting, computing)
        lanes: list[Lane | None] = [None] * len(kinds)
        with ExitStack() as stack:
            if not self.slow and len(self._rooms) >= FORKED_FROM:
                lanes[:] = stack.enter_context(Forker(ROOT, ENVIRONMENT, len(kinds))).lanes
            pool = stack.enter_context(ThreadPoolExecutor(len(kinds) + lint))

            def work(lane: Lane | None, queues: tuple[deque[str], deque[str]]) -> None:
                for room in taken(*queues):
                    self._run_room(room, None if room in FIRST else lane)

            done = [pool.submit(work, *each) for each in zip(lanes, kinds)]
            if lint:
                done.append(pool.submit(self.lint))
            try:
                for lane in done:
                    lane.result()
            except KeyboardInterrupt:  # the terminal has told the rooms that run; no other one begins
                waiting.clear()
                computing.clear()

    def measure_coverage(self) -> None:
        for arguments in (["combine", "--quiet"], ["report", "--skip-covered", "--skip-empty", "--sort=cover"]):
            command = [sys.executable, "-m", "coverage", *arguments]
            # A test of this script runs in a room, whose own file of coverage is not what is combined here.
            environment = {**os.environ, "COVERAGE_FILE": str(ROOT / ".coverage")}
            said = subprocess.run(
                command, cwd=ROOT, env=environment, check=False, stdout=subprocess.PIPE, text=True
            ).stdout
            print(said, end="", flush=True)
            self.coverage = said.splitlines()
        self.write_report()

    def try_mutants(self) -> None:
        """Those of the product's rooms whose tests are run, if any are kept of them."""
        kept = {path.relative_to(ROOT / "tests" / "mutants").with_suffix("").parts[0] for path in mutation_lists()}
        names = sorted(kept & {room.split(os.sep)[0] for room in self._rooms})
        if not names:
            return
        ended = self._run_process("mutants", [sys.executable, "-u", str(ROOT / "scripts" / "mutants.py"), *names])
        self.mutants = ended.lines
        trouble = "" if ended.code == 0 else f"scripts/mutants.py ended with {ended.code}: see above"
        self.rows.append(Row("mutants", ended.seconds, ended.code == 0, trouble=trouble))
        self.write_report()

    def count(self, *outcomes: str) -> int:
        return sum(test.outcome in outcomes for row in self.rows for test in row.recorded.tests)

    def _computed(self) -> float:
        return sum(row.recorded.computed for row in self.rows)

    def show(self) -> None:
        """The table, and after it every failure with the command that runs it alone."""
        print("\nseconds per room, three at a time, and of processors")
        for row in sorted(self.rows, key=lambda row: (row.room in ("lint", "mutants"), row.room)):
            budget = BUDGET_SECONDS * row.rooms
            over = not self.slow and row.room != "lint" and row.seconds > budget
            late = f"  over its {budget} s" if over else ""
            computed = row.recorded.computed
            print(f"  {row.room:<28}{row.seconds:7.1f}{computed:8.1f}{'' if row.passed else '  FAILED'}{late}")
        print(f"  {'all rooms':<28}{time.monotonic() - self._started:7.1f}{self._computed():8.1f}\n")
        if lines := failures_of(self.rows, ROOT):
            print("\n".join(["failures, and what runs each alone", *lines, ""]))

    def write_report(self) -> None:
        over = {row.room for row in self.rows}
        write_report(
            ROOT, self.rows, coverage=self.coverage, mutants=self.mutants, slow=self.slow,
            missing=[room for room in self._rooms if room not in over], seconds=time.monotonic() - self._started,
        )  # fmt: skip

    def _run_room(self, room: str, lane: Lane | None) -> None:
        files = [path for each in self._rooms[room] for path in (ROOT / "tests" / each).glob("test_*.py")]
        record = self._folder / f"{room.replace(os.sep, '-')}.jsonl"
        arguments = [
            str(record), "--verbosity=0", "--no-header",  # a line for each file
            *sorted(str(path.relative_to(ROOT)) for path in files),
            *self._place(room),
            *(["-p", "pytest_cov", "--cov", "--cov-report=", "-m", ""] if self.slow else ["-m", "not slow"]),
        ]  # fmt: skip
        if lane is None:
            command = [sys.executable, "-u", str(ROOT / "scripts" / "recorder.py"), *arguments]
            ended = self._run_process(room, command, LIMIT_SECONDS[self.slow])
        else:
            ended = lane.run(arguments, self._shower(room), LIMIT_SECONDS[self.slow])
        recorded = read_record(record)
        passed, trouble = ended.code in (0, NO_TESTS_COLLECTED), ""
        where = f" in {recorded.running}" if recorded.running else ""
        if ended.code is None:
            trouble = f"stopped after {LIMIT_SECONDS[self.slow]} s{where}"
        elif where or (not passed and not any(test.failed for test in recorded.tests)):
            trouble = f"pytest ended with {ended.code}{where}: see above"
        with SHOWING:
            remember(ROOT, recorded, only_new=self.slow)
            self.rows.append(
                Row(room, ended.seconds, passed and not trouble, recorded, trouble, len(self._rooms[room]))
            )
            self.write_report()

    def _place(self, room: str) -> list[str]:
        """Options that say where the folders of its tests are; one that passed is taken away at once."""
        if self._memory is None or room.split(os.sep)[0] not in SYNCING:
            return []
        place = self._memory / room.replace(os.sep, "-")
        return [f"--basetemp={place}", "-o", "tmp_path_retention_policy=failed"]

    def _run_process(self, name: str, command: Sequence[str], limit: float | None = None) -> Ended:
        environment = {**ENVIRONMENT, "COVERAGE_FILE": str(ROOT / f".coverage.{name.replace(os.sep, '-')}")}
        return run_process(command, self._shower(name), root=ROOT, environment=environment, limit=limit)

    def _shower(self, name: str) -> Show:
        def show(line: str) -> None:
            with SHOWING:
                print(f"{name:<{self._width}} | {line}", flush=True)

        return show


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the long suites too, without the time budget; mutations")
    parser.add_argument("--lint", action="store_true", help="lint, types and import rules too, beside the rooms")
    parser.add_argument("--list", action="store_true", help="print the rooms that would run, and run nothing")
    parser.add_argument("rooms", nargs="*", help="rooms to run, with those below them; all by default")
    options = parser.parse_args()
    rooms, wrong = choose(options.rooms, find_rooms())
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(rooms))
        return 0
    for stale in ROOT.glob(".coverage*"):
        stale.unlink()
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="archipel-rooms-")))
        memory = None
        if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ENOUGH_BYTES:
            memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="archipel-rooms-", dir=MEMORY)))
        processes = {room: [room] for room in rooms} if options.all else share(rooms)
        run = Rooms(processes, options.all, folder, memory)
        run.run(lint=options.lint)
        complete = len(run.rows) == len(processes) + options.lint
        if options.all and complete:
            run.measure_coverage()
            run.try_mutants()
    run.write_report()
    run.show()
    passed = run.count("passed")
    print(f"{passed} passed, {run.count('failed', 'error')} failed, {run.count('skipped')} skipped")
    return 0 if passed and complete and all(row.passed for row in run.rows) else 1


def find_rooms() -> list[str]:
    return sorted({str(path.parent.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")})


def choose(asked: Sequence[str], rooms: Sequence[str]) -> tuple[list[str], list[str]]:
    """The rooms of these names with those below them, all where none is named; and what is wrong with the names."""
    chosen, wrong = set(), []
    known = f"there are {', '.join(rooms)}"
    for name in (name.strip("/").removeprefix("tests/") for name in asked):
        found = [room for room in rooms if room == name or room.startswith(f"{name}/")]
        chosen.update(found)
        if not found:
            near = difflib.get_close_matches(name, rooms, n=5)
            near += [room for room in rooms if name in room.split("/") and room not in near]
            wrong.append(f"there is no room {name}; " + (f"near it: {', '.join(near)}" if near else known))
    return (sorted(chosen) if asked else list(rooms)), wrong


def share(rooms: Sequence[str]) -> dict[str, list[str]]:
    """The rooms of each process, by its name: the folder's of several rooms, otherwise the room's."""
    together: dict[str, list[str]] = {}
    for room in rooms:
        inside = [folder for folder in SHARED if f"{room}/".startswith(f"{folder}/")]
        together.setdefault(max(inside, key=len, default=room), []).append(room)
    return {name if len(inside) > 1 else inside[0]: inside for name, inside in together.items()}


def mutation_lists() -> Iterator[Path]:
    return (ROOT / "tests" / "mutants").rglob("*.toml")


def taken(own: deque[str], others: deque[str]) -> Iterator[str]:
    """Rooms of the lane's own, and when there are none left those at the other's end."""
    while True:
        try:
            yield own.popleft() if own else others.pop()
        except IndexError:  # both are empty
            return


if __name__ == "__main__":
    sys.exit(main())
