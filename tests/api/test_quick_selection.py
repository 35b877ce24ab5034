"""scripts/affected.py in a small tree: which test files reach a change, how near they are, and which are chosen."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TREE = {
    "archipel/__init__.py": "",
    "archipel/mistakes.py": "class Wrong(Exception):\n    pass\n",
    "archipel/shapes/__init__.py": "from archipel.shapes.area import surface\n",
    "archipel/shapes/area.py": "from archipel.mistakes import Wrong\n\nsurface = Wrong\n",
    "archipel/shapes/unit.py": "METRE = 1\n",
    "archipel/shapes/colours/table.html": "red\n",
    "archipel/paint/__init__.py": "",
    "archipel/paint/brush.py": "from archipel.shapes import surface\n\nbrush = surface\n",
    "archipel/paint/late.py": "def measure():\n    from archipel.shapes.unit import METRE\n\n    return METRE\n",
    "archipel/paint/typed.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
    "    from archipel.shapes.unit import METRE\n",
    "docs/first.md": "",
    "docs/second.md": "",
    "scripts/adding.py": "",
    "scripts/counting.py": "import adding\n",
    "GUIDE.md": "",
    "NOTICE": "",
    "tests/conftest.py": "",
    "tests/docs/test_all_pages.py": "from pathlib import Path\n\nPAGES = Path('docs').glob('*.md')\n",
    "tests/docs/test_first.py": "PAGE = 'docs/first.md'\n",
    "tests/paint/canvas.py": "import archipel.paint.brush as tool\n",
    "tests/paint/conftest.py": "from tests.paint.canvas import tool\nfrom tests.support.ink import INK\n",
    "tests/paint/deep/test_deep.py": "from tests.paint.test_brush import *\n",
    "tests/paint/test_brush.py": "def test_brush(): pass\n",
    "tests/paint/test_late.py": "CODE = 'from archipel.paint.late import measure; measure()'\n",
    "tests/paint/test_typed.py": "from archipel.paint import typed\n",
    "tests/scripts/test_counting.py": "SCRIPT = 'counting.py'\n",
    "tests/shapes/corpus/small.bin": "0",
    "tests/shapes/test_area.py": "import archipel\n\n\ndef test(): assert archipel.shapes.surface\n",
    "tests/shapes/test_unit.py": "from .units import METRE\nfrom tests.support.ink import INK\n",
    "tests/shapes/units.py": "from archipel.shapes.unit import METRE\n",
    "tests/support/ink.py": "INK = 1\n",
    "tests/shapes/test_patched.py": "NAME = 'archipel.shapes.unit.METRE'\n",
}
PAINT = {"paint/test_brush.py", "paint/test_late.py", "paint/test_typed.py", "paint/deep/test_deep.py"}
SHAPES = {"shapes/test_area.py", "shapes/test_unit.py", "shapes/test_patched.py"}
DOCS = {"docs/test_all_pages.py", "docs/test_first.py"}
REACHED: dict[str, dict[str, int]] = {
    # mistakes <- area <- its test, by a name that the package passes on; area <- shapes <- brush <- canvas <- conftest.
    "archipel/mistakes.py": {"shapes/test_area.py": 2, **dict.fromkeys(PAINT, 6)},
    "archipel/shapes/area.py": {"shapes/test_area.py": 1, **dict.fromkeys(PAINT, 5)},
    # An import in a function counts, one for the type checker alone does not.
    "archipel/shapes/unit.py": {"shapes/test_unit.py": 2, "shapes/test_patched.py": 1, "paint/test_late.py": 2},
    "archipel/paint/brush.py": dict.fromkeys(PAINT, 3),
    # The package is imported before each module in it.
    "archipel/paint/__init__.py": {
        "paint/test_typed.py": 2, "paint/test_late.py": 2, "paint/test_brush.py": 4, "paint/deep/test_deep.py": 4,
    },
    # Of data the nearest folder with modules: area and unit are beside it.
    "archipel/shapes/colours/table.html": {
        "shapes/test_area.py": 1, "shapes/test_unit.py": 2, "shapes/test_patched.py": 1,
        "paint/test_late.py": 2, "paint/test_brush.py": 5, "paint/test_typed.py": 5, "paint/deep/test_deep.py": 5,
    },
    "tests/paint/test_brush.py": {"paint/test_brush.py": 0, "paint/deep/test_deep.py": 1},
    "tests/paint/canvas.py": dict.fromkeys(PAINT, 2),
    # Through the fixtures of a folder, and by an import.
    "tests/support/ink.py": {**dict.fromkeys(PAINT, 2), "shapes/test_unit.py": 1},
    "tests/paint/conftest.py": dict.fromkeys(PAINT, 1),
    "tests/conftest.py": dict.fromkeys({*PAINT, *SHAPES, *DOCS, "scripts/test_counting.py"}, 1),
    "tests/shapes/corpus/small.bin": dict.fromkeys(SHAPES, 2),
    "docs/first.md": {"docs/test_first.py": 1, "docs/test_all_pages.py": 2},
    "docs/second.md": dict.fromkeys(DOCS, 2),
    "GUIDE.md": dict.fromkeys(DOCS, 2),
    "scripts/counting.py": {"scripts/test_counting.py": 1},
    "scripts/adding.py": {"scripts/test_counting.py": 2},
    "NOTICE": {},
}  # fmt: skip
ASK = """
import json, sys
from pathlib import Path
from affected import find_affected, find_changes
root = Path.cwd()
for asked in sys.argv[1:]:
    affected, uncovered = find_affected(root, json.loads(asked))
    found = {each.file: [each.distance, each.same_room] for each in affected}
    print(json.dumps([find_changes(root, "HEAD"), found, uncovered]))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as a git repository with one commit."""
    folder = tmp_path_factory.mktemp("small")
    for name, text in TREE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / ".gitignore").write_text(".cache/\n__pycache__/\n")
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a commit")


def ask(root: Path, *changes: list[str]) -> list[tuple[list[str], dict[str, tuple[int, bool]], list[str]]]:
    """What git says was changed, and for each list of changes the files that it reaches and those without tests."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{ASK}", *map(json.dumps, changes)],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_change_reaches_what_depends_on_it(root: Path) -> None:
    answers = ask(root, *([path] for path in REACHED))
    for (path, expected), (_, found, uncovered) in zip(REACHED.items(), answers, strict=True):
        assert {file: distance for file, (distance, _) in found.items()} == {
            f"tests/{file}": distance for file, distance in expected.items()
        }, path
        assert uncovered == ([] if expected else [path]), path


