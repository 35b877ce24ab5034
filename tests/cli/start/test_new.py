"""`archipel new`: its templates run as they are, and own data in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archipel.cli.start.up.sources import told_reason
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


@pytest.mark.sampled(every=4)
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


@pytest.mark.sampled(every=4)
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
        "archipel: federation.py, line 1: ValueError: no such camera; mend it, and run `python federation.py` to see "
        "more\n"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\nraise KeyError('y')", ", line 2: KeyError: 'y'"),
        ("def f():\n    1 / 0\ntry:\n    f()\nexcept Exception as e:\n    raise OSError('failed\\nmore\\n') from e",
         ", line 2: ZeroDivisionError: division by zero"),
        ("try:\n    1 / 0\nexcept Exception:\n    raise OSError('second')", ", line 4: OSError: second"),
        ("x = = 1", ", line 1: SyntaxError: invalid syntax"),
        ("raise ValueError('Could not guard on data-dependent expression')",
         ", line 1: ValueError: Could not guard on data-dependent expression (forward decides by values in Python, of "
         "which a graph knows nothing: use torch.where)"),
        ("raise SystemExit('no data here')", ": no data here"),
        ("raise SystemExit(3)", ""),
    ],
)  # fmt: skip
def test_the_first_error_of_own_code_is_told_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "federation.py").write_text(text)
    done = subprocess.run([sys.executable, "federation.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert told_reason(done.stderr) == reason


def test_a_template_takes_float64_and_tells_which_layer_does_not_fit(tmp_path: Path, archipel: Command) -> None:
    archipel("new", str(tmp_path / "mine"), "--template", "tabular")
    text = (tmp_path / "mine/federation.py").read_text()
    made: dict[str, Any] = {"__name__": "federation"}
    exec(text, made)
    data = {"x": np.zeros((6, 5)), "y": np.arange(6)}
    model, example = made["fit_model"](data)
    assert str(example.dtype) == "torch.float32"
    assert model(example).shape == (2, 6)
    model, example = made["fit_model"]({"x": torch.zeros(6, 5), "y": torch.arange(6)})
    assert model(example).shape == (2, 6)
    exec(text.replace("nn.ReLU()", "nn.Linear(7, 32)"), made)
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(2x32 and 7x32\)"):
        made["fit_model"](data)
