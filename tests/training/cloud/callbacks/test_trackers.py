"""MLflow and W&B get what a training has: the packages themselves, each in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.environments import ROOT, other_python

HERE = Path(__file__).parent
SETTINGS = {"loss": "cross_entropy", "schedule": "cosine", "epochs": "3", "batch_size": "20", "metrics": "['F1Score']"}
NAN = "the arrays, row 59: field 'input' is nan; correct it or leave the example out"

pytestmark = pytest.mark.slow


def printed(python: Path, script: str, folder: Path) -> dict[str, Any]:
    """The JSON that the script prints, run in this folder, whose home it also is."""
    own = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    left = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV", "XDG"))}
    done = subprocess.run(
        [python, HERE / script, folder], capture_output=True, text=True, cwd=folder, env=left | own, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python = other_python("mlflow", "mlflow==3.17.2", beside=True)
    return printed(python, "mlflow_runs.py", tmp_path_factory.mktemp("mlflow"))


@pytest.fixture(scope="module")
def wandb(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python = other_python("wandb", "wandb==0.31.0", beside=True)
    return printed(python, "wandb_runs.py", tmp_path_factory.mktemp("wandb"))


def test_mlflow_has_settings_metrics_and_model(mlflow: dict[str, Any]) -> None:
    told, run = mlflow["told"], mlflow["finished"]
    assert run["status"] == "FINISHED"
    assert SETTINGS.items() <= run["params"].items()
    assert "mlflow" not in run["params"]  # it may have a password
    updates = [epoch["updates"] for epoch in told["history"]]
    names = set(told["history"][0]) - {"updates"}
    assert set(run["metrics"]) == names | set(told["test"])
    for name in names:
        # JSON keeps every digit of a float64.
        assert run["metrics"][name] == [[epoch["updates"], epoch[name]] for epoch in told["history"]]
    for name, value in told["test"].items():
        assert run["metrics"][name] == [[updates[-1], value]]
    np.testing.assert_allclose(mlflow["answers"], told["answers"], rtol=1e-6)


def test_mlflow_says_how_a_training_ended(mlflow: dict[str, Any]) -> None:
    assert mlflow["error"] == NAN
    assert mlflow["failed"]["status"] == "FAILED"
    assert mlflow["beside an error"]["status"] == "FINISHED"


def test_a_run_of_the_callers_own_stays_open(mlflow: dict[str, Any]) -> None:
    assert mlflow["one of the caller"]["count"] == 4
    assert mlflow["one of the caller"]["status"] == "RUNNING"
    assert "validation/F1Score" in mlflow["one of the caller"]["metrics"]
    assert mlflow["still active"]


def test_mlflow_takes_names_of_outputs_and_tells_what_is_wrong(mlflow: dict[str, Any]) -> None:
    assert mlflow["two outputs"]["status"] == "FINISHED"
    assert {"validation/kind_0_.accuracy", "validation/size_ m².loss"} <= set(mlflow["two outputs"]["metrics"])
    assert mlflow["no store"].startswith("mlflow: ftp://nowhere: Model registry functionality is unavailable")


def test_wandb_has_settings_metrics_and_model(wandb: dict[str, Any]) -> None:
    told, run = wandb["told"], wandb["finished"]
    assert (run["project"], run["exit"]) == ("sorting", 0)
    assert SETTINGS.items() <= run["config"].items()
    for epoch, row in zip(told["history"], run["history"], strict=True):
        assert row["_step"] == epoch.pop("updates")
        assert epoch.items() <= row.items()
    assert told["test"].items() <= run["summary"].items()
    (artefact,) = run["artifacts"]
    assert artefact["type"] == "model"
    assert [each["path"] for each in artefact["manifest"]["contents"]] == ["model.onnx"]
    np.testing.assert_allclose(wandb["answers"], told["answers"], rtol=1e-6)


def test_wandb_says_how_a_training_ended(wandb: dict[str, Any]) -> None:
    assert wandb["error"] == NAN
    assert wandb["failed"]["exit"] == 1
    assert "validation/kind[0].accuracy" in wandb["two outputs"]["history"][0]
    assert wandb["no key"].startswith("wandb: sorting: ")
