"""The kept list of mutations still applies, and the script that tries them out tells killed from surviving."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "attacks", "autodiff", "bundle", "cli", "client", "compression", "converter", "datasets", "durable", "frontend",
    "graph", "lite_runtime", "models", "operator", "permutations", "preprocessing", "privacy", "protocol", "server",
    "simulation", "strategies", "training",
}  # fmt: skip
LEAST = 120


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutants = load_script()
LIST = mutants.load(ROOT / "tests" / "mutants")


@pytest.mark.parametrize("mutant", LIST, ids=lambda each: each.label)
@pytest.mark.sampled(every=6)
def test_it_applies(mutant: mutants.Mutant) -> None:
    """Its text is in the file exactly once, makes Python of Python, and the tests that must fail are there."""
    mutant.applied(ROOT)
    room = "archipel/" if mutant.room == "attacks" else f"archipel/{mutant.room}/"
    assert mutant.file.startswith(room) or mutant.file == f"archipel/{mutant.room}.py"
    assert len(mutant.why) > 4
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        if name:
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test


def test_there_are_enough_of_every_room() -> None:
    counts = Counter(mutant.room for mutant in LIST if not mutant.equivalent)
    assert set(counts) == ROOMS
    assert min(counts.values()) >= 4
    assert sum(counts.values()) >= LEAST


TINY = {
    "archipel/__init__.py": "",
    "archipel/room.py": "def allowed(age):\n    return age >= 18\n\n\ndef half(n):\n    return n // 2\n",
    "tests/test_room.py": "import archipel.room as r\n\n\ndef test_allowed():\n"
    "    assert r.allowed(18) and not r.allowed(17)\n\n\ndef test_half():\n    assert r.half(4) == 2\n",
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\naddopts = '--disable-plugin-autoload'\n",
}


def write_tree(root: Path, *rows: str) -> None:
    """A tree of one module with two tests, and a list of these mutations."""
    files = {**TINY, "tests/mutants/room.toml": 'tests = ["tests/test_room.py"]\n' + "".join(rows)}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)


def row(name: str, find: str, replace: str, more: str = "") -> str:
    named = {"name": name, "file": "archipel/room.py", "find": find, "replace": replace, "why": "a test"}
    return "[[mutant]]\n" + "".join(f'{key} = "{value}"\n' for key, value in named.items()) + more


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and ".git" not in p.parts}


KILLED = row("off-by-one", ">= 18", "> 18")
SURVIVES = row("rounds-up", "n // 2", "-(-n // 2)")


@pytest.mark.sampled(every=4)
def test_what_is_noticed_and_what_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tree(tmp_path, KILLED, SURVIVES)
    before = contents(tmp_path)
    assert mutants.main(["--jobs", "2"], root=tmp_path) == 1
    said = capsys.readouterr().out
    assert "room/off-by-one" in next(line for line in said.splitlines() if line.startswith("  killed "))
    assert "test_allowed" in said
    assert "room/rounds-up" in next(line for line in said.splitlines() if line.startswith("  survived "))
    assert "2 mutations" in said
    assert "1 survived" in said
    assert mutants.main(["room", "--only", "off-by-one"], root=tmp_path) == 0
    assert contents(tmp_path) == before


@pytest.mark.sampled(every=4)
def test_an_equivalent_one_must_survive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = 'equivalent = "only even numbers are given"\n'
    write_tree(tmp_path, row("rounds-up", "n // 2", "-(-n // 2)", reason))
    assert mutants.main([], root=tmp_path) == 0
    write_tree(tmp_path, row("off-by-one", ">= 18", "> 18", reason))
    assert mutants.main([], root=tmp_path) == 1
    assert "only even numbers are given" in capsys.readouterr().out


@pytest.mark.sampled(every=8)
def test_one_that_never_ends_is_stopped_and_counts_as_noticed(tmp_path: Path) -> None:
    write_tree(tmp_path, row("endless", "return n // 2", "exec('while True: pass')"))
    assert mutants.main(["--limit", "4"], root=tmp_path) == 0


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((row("old", "age > 18", "age < 18"),), "stale, its text is 0 times in archipel/room.py"),
        ((row("vague", "return", "pass; return"),), "stale, its text is 2 times"),
        ((row("nonsense", ">= 18", ">= = 18"),), "is not Python"),
        ((KILLED, KILLED), "twice in the list"),
        ((row("x", ">= 18", "> 18", 'test = ["a"]\n'),), "unknown ['test']"),
        ((row("x", ">= 18", "> 18", 'tests = ["tests/test_gone.py"]\n'),), "do not pass without any mutation"),
        ((row("x", "n // 2", "undefined(", 'tests = ["tests/test_room.py"]\n'),), "is not Python"),
    ],
)
def test_a_list_that_has_to_be_mended(
    rows: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(tmp_path, *rows)
    assert mutants.main([], root=tmp_path) == 2
    assert words in capsys.readouterr().err


@pytest.mark.sampled(every=4)
def test_tests_that_do_not_run_notice_nothing(tmp_path: Path) -> None:
    """A module that cannot be imported would make every test of it fail, whatever it looks at."""
    write_tree(tmp_path, row("no-import", "def half(n):\\n    return", "import gone\\ndef half(n):\\n    return"))
    assert mutants.main([], root=tmp_path) == 1