def test_of_several_changes_the_nearest_counts(root: Path) -> None:
    [(_, found, uncovered)] = ask(root, ["archipel/mistakes.py", "archipel/shapes/area.py", "NOTICE"])
    assert found["tests/shapes/test_area.py"] == [1, True]
    assert found["tests/paint/test_brush.py"] == [5, False]
    assert uncovered == ["NOTICE"]


def test_what_git_calls_a_change(root: Path) -> None:
    """What is edited, new, staged, deleted; not what is ignored. What is gone has importers still."""
    (root / "archipel/shapes/unit.py").unlink()
    (root / "archipel/mistakes.py").write_text("")
    (root / "archipel/fresh.py").write_text("")
    (root / "tests/test_fresh.py").write_text("import archipel.fresh\n")
    git(root, "add", "tests/test_fresh.py")
    (root / ".cache").mkdir(exist_ok=True)
    (root / ".cache/ignored.py").write_text("")
    try:
        changed = ["archipel/fresh.py", "archipel/mistakes.py", "archipel/shapes/unit.py", "tests/test_fresh.py"]
        [(said, found, _), (_, gone, _)] = ask(root, changed, ["archipel/shapes/unit.py"])
        assert said == changed
        assert found["tests/test_fresh.py"][0] == 0
        assert gone == {
            "tests/shapes/test_patched.py": [1, True], "tests/shapes/test_unit.py": [2, True],
            "tests/paint/test_late.py": [2, False], "tests/paint/test_typed.py": [2, False],
        }  # fmt: skip
    finally:
        git(root, "reset", "--quiet", "--hard")
        (root / "archipel/fresh.py").unlink()
    assert ask(root, [])[0][0] == []


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


affected = load("affected")
SECONDS = {"changed": 50.0, "near": 4.0, "nearer": 30.0, "near and long": 9.0, "far": 1.0}
FOUND = [
    affected.Affected("far", 3, False),
    affected.Affected("near", 2, True),
    affected.Affected("near and long", 2, True),
    affected.Affected("near, elsewhere", 2, False),
    affected.Affected("nearer", 1, False),
    affected.Affected("changed", 0, False),
]


@pytest.mark.parametrize(
    ("budget", "chosen", "left"),
    [
        (100.0, "changed; nearer; near; near and long; near, elsewhere; far", ""),
        (90.0, "changed; nearer; near; near, elsewhere; far", "near and long"),
        (66.0, "changed; near; near and long; far", "nearer; near, elsewhere"),
        (0.0, "changed", "nearer; near; near and long; near, elsewhere; far"),
    ],
)
def test_what_is_chosen(budget: float, chosen: str, left: str) -> None:
    """By hand: the file that is not known counts as 5 s, and what was changed runs however long it takes."""
    found = affected.choose(FOUND, SECONDS, 5.0, budget)
    assert found == ([each for each in chosen.split("; ") if each], [each for each in left.split("; ") if each])
