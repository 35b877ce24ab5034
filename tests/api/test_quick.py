"""scripts/quick.py in a small repository, through all of its steps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TREE = {
    ".gitignore": ".cache/\n.mypy_cache/\n.ruff_cache/\n.pytest_cache/\n__pycache__/\n",
    "archipel/__init__.py": "",
    "archipel/room.py": "def allow(age: int) -> bool:\n    return age >= 18\n",
    "archipel/house.py": "from archipel.room import allow\n\nwelcome = allow\n",
    "notes.txt": "",
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\naddopts = '-q --disable-plugin-autoload'\n\n"
    "[tool.mypy]\npackages = ['archipel']\n\n[tool.ruff]\nexclude = ['scripts']\n",
    "tests/house/test_house.py": "import pytest\n\nfrom archipel.house import welcome\n\n\n"
    "def test_it():\n    assert welcome(18)\n\n\n@pytest.mark.slow\ndef test_slowly():\n    assert not welcome(18)\n",
    "tests/other/test_other.py": "def test_it():\n    pass\n",
    "tests/room/test_room.py": "from archipel.room import allow\n\n\ndef test_it():\n    assert allow(18)\n",
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "scripts").mkdir()
    for name in ("affected.py", "quick.py", "recorded.py", "recorder.py"):
        shutil.copy(SCRIPTS / name, root / "scripts")
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "the first")
    return root


@pytest.fixture
def root(repository: Path) -> Iterator[Path]:
    """The repository without changes, and nothing remembered."""
    shutil.rmtree(repository / ".cache", ignore_errors=True)
    yield repository
    git(repository, "reset", "--quiet", "--hard")
    git(repository, "clean", "--quiet", "--force", "-d")


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True)


def quick(root: Path, *arguments: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "scripts/quick.py", *arguments], cwd=root, text=True, timeout=120, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines()


def after(line: str, said: list[str]) -> str:
    """What is said in the line after the one that begins so."""
    return said[next(number for number, each in enumerate(said) if each.startswith(line)) + 1].strip()


def test_nothing_changed(root: Path) -> None:
    code, [said] = quick(root)
    assert code == 0
    assert said.startswith("nothing changed: compared the working tree, new files included, with HEAD (")
    assert said.endswith(", the first)")


def test_a_revision_that_is_not_there(root: Path) -> None:
    code, [said] = quick(root, "--base", "nowhere")
    assert code == 2
    assert "nowhere" in said


@pytest.mark.sampled(every=4)
def test_a_module_is_formatted_and_its_importers_are_tested(root: Path) -> None:
    (root / "archipel/room.py").write_text("def allow(age: int) -> bool:\n    return age   >= 18\n")
    code, said = quick(root)
    assert code == 0, said
    assert "  archipel/room.py" in said
    assert "  formatted archipel/room.py" in said
    assert (root / "archipel/room.py").read_text() == TREE["archipel/room.py"]
    assert [line.split(":")[0] for line in said if line.startswith("== ")] == [
        "== format", "== lint", "== types", "== tests",
    ]  # fmt: skip
    assert any(line.startswith("== tests: 2 of the 2 files") for line in said)
    end = said[said.index("ran to their end: 2 files") :]
    assert end[1:4] == ["  tests/house/ test_house.py", "  tests/room/ test_room.py", "left out for lack of time: none"]
    assert end[4].startswith("passed after ")
    # What they took is remembered.
    assert set(json.loads((root / ".cache/test-seconds.json").read_text())) == {
        "tests/house/test_house.py", "tests/room/test_room.py",
    }  # fmt: skip


@pytest.mark.sampled(every=4)
def test_what_there_is_no_time_for_is_said(root: Path) -> None:
    (root / ".cache").mkdir()
    (root / ".cache/test-seconds.json").write_text('{"tests/house/test_house.py": 58.0}')
    (root / "archipel/room.py").write_text(TREE["archipel/room.py"] + "\n\nopen_at = 9\n")
    code, said = quick(root)
    assert code == 0, said
    assert after("ran to their end: 1 files", said) == "tests/room/ test_room.py"
    assert after("left out for lack of time: 1 files, about 58 s", said) == "tests/house/ test_house.py"
    command = after("they run with", said)
    assert command == f"{sys.executable} -m pytest -m 'not slow' @.cache/left-out"
    done = subprocess.run(command, shell=True, cwd=root, capture_output=True, text=True, check=False)
    assert "1 passed, 1 deselected" in done.stdout


@pytest.mark.sampled(every=4)
def test_no_test_begins_when_the_time_is_over(root: Path) -> None:
    """However short they were before."""
    test = "import time\n\n\ndef test_a():\n    time.sleep(1.5)\n\n\ndef test_b():\n    raise SystemError\n"
    (root / "tests/room/test_room.py").write_text(test)
    code, said = quick(root, "--budget", "1")
    assert code == 0, said
    assert "ran to their end: 0 files" in said
    assert after("left out for lack of time: 1 files", said) == "tests/room/ test_room.py"


@pytest.mark.sampled(every=4)
def test_the_first_thing_that_fails_ends_it(root: Path) -> None:
    (root / "archipel/room.py").write_text("def allow(age: int) -> bool:\n    return age > 18\n")
    code, said = quick(root)
    assert code == 1
    assert after("failed: tests/room/test_room.py::test_it, which runs alone with", said) == (
        f"{sys.executable} -m pytest tests/room/test_room.py::test_it"
    )
    assert not any("test_house.py" in line for line in said)
    # Of another size than the one before: mypy takes a file for the same by its size and the second of its writing.
    (root / "archipel/room.py").write_text("def allow(age: int) -> bool:\n    return str(age).upper()\n")
    code, said = quick(root)
    assert code == 1
    assert any("Incompatible return value" in line for line in said)
    assert not any(line.startswith("== tests") for line in said)
    (root / "archipel/room.py").write_text("import os\n")
    code, said = quick(root)
    assert code == 1
    assert any("F401" in line for line in said)
    assert not any(line.startswith("== types") for line in said)


@pytest.mark.sampled(every=4)
def test_since_a_revision(root: Path) -> None:
    """A commit of this branch, a changed test and what no test covers."""
    git(root, "checkout", "--quiet", "-b", "branch")
    try:
        (root / "notes.txt").write_text("more")
        git(root, "commit", "--quiet", "--all", "--message", "the second")
        (root / "tests/other/test_other.py").write_text("def test_it():\n    assert True\n")
        code, said = quick(root)
        assert code == 0
        assert "  notes.txt" not in said
        code, said = quick(root, "--base", "HEAD~1")
        assert code == 0
        assert said[said.index("changed:") + 1 :][:2] == ["  notes.txt", "  tests/other/test_other.py"]
        assert after("ran to their end: 1 files", said) == "tests/other/ test_other.py"
        assert "no test covers notes.txt" in said
    finally:
        git(root, "reset", "--quiet", "--hard", "HEAD~1")
