"""What `recorder.py` wrote down, and the seconds of each test file, which are remembered from one run to the next."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MEMORY = ".cache/test-seconds.json"
"""Below the root: a dictionary from test file to the seconds of importing it and of its short tests."""


@dataclass(frozen=True)
class Test:
    """A test that ended. `outcome`: passed, failed, error, skipped or xfailed; `said`: why it did not pass."""

    name: str
    outcome: str
    seconds: float
    slow: bool = False
    said: str = ""

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def failed(self) -> bool:
        return self.outcome in ("failed", "error")


@dataclass
class Recorded:
    """What became of one run of pytest. `files`: how many tests each has, and the seconds of importing it."""

    tests: list[Test] = field(default_factory=list)
    files: dict[str, tuple[int, float]] = field(default_factory=dict)
    running: str = ""
    """The test that had begun and did not end: where a run hung or its process died."""
    computed: float = 0.0
    """Seconds of processors that the run and the processes that it waited for took; 0 where it did not end."""

    def unfinished(self) -> set[str]:
        """Files some of whose tests did not end."""
        ended = Counter(test.file for test in self.tests)
        return {file for file, (count, _) in self.files.items() if ended[file] < count}

    def seconds(self, file: str) -> float:
        """Of importing the file and of those of its tests that ended and are not slow."""
        return self.files[file][1] + sum(test.seconds for test in self.tests if test.file == file and not test.slow)


def read_record(path: Path) -> Recorded:
    """An empty one where pytest never came to write it. The last line of a killed run may be half there."""
    found = Recorded()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        kind = event.pop("kind")
        if kind == "collected":
            found.files[event["file"]] = event["tests"], event["seconds"]
        elif kind == "computed":
            found.computed = event["seconds"]
        elif kind == "begins":
            found.running = event["test"]
        else:
            found.running = ""
            found.tests.append(Test(name=event.pop("test"), **event))
    return found


def command_of(tests: Iterable[str], root: Path) -> str:
    """What a shell in the root runs these tests with; whatever is named runs, slow or not."""
    python = Path(sys.executable)
    shown = os.path.relpath(python, root) if python.is_relative_to(root) else str(python)
    return shlex.join([shown, "-m", "pytest", *tests])


def load_seconds(root: Path) -> dict[str, float]:
    """The seconds of each test file that has been run before."""
    try:
        return {str(file): float(seconds) for file, seconds in json.loads((root / MEMORY).read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}  # a cache: what cannot be read is learned again


def remember(root: Path, recorded: Recorded, *, only_new: bool = False) -> None:
    """Keep the seconds of the files that ran to their end; of those that did not, what they took if it is more.

    `only_new`: only of files that nothing is known of, as measuring coverage makes every test slower.
    """
    known, unfinished = load_seconds(root), recorded.unfinished()
    ended = {test.file for test in recorded.tests}
    for file, (count, _) in recorded.files.items():
        if (count and file not in ended) or (only_new and file in known):
            continue
        seconds = recorded.seconds(file)
        known[file] = round(max(seconds, known.get(file, 0.0)) if file in unfinished else seconds, 2)
    path = root / MEMORY
    path.parent.mkdir(exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
    written.replace(path)


def kill(pid: int) -> None:
    """Kill a process with all that it has started."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
