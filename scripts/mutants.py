"""Change the product in one place at a time and see that the tests notice: `mutants.py [ROOM ...] [--only NAME]`.

The mutations are kept in tests/mutants/ROOM.toml, or in several files of a folder ROOM. They are made by hand: what
somebody could really get wrong, and that would matter. Each says which tests must fail:

    tests = ["tests/protocol/test_shamir.py"]       # of all mutations of the file that name none themselves

    [[mutant]]
    name = "threshold-off-by-one"
    file = "archipel/protocol/shamir.py"
    find = "text that is in the file exactly once"
    replace = "what is there instead"
    why = "what would go wrong"
    tests = ["tests/protocol/test_shamir.py::test_below_the_threshold"]
    equivalent = "only where no test can tell: the reason"

Everything happens in a copy of the tree in a temporary folder, which subprocesses import as well; the working tree is
only read. The tests are run without any mutation first. Exit code 1 where a mutation survives, or an equivalent one is
noticed; 2 where the list or the tests themselves are wrong, with what to mend.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 180
BASE_SECONDS = 60
"""At least, for the tests as they are."""
FIELDS = {"name", "file", "find", "replace", "why", "tests", "equivalent"}
PASSED, FAILED = 0, 1
"""Of pytest's exit codes; all others mean that the tests did not run."""


class ListError(Exception):
    """A list that has to be mended; says where."""


@dataclass(frozen=True)
class Mutant:
    """One change: `find` in `file` becomes `replace`, and one of `tests` fails. `equivalent`: why none can."""

    room: str
    name: str
    file: str
    find: str
    replace: str
    why: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def label(self) -> str:
        return f"{self.room}/{self.name}"

    def applied(self, root: Path) -> str:
        """The file's text with the change. Raises ListError where it does not apply any more."""
        path = root / self.file
        if not path.is_file():
            raise ListError(f"{self.label}: there is no file {self.file}")
        text = path.read_text(encoding="utf-8")
        count = text.count(self.find)
        if count != 1:
            raise ListError(f"{self.label}: stale, its text is {count} times in {self.file}, expected once")
        changed = text.replace(self.find, self.replace)
        if changed == text:
            raise ListError(f"{self.label}: changes nothing")
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise ListError(f"{self.label}: what it makes is not Python: {error}") from None
        return changed


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation: "killed", "survived", "slow" (stopped at the limit, which counts as noticed), or
    "broken": the tests did not run, as `said`."""

    mutant: Mutant
    verdict: str
    seconds: float
    said: str

    @property
    def wrong(self) -> bool:
        noticed = self.verdict in ("killed", "slow")
        return self.verdict == "broken" or noticed == bool(self.mutant.equivalent)


def load(folder: Path) -> list[Mutant]:
    """Every mutation of the TOML files in `folder`: of ROOM.toml, or of all in the folder ROOM. Raises ListError."""
    found: list[Mutant] = []
    for path in sorted(folder.rglob("*.toml")):
        room = path.relative_to(folder).with_suffix("").parts[0]
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        for row in document.get("mutant", []):
            label = f"{path.name}: {row.get('name', '?')}"
            unknown, missing = set(row) - FIELDS, FIELDS - {"tests", "equivalent"} - set(row)
            tests = tuple(row.get("tests", document.get("tests", ())))
            if unknown or missing or not tests:
                raise ListError(f"{label}: unknown {sorted(unknown)}, missing {sorted(missing)}, tests {list(tests)}")
            found.append(Mutant(**{**row, "room": room, "tests": tests}))
    twice = [label for label, count in Counter(each.label for each in found).items() if count > 1]
    if twice:
        raise ListError(f"twice in the list: {', '.join(twice)}")
    return found


class Copy:
    """A copy of the tree, in which one mutation at a time is made and tests are run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root, check=True, capture_output=True,
        ).stdout.decode()  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.folder / name)
        if (root.parent / "shared").is_dir():
            (folder / "shared").symlink_to((root.parent / "shared").resolve())
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
            "ARCHIPEL_HYPOTHESIS_PROFILE": "archipel-short",
        }
        self._second = 0

    def check(self) -> None:
        """Raises ListError where Python would import something else than the copy."""
        code = "import archipel; print(archipel.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=self.folder, env=self._environment, capture_output=True, text=True
        )
        if not done.stdout.startswith(str(self.folder)):
            raise ListError(f"the copy in {self.folder} is not what is imported: {done.stdout}{done.stderr}")

    def run(self, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        """pytest's exit code and what it printed; None where it was stopped after `limit` seconds.

        Of whole files the slow tests are left out; a test that is named is run, slow or not.
        """
        chosen = "" if all("::" in test for test in tests) else "not slow"
        options = ["-x", "-m", chosen, "-p", "no:cacheprovider", "--tb=line"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        # Which of a file's tests notices must not depend on the commit.
        environment = {**self._environment, "ARCHIPEL_ALL_SAMPLED_UP_TO": "6"}
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
            process.communicate()
            return None, f"stopped after {limit:g} s"
        return process.returncode, said

    def try_out(self, mutant: Mutant, limit: float) -> Outcome:
        path, started = self.folder / mutant.file, time.monotonic()
        kept = path.read_bytes()
        try:
            self._write(path, mutant.applied(self.folder).encode())
            code, said = self.run(mutant.tests, limit)
        finally:
            self._write(path, kept)
        verdict = {None: "slow", PASSED: "survived", FAILED: "killed"}.get(code, "broken")
        return Outcome(mutant, verdict, time.monotonic() - started, said)

    def _write(self, path: Path, data: bytes) -> None:
        """With a time of its own: Python compiles anew what has another second or size."""
        path.write_bytes(data)
        self._second += 1
        os.utime(path, (self._second, self._second))


def run_all(chosen: Sequence[Mutant], root: Path, *, jobs: int, limit: float, base: bool = True) -> list[Outcome]:
    """Try out all of them, `jobs` at a time, and print each as it ends. Raises ListError."""
    for mutant in chosen:
        mutant.applied(root)
    done: list[Outcome] = []
    showing = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="archipel-mutants-") as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(jobs):
            copies.put(Copy(root, Path(folder) / str(number)))

        def borrow(mutant: Mutant) -> None:
            copy = copies.get()
            try:
                outcome = copy.try_out(mutant, limit)
            finally:
                copies.put(copy)
            with showing:
                done.append(outcome)
                print(describe(outcome), flush=True)

        first = copies.get()
        first.check()
        tests = sorted({test for mutant in chosen for test in mutant.tests}) if base else []
        files = [test for test in tests if "::" not in test]
        named = [test for test in tests if "::" in test]
        print(f"{len(chosen)} mutations{'; first the tests as they are' * base}", flush=True)
        for part in (named, files):
            code, said = first.run(part, max(BASE_SECONDS, limit * len(part))) if part else (PASSED, "")
            if code != PASSED:
                raise ListError(f"the tests do not pass without any mutation:\n{said[-4000:]}")
        copies.put(first)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(borrow, chosen))
    return done


