"""Run pytest and write down what becomes of each test as it happens: `recorder.py FILE [--within SECONDS] ARGUMENT ...`

The arguments are pytest's own. FILE gets one line of JSON for each event, so it also says how far a run came that was
killed (`recorded.py` reads it):

    {"kind": "collected", "file": "tests/a/test_b.py", "seconds": 0.4, "tests": 12}
    {"kind": "begins", "test": "tests/a/test_b.py::test_c"}
    {"kind": "ends", "test": "tests/a/test_b.py::test_c", "outcome": "passed", "seconds": 0.1, "slow": false, ...}
    {"kind": "computed", "seconds": 3.2}

The last line is the time of processors that this process and those that it has waited for took.

With `--within` no test begins after that many seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Generator
from typing import Any, TextIO

import pytest


class Recorder:
    """A plugin of pytest that writes to `file`, and stops the session `within` so many seconds."""

    def __init__(self, file: TextIO, within: float) -> None:
        self._file = file
        self._deadline = time.monotonic() + within
        self._collecting: dict[str, float] = {}
        self._parts: list[pytest.TestReport] = []
        """Setup, call and teardown of the test that runs."""
        self._slow: set[str] = set()

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        started = time.monotonic()
        report = yield
        if isinstance(collector, pytest.Module):  # its file is imported here
            self._collecting[file_of(collector.nodeid)] = time.monotonic() - started
        if not report.passed:
            self.write("begins", test=collector.nodeid)
            outcome = "skipped" if report.skipped else "error"
            self.write("ends", test=collector.nodeid, outcome=outcome, seconds=0.0, slow=False, said=reason(report))
        return report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        counts = Counter(file_of(item.nodeid) for item in session.items)
        for file, seconds in self._collecting.items():
            self.write("collected", file=file, seconds=seconds, tests=counts[file])
        self._slow = {item.nodeid for item in session.items if item.get_closest_marker("slow") is not None}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._parts = []
        self.write("begins", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if type(report) is pytest.TestReport:  # parts of a test that are reported by themselves are in its own too
            self._parts.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, said = sum_up(self._parts)
        seconds = sum(part.duration for part in self._parts)
        self.write("ends", test=nodeid, outcome=outcome, seconds=seconds, slow=nodeid in self._slow, said=said)

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if time.monotonic() > self._deadline:
            item.session.shouldstop = "the time is over"
            raise item.session.Interrupted(item.session.shouldstop)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def sum_up(parts: list[pytest.TestReport]) -> tuple[str, str]:
    """The outcome of a test and what is to be said about it, from the reports of its parts."""
    for part in parts:
        if part.failed:
            return ("failed" if part.when == "call" else "error"), reason(part)
    for part in parts:
        if part.skipped:
            return ("xfailed" if hasattr(part, "wasxfail") else "skipped"), reason(part)
    return "passed", ""


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why it was skipped, or the first line of what went wrong."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash is not None else str(report.longrepr or "")
    return next((line for line in said.splitlines() if line.strip()), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--within", type=float, default=float("inf"))
    options, arguments = parser.parse_known_args()
    sys.path[0] = os.getcwd()  # as `python -m pytest` does: tests import each other from there
    with open(options.file, "a", encoding="utf-8") as file:
        recorder = Recorder(file, options.within)
        code = int(pytest.main(arguments, plugins=[recorder]))
        recorder.write("computed", seconds=sum(os.times()[:4]))
        return code


if __name__ == "__main__":
    sys.exit(main())
