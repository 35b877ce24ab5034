"""The tables of docs/results.md: how rounds are counted, that the page names each script, and that each one runs."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from archipel import datasets

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "results"
SCRIPTS = sorted(file.stem for file in FOLDER.glob("*.py") if "__main__" in file.read_text(encoding="utf-8"))
NEEDS = {
    "fedavg_paper": "digits",
    "niid_bench": "digits",
    "robust": "digits",
    "byzfl_grid": "digits",
    "shakespeare": "roles",
}
"""What lies in the folder that the script reads; others take the digits of the package."""
OWN = {"personalisation": ["--only", "digits"]}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import tables

    return tables


def test_rounds_until_a_goal_lie_on_the_line_between_two(tables: ModuleType) -> None:
    """McMahan et al. 2017, section 3: the best accuracy so far, and where its line crosses the goal."""
    curve = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.7), (4.0, 0.98), (5.0, 0.96)]
    assert tables.rising(curve) == [(1.0, 0.5), (2.0, 0.9), (3.0, 0.9), (4.0, 0.98), (5.0, 0.98)]
    for goal in (0.55, 0.8, 0.91, 0.98):
        expected = np.interp(goal, [0.5, 0.9, 0.9, 0.98], [1.0, 2.0, 3.0, 4.0])
        assert tables.reaches(curve, goal) == pytest.approx(expected)
    assert tables.reaches(curve, 0.4) == 1.0
    assert tables.reaches(curve, 0.99) == math.inf


def test_the_spread_is_over_the_seeds(tables: ModuleType) -> None:
    assert tables.spread([87.0, 89.0, 91.0], 2) == f"89.00 ± {np.std([87.0, 89.0, 91.0]):.2f}"
    assert tables.spread([3.14]) == "3.1"
    assert tables.spread([3.0, math.inf]) == "not reached"


def test_the_page_has_a_command_for_each_script() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python benchmarks/results/(\w+)\.py(.*)$", text, re.M)
    assert {script for script, _ in commands} == set(SCRIPTS)
    shared = (FOLDER / "tables.py").read_text(encoding="utf-8") + (ROOT / "benchmarks" / "measure.py").read_text()
    for script, given in commands:
        code = (FOLDER / f"{script}.py").read_text(encoding="utf-8")
        for option in re.findall(r"--[\w-]+", given):
            assert f'"{option}"' in code + shared, (script, option)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits of the package as MNIST's four files, and the project's pages as roles."""
    made = tmp_path_factory.mktemp("data")
    digits = datasets.digits_by_writer()
    rows = np.random.default_rng(0).permutation(len(digits))
    for part, own in (("train", rows[:6000]), ("t10k", rows[6000:6500])):
        for name, kind, array in (("images-idx3", 3, digits.images[own]), ("labels-idx1", 1, digits.labels[own])):
            head = struct.pack(f">HBB{kind}I", 0, 8, kind, *array.shape)
            (made / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes(), 1))
    pages = sorted((ROOT / "docs").glob("*.md"))[:12]
    roles = {page.stem: [page.read_text(encoding="utf-8")[:2000]] for page in pages}
    (made / "by_role.json.gz").write_bytes(gzip.compress(json.dumps(roles).encode()))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_quick_run_gives_rows(script: str, folder: Path, tmp_path: Path) -> None:
    where = ["--data", str(folder)] if script in NEEDS else []
    command = [sys.executable, str(FOLDER / f"{script}.py"), *where, *OWN.get(script, []), "--quick", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["benchmark"] for row in rows} == {script}
    assert any(row["ours"] for row in rows)
