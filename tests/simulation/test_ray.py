"""Workers of a Ray cluster: Ray itself, in an environment of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import Bundle
from tests.support.environments import ROOT, other_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(make: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """SCAFFOLD, whose devices keep control variates, so that what they keep goes from worker to worker."""
    options = {"control_clip": 1000.0, "clip": 50.0, "bits": 24}
    bundle = make("scaffold", strategy_options=options)
    folder, python = tmp_path_factory.mktemp("ray"), other_python("ray", "ray==2.60.0", beside=True)
    own = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    left = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV", "XDG", "RAY"))}
    script = Path(__file__).with_name("ray_runs.py")
    done = subprocess.run(
        [python, script, folder, bundle.folder, bundle.publisher.hex()],
        capture_output=True, text=True, cwd=folder, env=left | own, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("privacy", ["secure", "plain"])
def test_actors_give_the_bits_of_one_process(runs: dict[str, Any], privacy: str) -> None:
    here, there = runs[f"{privacy}, here"], runs[f"{privacy}, Ray"]
    assert there == here
    assert all(counted == 2 for counted, _ in here["clients"].values())


@pytest.mark.parametrize("way", ["at once", "measured"])
def test_many_devices_at_once_in_an_actor(runs: dict[str, Any], way: str) -> None:
    for name, value in runs["secure, here"]["parameters"].items():
        np.testing.assert_allclose(runs[f"{way}, Ray"]["parameters"][name], value, atol=1e-5)


def test_a_lost_actor_s_clients_go_to_another(runs: dict[str, Any]) -> None:
    assert runs["lost once"] == runs["secure, here"]


def test_a_cluster_of_the_caller_s_stays(runs: dict[str, Any]) -> None:
    assert runs["stays"] is True


def test_what_cannot_be_is_told(runs: dict[str, Any]) -> None:
    assert re.match(r"clients \d+ to \d+: 3 workers were lost with them", runs["lost always"]["error"])
    assert runs["too many"]["error"].startswith("workers: 1000 need 1000 CPUs of the cluster, which has 3;")
    assert runs["not there"]["error"].startswith("Ray: RAY_ADDRESS is 127.0.0.1:1: ")
