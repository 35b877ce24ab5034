"""Somebody hands over, or may write, the folder of a tuning, and wants code of their own to run where it goes on.

The file that is tuned is not theirs. The folder has an SQLite file with trials, whose values become settings of the
federation's file, and settings name code (`model.python`). What stops them: a trial has exactly the names that the
file's [tune] has, with values that it allows; anything else is refused before a trial begins or a file is written.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from archipel.errors import SimulationError
from archipel.simulation import Tuning, tune

FEDERATION = """
rounds = 2
cohort = 2
model = { python = "own.py:network" }
data = { train = "data.npz", test = "test.npz" }
partition = { how = "iid", clients = 3 }
training = { optimizer = { name = "sgd", lr = 0.2 }, batch_size = 4 }
run = { client_axis = "off" }
[tune]
trials = 1
lr = [0.1, 0.2]
"""
NETWORK = "from torch import nn\n\ndef network():\n    return nn.Linear(2, 2)\n"
EVIL = "from pathlib import Path\nPath(__file__).with_name('taken').touch()\n" + NETWORK
Attack = tuple[str, str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    x = np.eye(2, dtype=np.float32).repeat(6, axis=0)
    for name in ("data", "test"):
        np.savez(tmp_path / f"{name}.npz", x=x, y=x.argmax(axis=1))
    (tmp_path / "own.py").write_text(NETWORK)
    (tmp_path / "federation.toml").write_text(FEDERATION)
    return tmp_path / "federation.toml"


def prepare(file: Path, folder: Path, attack: Attack | None) -> Tuning:
    """A tuning that was stopped in its first trial, whose file somebody then changed: another setting, or value."""
    found = tune(file, folder=folder, on_round=lambda trial, row: False)
    (folder / "evil.py").write_text(EVIL)
    if attack is not None:
        name, value = attack
        choices = {"name": "CategoricalDistribution", "attributes": {"choices": [value, value + "'"]}}
        with sqlite3.connect(folder / "trials.db") as database:
            changed = database.execute(
                "UPDATE trial_params SET param_name = ?, param_value = 0.0, distribution_json = ?",
                (name, json.dumps(choices)),
            )
            assert changed.rowcount == 1
    return found


@pytest.mark.parametrize("attack", [("model.python", "tuning/evil.py:network"), ("lr", "0.3")])
@pytest.mark.sampled(every=8)
def test_a_trial_with_other_settings_than_those_that_are_tuned_is_refused(
    file: Path, tmp_path: Path, attack: Attack
) -> None:
    prepare(file, tmp_path / "tuning", attack)
    with pytest.raises(SimulationError, match=r"trials\.db: trial 0 has other settings or values than \[tune\] allows"):
        tune(file, folder=tmp_path / "tuning")
    assert not (tmp_path / "tuning" / "taken").exists()


@pytest.mark.sampled(every=4)
def test_the_same_folder_without_the_change_goes_on(file: Path, tmp_path: Path) -> None:
    stopped = prepare(file, tmp_path / "tuning", None)
    assert [trial.state for trial in stopped.trials] == ["running"]
    found = tune(file, folder=tmp_path / "tuning")
    assert [(trial.state, trial.values) for trial in found.trials] == [("complete", stopped.trials[0].values)]
