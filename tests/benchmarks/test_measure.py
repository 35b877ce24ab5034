"""What every benchmark prints: the run on its own line, and with --json nothing but rows on standard output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
CPUINFO = """processor\t: 0
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC
stepping\t: 1
flags\t\t:

processor\t: 1
model name\t: another
"""


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import measure

    return measure


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", "-C", folder, *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_line_names_commit_date_processor_python_and_versions(measure: ModuleType) -> None:
    line = measure.describe_run(("numpy", "no-such-distribution"))
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC; .+, \d+ cores; Python 3\.\d+\.\d+; ", line)
    assert line.endswith(f"; numpy {version('numpy')}; no-such-distribution not installed")
    assert "\n" not in line


def test_a_changed_tree_is_told_from_its_commit(measure: ModuleType, tmp_path: Path) -> None:
    assert measure._commit(tmp_path) == "no commit"
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert measure._commit(tmp_path) == f"commit {commit}"
    (tmp_path / "new").write_text("")
    assert measure._commit(tmp_path) == f"commit {commit} with changes"


def test_processors_of_one_name_are_told_apart(measure: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    assert measure._processor(tmp_path / "cpuinfo") == "AMD EPYC (family 26, model 2, stepping 1)"


@pytest.mark.sampled(every=8)
def test_json_keeps_standard_output_for_rows(measure: ModuleType) -> None:
    command = [sys.executable, FOLDER / "secagg.py", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(row) == set(measure.Row.__dataclass_fields__) for row in rows)
    assert {row["case"].partition(",")[0] for row in rows} == {"cohort of 10", "cohort of 50"}
    assert done.stderr.startswith("run: ")
    assert "cryptography " in done.stderr


def test_every_benchmark_says_what_it_is_a_run_of() -> None:
    """Each script that has a `main` makes a Report, which prints the line, or prints it itself."""
    scripts = [
        path for path in [*FOLDER.glob("*.py"), *(FOLDER / "attacks").glob("*.py")] if "def main(" in path.read_text()
    ]
    assert len(scripts) >= 12
    for path in scripts:
        assert re.search(r"\bReport\(|\bstate_run\(", path.read_text()), path.name


def test_what_is_compared_with_nothing_has_the_keys_of_a_row(
    measure: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    measure.print_alone("secagg", "share", ms=1.5, bytes_sent=float("nan"))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(set(row) == set(measure.Row.__dataclass_fields__) for row in rows)
    assert [(row["ours"], row["peer"], row["ratio"], row["unit"]) for row in rows] == [
        (1.5, None, None, "ms"),
        (None, None, None, "bytes sent"),
    ]
