"""scripts/test_rooms.py in a small tree: what fails or hangs stops nothing, and is told at the end."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PYTEST = f"{sys.executable} -m pytest"
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
    "tests/mutants/good.toml": MUTANT,
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\naddopts = '-q --disable-plugin-autoload'\n",
}
OTHER_ROOMS = {
    "tests/crash/test_crash.py": "import os\n\n\ndef test_before():\n    pass\n\n\ndef test_it():\n    os._exit(3)\n",
    "tests/broken/test_broken.py": "import nothing_like_it\n",
    "tests/broken/deep/test_deep.py": "import pytest\n\n\n@pytest.fixture\ndef lost():\n    raise OSError('gone')\n\n\n"
    "def test_it(lost):\n    pass\n\n\n@pytest.mark.skip(reason='no moon')\ndef test_skipped():\n    pass\n",
}
WAITS = """import time
from pathlib import Path


def test_it():
    deadline = time.monotonic() + 60
    while not Path("go on").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""

WRITES = """import os


def test_it():
    with open("processes", "a") as file:
        print("ROOM", os.getpid(), file=file)
"""


def build(
    root: Path,
    tree: dict[str, str],
    limit: float = 600,
    libraries: tuple[str, ...] | None = None,
    threaded: str = "onnxruntime",
) -> None:
    """The tree with the scripts. After `limit` seconds a room counts as hanging.

    `libraries`: what the process has imported of which the short suite's rooms are forks; None: they are no forks.
    `threaded`: what each fork loads by itself.
    """
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "scripts").mkdir(exist_ok=True)
    for name in ("mutants.py", "processes.py", "recorder.py", "recorded.py", "report.py"):
        shutil.copy(SCRIPTS / name, root / "scripts")
    changed = [
        ("test_rooms.py", "LIMIT_SECONDS = {False: 900, True: 6 * 3600}", f"{{False: {limit}, True: {limit}}}"),
        ("test_rooms.py", "FORKED_FROM = 12", f"{99 if libraries is None else 1}"),
        ("forker.py", "LIBRARIES = (", f"{libraries}\n_ = ("),
        ("forker.py", 'THREADED = "onnxruntime"', f"{threaded!r}"),
    ]
    for name, line, value in changed:
        path = root / "scripts" / name
        text = (path if path.exists() else SCRIPTS / name).read_text()
        assert line in text
        path.write_text(text.replace(line, f"{line.partition(' = ')[0]} = {value}"))
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)


