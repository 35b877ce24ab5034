"""build/test-report.txt: everything that one run of the rooms found out, in one file."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from recorded import Recorded, command_of

REPORT = "build/test-report.txt"
SLOWEST = 30


class Row(Protocol):
    """What became of a room, as test_rooms.py keeps it."""

    @property
    def room(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def passed(self) -> bool: ...
    @property
    def recorded(self) -> Recorded: ...
    @property
    def trouble(self) -> str: ...


def write_report(
    root: Path, rows: Iterable[Row], *, coverage: Sequence[str], mutants: Sequence[str], slow: bool,
    missing: Sequence[str], seconds: float,
) -> None:  # fmt: skip
    """`missing` are the rooms that are not over; a run that is stopped leaves their names in the file."""
    rows = sorted(rows, key=lambda row: row.room)
    parts = {
        "rooms": [*table_of(rows), f"all of it: {seconds:.1f} s, three rooms at a time"],
        "not over yet": list(missing),
        "failures, and what runs each alone": failures_of(rows, root),
        "skipped": skips_of(rows),
        f"slowest {SLOWEST} tests": slowest_of(rows),
        "coverage": list(coverage),
        "mutations": list(mutants),
    }
    title = f"{'long' if slow else 'short'} suite of {version_of(root)}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
    text = "".join(f"\n== {name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in parts.items() if lines)
    (root / REPORT).parent.mkdir(exist_ok=True)
    (root / REPORT).write_text(f"{title}\n{text}", encoding="utf-8")


def table_of(rows: Sequence[Row]) -> list[str]:
    lines = [f"  {'':<28}{'seconds':>9}{'computed':>10}{'passed':>8}{'failed':>8}{'skipped':>9}"]
    for row in rows:
        outcomes = [test.outcome for test in row.recorded.tests]
        failed = outcomes.count("failed") + outcomes.count("error")
        counts = f"{outcomes.count('passed'):>8}{failed:>8}{outcomes.count('skipped'):>9}"
        seconds = f"{row.seconds:>9.1f}{row.recorded.computed:>10.1f}"
        lines.append(f"  {row.room:<28}{seconds}{counts}{'' if row.passed else '  FAILED'}")
    return lines


def failures_of(rows: Iterable[Row], root: Path) -> list[str]:
    """For each test that failed what was wrong and a command; for a room that hung or crashed where it did."""
    lines = []
    for row in sorted(rows, key=lambda row: row.room):
        for test in row.recorded.tests:
            if test.failed:
                said = f" - {test.said}" if test.said else ""
                lines += [f"  {test.outcome.upper()} {test.name}{said}", f"    {command_of([test.name], root)}"]
        if row.trouble:
            lines.append(f"  {row.room}: {row.trouble}")
        if row.trouble and row.recorded.running:
            lines.append(f"    {command_of([row.recorded.running], root)}")
    return lines


def skips_of(rows: Iterable[Row]) -> list[str]:
    """Each reason with the files in which tests were skipped for it."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        for test in row.recorded.tests:
            if test.outcome == "skipped":
                found[test.said][test.file] += 1
    lines = []
    for reason in sorted(found):
        lines.append(f"  {reason}")
        lines += [f"    {count:>4} in {file}" for file, count in sorted(found[reason].items())]
    return lines


def slowest_of(rows: Iterable[Row]) -> list[str]:
    tests = sorted((test for row in rows for test in row.recorded.tests), key=lambda test: -test.seconds)
    return [f"  {test.seconds:>8.2f} s  {test.name}" for test in tests[:SLOWEST]]


def version_of(root: Path) -> str:
    """The commit that was tested, and whether there were changes on top of it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "no commit"