def describe(outcome: Outcome) -> str:
    mutant = outcome.mutant
    lines = [line for line in outcome.said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    by = lines[0].split(" ")[1] if lines and outcome.verdict == "killed" else ""
    text = f"  {outcome.verdict:<9}{outcome.seconds:6.1f} s  {mutant.label:<52}{by}"
    if mutant.equivalent:
        text += f"  equivalent: {mutant.equivalent}"
    if outcome.wrong:
        text += f"\n            {mutant.file}: {mutant.why}\n            tests: {' '.join(mutant.tests)}"
    return text if outcome.verdict != "broken" else f"{text}\n{outcome.said[-2000:]}"


def summary(outcomes: Sequence[Outcome]) -> str:
    """A line for each room, and one for all of them."""
    rows = [("room", "killed", "equivalent", "wrong")]
    rooms = sorted({outcome.mutant.room for outcome in outcomes})
    for room in (*rooms, "all"):
        of = [outcome for outcome in outcomes if room in (outcome.mutant.room, "all")]
        killed = sum(not outcome.wrong and not outcome.mutant.equivalent for outcome in of)
        equivalent = sum(not outcome.wrong and bool(outcome.mutant.equivalent) for outcome in of)
        rows.append((room, str(killed), str(equivalent), str(sum(outcome.wrong for outcome in of))))
    return "\n".join("  {:<16}{:>8}{:>12}{:>8}".format(*row) for row in rows)


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help="files of tests/mutants without .toml; all by default")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this mutation; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for the tests of one mutation")
    parser.add_argument("--no-base", action="store_true", help="do not run the tests without any mutation first")
    parser.add_argument("--list", action="store_true", help="show the list, and whether each still applies")
    options = parser.parse_args(arguments)
    try:
        known = load(root / "tests" / "mutants")
        chosen = [each for each in known if not options.rooms or each.room in options.rooms]
        chosen = [each for each in chosen if not options.only or each.name in options.only]
        if not chosen:
            raise ListError(f"no such mutation; there are the rooms {sorted({each.room for each in known})}")
        if options.list:
            for mutant in chosen:
                mutant.applied(root)
                print(f"  {mutant.label:<52}{mutant.why}")
            return 0
        started = time.monotonic()
        jobs = max(1, min(options.jobs, len(chosen)))
        outcomes = run_all(chosen, root, jobs=jobs, limit=options.limit, base=not options.no_base)
    except ListError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"\n{summary(outcomes)}\n")
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    surviving = sum(outcome.verdict == "survived" for outcome in wrong)
    print(f"{len(outcomes)} mutations in {time.monotonic() - started:.0f} s: {surviving} survived", end="")
    print(f", {len(wrong) - surviving} wrong otherwise" if len(wrong) > surviving else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
