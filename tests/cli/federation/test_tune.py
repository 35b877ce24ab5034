"""`archipel tune`: what it prints and writes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from archipel.simulation import load_federation
from tests.cli.federation.test_simulate import FILE, Command, file  # noqa: F401  (fixture)

TUNE = """
[tune]
trials = 3
lr = { low = 0.01, high = 1.0, log = true }
"""


@pytest.mark.sampled(every=6)
def test_trials_are_shown_and_the_best_is_written(
    archipel: Command,
    file: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    file.write_text(FILE + TUNE)
    out, _ = archipel("tune", str(file), "--plot", str(tmp_path / "tuning.svg"))
    lines = out.splitlines()
    assert [line[:10] for line in lines[:3]] == ["trial   0:", "trial   1:", "trial   2:"]
    best = load_federation(tmp_path / "federation-tuned.toml")
    rate = best.settings.hyperparameters["lr"]
    assert lines[4].startswith("best test accuracy: ")
    assert lines[4].endswith(f"lr {rate:.4g}")
    assert lines[5:] == [f"written to {tmp_path / 'federation-tuned.toml'}", f"written to {tmp_path / 'tuning.svg'}"]
    # The same command has nothing more to do; with more trials it goes on.
    out, _ = archipel("tune", str(file), "--trials", "4", "--json")
    found = json.loads(out)
    assert [row["number"] for row in found["trials"]] == [0, 1, 2, 3]
    assert found["metric"] == "test accuracy"


def test_mistakes_are_one_line(archipel: Command, file: Path, tmp_path: Path) -> None:  # noqa: F811
    _, error = archipel("tune", str(file), code=1)
    assert "tune: is missing; give a table [tune]" in error
    _, error = archipel("tune", str(file), "--output", str(tmp_path / "else" / "best.toml"), code=1)
    assert "must lie beside" in error


@pytest.mark.slow
def test_a_tuning_that_is_killed_twice_ends_as_one_that_is_not(file: Path, tmp_path: Path) -> None:  # noqa: F811
    file.write_text(FILE.replace("rounds = 4", "rounds = 6") + TUNE)
    call = [sys.executable, "-u", "-c", "from archipel.cli.main import main; main()", "tune", str(file), "--folder"]
    for line in ("trial   0:", "trial   1:"):
        process = subprocess.Popen([*call, str(tmp_path / "killed")], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout:
            assert any(each.startswith(line) for each in process.stdout)
            process.kill()
        assert process.wait() == -signal.SIGKILL
    found = [
        subprocess.run([*call, str(tmp_path / name), "--json"], capture_output=True, text=True, check=True).stdout
        for name in ("killed", "whole")
    ]
    assert found[0] == found[1]
    assert len(json.loads(found[0])["trials"]) == 3
