"""Format, lint, check the types, and test what was changed, in a minute and a half: `make quick [BASE=REVISION]`.

Changed is what differs from HEAD, or from where this branch left the revision, files included that are new to git.
Tests are the files that import something that was changed, directly or not, the nearest first (`affected.py`), as many
as fit in a budget of seconds by what they took before. What comes first and fails ends it. At the end it says which
files ran, which there was no time for, and the command that runs those.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from affected import NoChangesKnown, ask_git, choose, find_affected, find_changes, is_module
from recorded import Recorded, command_of, load_seconds, read_record, remember

ROOT = Path(__file__).resolve().parent.parent
BUDGET_SECONDS = 60.0
UNKNOWN_SECONDS = 5.0
"""Of a test file that has not been run here."""
OVERTIME = 1.25
"""No test begins after so many times the budget, however wrong the estimates were."""
LEFT_OUT = ".cache/left-out"
"""The test files that there was no time for, one a line, which pytest reads as @.cache/left-out."""
SHOWN = 12
"""So many files are named one by one; of more the rooms are."""
EXAMPLE = "examples/activity"
TYPED_TESTS = "tests/support/"
PASSED, INTERRUPTED, NO_TESTS_COLLECTED = 0, 2, 5
"""Of pytest's exit codes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="HEAD", help="the revision to compare with; HEAD by default")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for the tests (60)")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        changed = find_changes(ROOT, options.base)
        name = ask_git(ROOT, "log", "-1", "--format=%h, %s", options.base).strip()
    except NoChangesKnown as error:
        print(error, file=sys.stderr)
        return 2
    compared = f"the working tree, new files included, with {options.base} ({name})"
    if not changed:
        print(f"nothing changed: compared {compared}")
        return 0
    print(f"compared {compared}\nchanged:\n" + "".join(f"  {path}\n" for path in changed), end="", flush=True)
    passed = check_source(changed) and run_tests(changed, options.budget)
    print(f"{'passed' if passed else 'FAILED'} after {time.monotonic() - started:.0f} s")
    return 0 if passed else 1


def check_source(changed: Sequence[str]) -> bool:
    """Formatter, linter and types, as far as there is something for them; False at the first that finds something."""
    there = [path for path in changed if path.endswith(".py") and (ROOT / path).exists()]
    python = sys.executable
    steps: dict[str, list[str]] = {}
    if there:
        steps["format"] = [python, "-m", "ruff", "format", "--quiet", *there]
        steps["lint"] = [python, "-m", "ruff", "check", "--quiet", "."]
    if any(is_module(path) or path.startswith(TYPED_TESTS) or path == "pyproject.toml" for path in changed):
        steps["types"] = [python, "-m", "mypy", "--no-error-summary"]
    if any(path.startswith(f"{EXAMPLE}/") for path in there):
        files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / EXAMPLE).glob("*.py"))
        steps["types of the example"] = [python, "-m", "mypy", "--no-error-summary", *files]
    for name, command in steps.items():
        started = time.monotonic()
        before = contents(there)
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "MYPYPATH": EXAMPLE}, check=False)
        print(f"== {name}: {time.monotonic() - started:.1f} s", flush=True)
        for path, text in contents(there).items():
            if text != before[path]:
                print(f"  formatted {path}", flush=True)
        if done.returncode != 0:
            return False
    return True


def contents(paths: Sequence[str]) -> dict[str, bytes]:
    return {path: (ROOT / path).read_bytes() for path in paths}


def run_tests(changed: Sequence[str], budget: float) -> bool:
    started = time.monotonic()
    affected, uncovered = find_affected(ROOT, changed)
    seconds = load_seconds(ROOT)
    chosen, left = choose(affected, seconds, UNKNOWN_SECONDS, budget)
    expected = sum(seconds.get(file, UNKNOWN_SECONDS) for file in chosen)
    print(
        f"== tests: {len(chosen)} of the {len(affected)} files that reach what changed (found in "
        f"{time.monotonic() - started:.1f} s), expected to take {expected:.0f} s",
        flush=True,
    )
    recorded, passed = run_pytest(chosen, OVERTIME * budget) if chosen else (Recorded(), True)
    remember(ROOT, recorded)
    cut = recorded.unfinished()
    finished = [file for file in chosen if file in recorded.files and file not in cut]
    print(f"ran to their end: {len(finished)} files")
    print("\n".join(name_files(finished)), end="\n" if finished else "")
    for test in recorded.tests:
        if test.failed:
            print(f"{test.outcome}: {test.name}, which runs alone with\n  {command_of([test.name], ROOT)}")
    if passed:  # after a failure there is something else to do
        tell_left_out([*(file for file in chosen if file in cut), *left])
    for path in uncovered:
        print(f"no test covers {path}")
    return passed


def run_pytest(files: Sequence[str], within: float) -> tuple[Recorded, bool]:
    """Until the first failure. Passed is also what had none before its time was over."""
    with tempfile.TemporaryDirectory(prefix="archipel-quick-") as folder:
        record = Path(folder) / "record.jsonl"
        command = [
            sys.executable, str(ROOT / "scripts" / "recorder.py"), str(record), "--within", str(within),
            "-x", "-m", "not slow", *files,
        ]  # fmt: skip
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        recorded = read_record(record)
    out_of_time = code == INTERRUPTED and recorded.unfinished() and not any(test.failed for test in recorded.tests)
    return recorded, code in (PASSED, NO_TESTS_COLLECTED) or bool(out_of_time)


def tell_left_out(files: Sequence[str]) -> None:
    """And keep their names where one command finds them."""
    path = ROOT / LEFT_OUT
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{file}\n" for file in files))
    if not files:
        print("left out for lack of time: none")
        return
    seconds = load_seconds(ROOT)
    unknown = sum(file not in seconds for file in files)
    about = f"about {sum(seconds.get(file, 0.0) for file in files):.0f} s"
    about += f" and {unknown} of unknown length" if unknown else ""
    print(f"left out for lack of time: {len(files)} files, {about}")
    print("\n".join(name_files(files) if len(files) <= SHOWN else count_files(files)))
    print(f"they run with\n  {command_of(['-m', 'not slow', f'@{LEFT_OUT}'], ROOT)}")


def name_files(files: Sequence[str]) -> list[str]:
    """A line for each folder."""
    return [f"  {folder}/ {' '.join(names)}" for folder, names in by_folder(files).items()]


def count_files(files: Sequence[str]) -> list[str]:
    return [f"  {folder}/ {len(names)}" for folder, names in by_folder(files).items()]


def by_folder(files: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(files):
        folder, _, name = file.rpartition("/")
        found[folder].append(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