def call(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/test_rooms.py", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def run(root: Path, *arguments: str) -> tuple[int, list[str], list[str], str]:
    """The exit code, the lines of the table at the end without their seconds, those of failures, and the last line."""
    done = call(root, *arguments)
    assert done.stderr == ""
    _, told = done.stdout.split("seconds per room, three at a time, and of processors\n")
    table, *failures, last = told.strip().split("\n\n")
    return (
        done.returncode,
        [re.sub(r" +\d+\.\d(?=  |$)", "", line).strip() for line in table.splitlines()],
        [line.strip() for part in failures for line in part.splitlines()],
        last,
    )


def sections(root: Path) -> dict[str, list[str]]:
    """Of the report, with the lines' spaces as one."""
    title, *parts = (root / "build/test-report.txt").read_text().split("\n== ")
    assert "suite of " in title
    lines = {part.splitlines()[0]: part.splitlines()[1:] for part in parts}
    return {name: [" ".join(line.split()) for line in found if line] for name, found in lines.items()}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("libraries", [None, ("json",)], ids=["processes", "forks"])
def test_what_fails_and_what_hangs_are_told_at_the_end(libraries: tuple[str, ...] | None, tmp_path: Path) -> None:
    # Long enough for the other rooms on a busy machine.
    build(tmp_path, TREE, 12, libraries)
    code, table, failures, last = run(tmp_path)
    assert code == 1
    assert table == ["bad  FAILED", "endless  FAILED", "good", "all rooms"]
    assert failures == [
        "failures, and what runs each alone",
        "FAILED tests/bad/test_bad.py::test_no - assert not 1",
        f"{PYTEST} tests/bad/test_bad.py::test_no",
        "endless: stopped after 12 s in tests/endless/test_endless.py::test_it",
        f"{PYTEST} tests/endless/test_endless.py::test_it",
    ]
    assert last == "1 passed, 1 failed, 0 skipped"
    told = sections(tmp_path)
    assert list(told) == ["rooms", "failures, and what runs each alone", "slowest 30 tests"]
    assert re.fullmatch(r"good \d+\.\d \d+\.\d 1 0 0", told["rooms"][3])
    assert re.fullmatch(r"bad \d+\.\d \d+\.\d 0 1 0 FAILED", told["rooms"][1])
    assert told["failures, and what runs each alone"] == failures[1:]


@pytest.mark.sampled(every=3)
def test_all_of_it_with_mutations_after_a_room_that_failed(tmp_path: Path) -> None:
    build(tmp_path, TREE)
    code, table, failures, last = run(tmp_path, "--all", "good", "bad")
    assert code == 1
    assert table == ["bad  FAILED", "good", "mutants", "all rooms"]
    assert failures[1] == "FAILED tests/bad/test_bad.py::test_no - assert not 1"
    assert last == "2 passed, 1 failed, 0 skipped"
    told = sections(tmp_path)
    assert any("room.py" in line or "TOTAL" in line for line in told["coverage"])
    assert any("good/older" in line and line.startswith("killed") for line in told["mutations"])


@pytest.mark.sampled(every=3)
def test_nothing_failed(tmp_path: Path) -> None:
    build(tmp_path, TREE)
    assert run(tmp_path, "--all", "good") == (0, ["good", "mutants", "all rooms"], [], "2 passed, 0 failed, 0 skipped")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("libraries", [None, ("json",)], ids=["processes", "forks"])
def test_what_a_room_dies_of_is_told(libraries: tuple[str, ...] | None, tmp_path: Path) -> None:
    """A process that ends in the middle, a file that cannot be imported, a fixture that fails; and what was skipped."""
    build(tmp_path, {**OTHER_ROOMS, "pyproject.toml": TREE["pyproject.toml"]}, libraries=libraries)
    code, table, failures, last = run(tmp_path, "broken", "crash")
    assert (code, table) == (1, ["broken  FAILED", "broken/deep  FAILED", "crash  FAILED", "all rooms"])
    assert [line for line in failures if not line.startswith(PYTEST)][1:] == [
        "ERROR tests/broken/test_broken.py - " + failures[1].partition(" - ")[2],
        "ERROR tests/broken/deep/test_deep.py::test_it - OSError: gone",
        "crash: pytest ended with 3 in tests/crash/test_crash.py::test_it: see above",
    ]
    assert f"{PYTEST} tests/crash/test_crash.py::test_it" in failures
    assert last == "1 passed, 2 failed, 1 skipped"
    assert sections(tmp_path)["skipped"] == ["no moon", "1 in tests/broken/deep/test_deep.py"]


SPAWNS = """import multiprocessing
import os


def test_it():
    for way in ("spawn", "forkserver"):
        process = multiprocessing.get_context(way).Process(target=os.getpid)
        process.start()
        process.join()
        assert process.exitcode == 0, way
"""


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("libraries", [None, ("json",)], ids=["processes", "forks"])
def test_rooms_start_processes_of_their_own(libraries: tuple[str, ...] | None, tmp_path: Path) -> None:
    build(tmp_path, {"tests/spawns/test_it.py": SPAWNS}, libraries=libraries)
    assert call(tmp_path, "spawns").returncode == 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("wrong", [False, True])
def test_lint_runs_beside_the_rooms(wrong: bool, tmp_path: Path) -> None:
    """Each waits for the other."""
    recipe = "@touch 'go on'; until [ -e waiting ]; do sleep 0.01; done; echo checked" + "; exit 5" * wrong
    room = WAITS.replace("    deadline", "    Path('waiting').touch()\n    deadline")
    build(tmp_path, {"tests/waits/test_it.py": room, "Makefile": f"lint:\n\t{recipe}\n"})
    done = call(tmp_path, "--lint", "waits")
    assert "lint    | checked\n" in done.stdout
    assert ("lint: make lint ended with 2: see above" in done.stdout) == wrong
    assert done.stdout.endswith("1 passed, 0 failed, 0 skipped\n")
    assert done.returncode == wrong


STARTS_A_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("library", ["nothing_like_it", "starts_a_thread"])
def test_rooms_fail_whose_forks_would_lack_something(library: str, tmp_path: Path) -> None:
    build(tmp_path, {**TREE, "scripts/starts_a_thread.py": STARTS_A_THREAD}, libraries=(library,))
    done = call(tmp_path, "good")
    assert done.returncode == 1
    assert "good: pytest ended with -1: see above" in done.stdout
    assert "nothing_like_it" in done.stderr or "2 threads after the imports" in done.stderr


@pytest.mark.sampled(every=3)
def test_each_fork_loads_what_starts_threads(tmp_path: Path) -> None:
    """What is imported before holds the same module."""
    tree = {
        "scripts/starts_a_thread.py": f"{STARTS_A_THREAD}FULL = True\n",
        "scripts/imports_it.py": "import starts_a_thread\n",
        "tests/forks/test_it.py": "import os, imports_it\n\n\ndef test_it():\n"
        "    assert imports_it.starts_a_thread.FULL\n    assert len(os.listdir('/proc/self/task')) == 2\n",
    }
    build(tmp_path, tree, libraries=("imports_it",), threaded="starts_a_thread")
    done = call(tmp_path, "forks")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("libraries", [None, ("json",)], ids=["processes", "forks"])
def test_lines_come_while_the_room_runs(libraries: tuple[str, ...] | None, tmp_path: Path) -> None:
    tree = {"tests/talk/test_a.py": "def test_it(): pass\n", "tests/talk/test_b.py": WAITS}
    build(tmp_path, tree, libraries=libraries)
    process = subprocess.Popen(
        [sys.executable, "scripts/test_rooms.py", "talk"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        seen = next(line for line in process.stdout if "test_a.py" in line)
        (tmp_path / "go on").touch()  # what the second file waits for
        assert process.stdout.read().endswith("2 passed, 0 failed, 0 skipped\n")
    assert seen.startswith("talk    | tests/talk/test_a.py .")
    assert process.returncode == 0


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("asked", "processes"),
    [
        (["bundle", "datasets/a"], {"bundle": ["bundle", "bundle/a", "bundle/b"], "datasets/a": ["datasets/a"]}),
        (["--all", "bundle"], {room: [room] for room in ("bundle", "bundle/a", "bundle/b")}),
    ],
)
def test_short_rooms_of_a_folder_share_a_process(
    asked: list[str], processes: dict[str, list[str]], tmp_path: Path
) -> None:
    rooms = ("bundle", "bundle/a", "bundle/b", "datasets", "datasets/a")
    tree = {f"tests/{room}/test_of_{room.replace('/', '_')}.py": WRITES.replace("ROOM", room) for room in rooms}
    build(tmp_path, {**tree, "archipel/__init__.py": "", "pyproject.toml": TREE["pyproject.toml"]})
    code, table, _, _ = run(tmp_path, *asked)
    assert (code, table) == (0, [*processes, "all rooms"])
    found: dict[str, list[str]] = {}
    for line in sorted((tmp_path / "processes").read_text().splitlines()):
        room, process = line.split()
        found.setdefault(process, []).append(room)
    assert sorted(found.values()) == sorted(processes.values())


@pytest.mark.parametrize(
    ("asked", "rooms", "wrong"),
    [
        ([], "api graph graph/passes server/storage", ""),
        (["graph"], "graph graph/passes", ""),
        (["server", "api"], "api server/storage", ""),
        (["tests/server/storage/"], "server/storage", ""),
        (["grpah", "api"], "", "there is no room grpah; near it: graph"),
        (["storage"], "", "there is no room storage; near it: server/storage"),
        (["xyz"], "", "there is no room xyz; there are api, graph, graph/passes, server/storage"),
    ],
)
def test_rooms_by_name(asked: list[str], rooms: str, wrong: str, tmp_path: Path) -> None:
    names = ["api", "graph", "graph/passes", "server/storage"]
    build(tmp_path, {f"tests/{name}/test_it.py": "" for name in names})
    done = call(tmp_path, "--list", *asked)
    assert done.stdout.split() == rooms.split()
    assert done.stderr.strip() == wrong
    assert done.returncode == (2 if wrong else 0)
