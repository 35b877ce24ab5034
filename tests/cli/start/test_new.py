"""`archipel new`: its templates run as they are, and own data in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from archipel.simulation import load_federation
from tests.support.commands import Command
from tests.support.development import place_development_key

OWN = """
def load_data():
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, 60)
    return {"x": (y[:, None] + rng.normal(0, 0.1, (60, 5))).astype(np.float32), "y": y}

"""


@pytest.mark.slow  # tests/docs/quickstart runs that of pictures in each suite
@pytest.mark.parametrize("template", ["tabular", "image", "sensor"])
def test_a_template_is_federated_by_up(
    tmp_path: Path, archipel: Command, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    place_development_key(tmp_path / "config")
    out, _ = archipel("new", str(tmp_path / "mine"), "--template", template)
    assert "archipel up" in out
    program = tmp_path / "mine/federation.py"
    if template == "tabular":
        # Own data: one function is another.
        text = program.read_text()
        begin, end = text.index("def load_data"), text.index("def make_model")
        program.write_text(text[:begin] + OWN.lstrip() + "\n" + text[end:])
    done = subprocess.run(
        [sys.executable, "-m", "archipel", "up", "--devices", "2", "--rounds", "1"], cwd=tmp_path / "mine",
        capture_output=True, text=True, env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "round 1 of 1: 2 devices" in done.stdout
    made = tmp_path / "mine/federation"
    assert (made / "curves.png").exists()
    with np.load(made / "devices/1/data.npz") as own:
        assert set(own) == {"x", "label"}
        assert own["x"].shape[1:] == {"tabular": (5,), "image": (1, 16, 16), "sensor": (3, 64)}[template]
    # Data that were changed are not passed over in silence.
    program.write_text(program.read_text() + "\n# changed\n")
    monkeypatch.chdir(tmp_path / "mine")
    _, err = archipel("up", code=1)
    assert err == (
        "archipel: --folder federation: holds a federation with other federation.py; choose another --folder\n"
    )


@pytest.mark.sampled(every=2)
def test_a_new_folder_is_simulated(tmp_path: Path, archipel: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands from nothing to curves; and the task of a server is read from the same file."""
    archipel("new", str(tmp_path / "mine"), "--template", "tabular")
    monkeypatch.chdir(tmp_path / "mine")
    out, _ = archipel("simulate", "federation.toml", "--plot", "curves.png")
    assert "federation.toml: 16 devices, 8 a round, 20 rounds" in out
    assert float(re.findall(r"^test: accuracy ([\d.]+)", out, re.M)[0]) > 0.8  # of three classes
    assert (tmp_path / "mine/curves.png").read_bytes().startswith(b"\x89PNG")
    assert load_federation("federation.toml").task_request("0" * 64).name == "mine"
    compile((tmp_path / "mine/run.py").read_text(), "run.py", "exec")


@pytest.mark.slow
def test_run_py_compares_strategies(tmp_path: Path, archipel: Command) -> None:
    archipel("new", str(tmp_path / "mine"))
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path / "mine", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    accuracies = re.findall(r"^(\w+): .*'accuracy': ([\d.]+)", done.stdout, re.M)
    assert [name for name, _ in accuracies] == ["fedavg", "scaffold"]
    assert all(float(accuracy) > 0.8 for _, accuracy in accuracies)
    assert (tmp_path / "mine/scaffold.png").exists()


@pytest.mark.sampled(every=2)
def test_mistakes_are_told(tmp_path: Path, archipel: Command) -> None:
    archipel("new", str(tmp_path / "mine"))
    _, err = archipel("new", str(tmp_path / "mine"), code=1)
    assert "exists already" in err
    _, err = archipel("new", str(tmp_path / "with space"), code=1)
    assert "a name has letters" in err
    (tmp_path / "mine/federation.py").write_text("raise ValueError('no such camera')")
    done = subprocess.run(
        [sys.executable, "-m", "archipel", "up"], cwd=tmp_path / "mine", capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == (
        "archipel: federation.py: ValueError: no such camera; mend it, and run `python federation.py` to see where\n"
    )
