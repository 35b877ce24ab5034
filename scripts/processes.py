"""How `test_rooms.py` runs a room: in a process of its own, or in a fork of one that has imported the libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forker import MARK
from recorded import kill

LAST_WORDS_SECONDS = 5
"""For the last lines of a process that has ended: one that it left behind may hold the pipe open for ever."""

FORKER_DIED = -1

Show = Callable[[str], None]
"""Called with each line as it comes."""


@dataclass(frozen=True)
class Ended:
    """A process that is over. `code` is None where it was stopped at its limit."""

    code: int | None
    seconds: float
    lines: Sequence[str]


def run_process(
    command: Sequence[str], show: Show, *, root: Path, environment: Mapping[str, str], limit: float | None = None
) -> Ended:
    """Run a command to its end, or for `limit` seconds; then it is killed with all that it has started."""
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=root, env=environment, text=True, encoding="utf-8", errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines: list[str] = []

    def pass_on() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            show(lines[-1])

    showing = threading.Thread(target=pass_on, daemon=True)
    showing.start()
    code: int | None
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        kill(process.pid)
        process.wait()
        code = None
    showing.join(LAST_WORDS_SECONDS)
    return Ended(code, time.monotonic() - started, lines)


class Lane:
    """Runs `recorder.py` in one fork after the other. `requests`, `told`: the ends of its pipes on this side."""

    def __init__(self, requests: int, told: int) -> None:
        self._requests, self._told = requests, told

    def run(self, arguments: Sequence[str], show: Show, limit: float) -> Ended:
        """`arguments`: of recorder.py. After `limit` seconds the fork is killed with all that it has started.

        The seconds are counted from where it begins: before the first one the libraries are imported.
        """
        started, lines, late, watch = time.monotonic(), list[str](), threading.Event(), None
        with suppress(BrokenPipeError):  # told below
            os.write(self._requests, json.dumps(list(arguments)).encode() + b"\n")
        for line in self._read_lines():
            printed, mark, words = line.partition(MARK)
            if printed:
                lines.append(printed)
                show(printed)
            kind, _, number = words.partition(" ") if mark else ("", "", "")
            if kind == "began":
                started = time.monotonic()
                watch = threading.Timer(limit, stop, (int(number), late))
                watch.daemon = True
                watch.start()
            elif kind == "ended":
                assert watch is not None
                watch.cancel()
                return Ended(None if late.is_set() else int(number), time.monotonic() - started, lines)
        show("scripts/forker.py has died")
        return Ended(FORKER_DIED, time.monotonic() - started, lines)

    def close(self) -> None:
        os.close(self._requests)
        os.close(self._told)

    def _read_lines(self) -> Iterator[str]:
        """Nothing is read beyond the end of a line, where the next fork's begin only after it was asked for."""
        with open(self._told, encoding="utf-8", errors="replace", closefd=False) as told:
            for line in told:
                yield line.rstrip()


def stop(process: int, late: threading.Event) -> None:
    late.set()
    kill(process)


class Forker:
    """A process of `forker.py` with lanes, for a `with` block. It begins at once, and is ready when it has imported."""

    def __init__(self, root: Path, environment: Mapping[str, str], lanes: int) -> None:
        pipes = [(os.pipe(), os.pipe()) for _ in range(lanes)]
        theirs = [(requests[0], told[1]) for requests, told in pipes]
        command = [sys.executable, "-u", str(root / "scripts" / "forker.py"), *(f"{a}:{b}" for a, b in theirs)]
        handles = [handle for pair in theirs for handle in pair]
        self._process = subprocess.Popen(command, cwd=root, env=environment, pass_fds=handles)
        for handle in handles:
            os.close(handle)
        self.lanes = [Lane(requests[1], told[0]) for requests, told in pipes]

    def __enter__(self) -> Forker:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self.lanes:
            lane.close()
        self._process.wait()
