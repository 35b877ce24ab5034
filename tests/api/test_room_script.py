"""scripts/test_rooms.py in a small tree: what fails or hangs stops nothing, and is told at the end."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MUTANT = """tests = ["tests/good/test_good.py"]

[[mutant]]
name = "older"
file = "archipel/room.py"
find = ">= 18"
replace = "> 18"
why = "a test"
"""
TREE = {
    "archipel/__init__.py": "",
    "archipel/room.py": "def allowed(age):\n    return age >= 18\n",
    "tests/bad/test_bad.py": "def test_no():\n    assert not 1\n",
    "tests/endless/test_endless.py": "import subprocess\n\n\n"
    "def test_it():\n    subprocess.run(['sleep', '600'], check=True)\n",
    "tests/good/test_good.py": "import pytest\nfrom archipel.room import allowed\n\n\n"
    "def test_it():\n    assert allowed(18)\n\n\n@pytest.mark.slow\ndef test_slowly():\n    assert not allowed(17)\n",
    "tests/mutants/room.toml": MUTANT,
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\naddopts = '-q --disable-plugin-autoload'\n",
}


def run(root: Path, *arguments: str) -> tuple[int, list[str], str]:
    """The exit code, the lines of the table at the end without their seconds, and the last line."""
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "scripts").mkdir()
    shutil.copy(SCRIPTS / "mutants.py", root / "scripts")
    script = (SCRIPTS / "test_rooms.py").read_text()
    limits = "LIMIT_SECONDS = {False: 900, True: 6 * 3600}"
    assert limits in script
    (root / "scripts" / "test_rooms.py").write_text(script.replace(limits, "LIMIT_SECONDS = {False: 8, True: 12}"))
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    done = subprocess.run(
        [sys.executable, "scripts/test_rooms.py", *arguments],
        cwd=root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    _, told = done.stdout.split("seconds per room, two at a time\n")
    table, last = told.strip().split("\n\n")
    return done.returncode, [re.sub(r" +\d+\.\d(?=  |$)", "", line).strip() for line in table.splitlines()], last


def test_what_fails_and_what_hangs_are_told_at_the_end(tmp_path: Path) -> None:
    code, table, last = run(tmp_path)
    assert code == 1
    assert table == [
        "bad  FAILED", "FAILED tests/bad/test_bad.py::test_no - assert not 1", "endless  FAILED", "stopped after 8 s",
        "good", "all rooms",
    ]  # fmt: skip
    assert last == "1 passed, 1 failed, 0 skipped"


def test_all_of_it_with_mutations_after_a_room_that_failed(tmp_path: Path) -> None:
    code, table, last = run(tmp_path, "--all", "good", "bad")
    assert code == 1
    assert table == [
        "bad  FAILED",
        "FAILED tests/bad/test_bad.py::test_no - assert not 1",
        "good",
        "mutants",
        "all rooms",
    ]
    assert last == "2 passed, 1 failed, 0 skipped"


def test_nothing_failed(tmp_path: Path) -> None:
    assert run(tmp_path, "--all", "good") == (0, ["good", "mutants", "all rooms"], "2 passed, 0 failed, 0 skipped")
