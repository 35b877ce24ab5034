"""Tasks at a real MLflow server, in an environment of its own, read back by MLflow's own client."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import urllib3

from archipel.protocol.uploads import metric_arrays
from archipel.server.processes.mlflow_client import MlflowClient, MlflowError
from archipel.server.processes.mlflow_sink import POSITION_TAG, MlflowSink
from tests.server.rounds.test_evaluation_and_analytics import RANGES, take_part
from tests.server.rounds.test_plain_rounds import update
from tests.support.environments import other_python
from tests.support.patience import stretched
from tests.support.scraping import free_port
from tests.support.world import World

READ = """
import hashlib, json, os, sys
import mlflow
client = mlflow.MlflowClient(sys.argv[1])
found = []
for experiment in client.search_experiments(filter_string="name = 'archipel'"):
    for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]):
        names = sorted(run.data.metrics)
        history = {name: [[m.step, m.value, m.timestamp] for m in client.get_metric_history(run.info.run_id, name)]
                   for name in names}
        files = {}
        for each in client.list_artifacts(run.info.run_id):
            path = client.download_artifacts(run.info.run_id, each.path)
            files[each.path] = hashlib.sha256(open(path, "rb").read()).hexdigest()
        found.append({"id": run.info.run_id, "status": run.info.status, "params": run.data.params,
                      "tags": run.data.tags, "history": history, "files": files})
versions = [[each.name, each.version, each.run_id] for each in client.search_model_versions()]
print(json.dumps([found, versions]))
"""


@dataclass
class Mlflow:
    python: Path
    port: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = os.environ | {"PYTHONPATH": "", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
        with open(self.folder / "mlflow.log", "ab") as log:
            self.process = subprocess.Popen(
                [self.python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port),
                 "--workers", "1",
                 "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db",
                 "--artifacts-destination", str(self.folder / "artifacts")],
                cwd=self.folder, env=environment, stdout=log, stderr=log, process_group=0,
            )  # fmt: skip
        deadline = time.monotonic() + stretched(120)
        while True:
            assert self.process.poll() is None, (self.folder / "mlflow.log").read_text()
            assert time.monotonic() < deadline, (self.folder / "mlflow.log").read_text()
            try:
                if urllib3.request("GET", f"{self.address}/health", retries=False, timeout=2).status == 200:
                    return
            except urllib3.exceptions.HTTPError:
                time.sleep(0.2)

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, 15)
            self.process.wait(20)
            self.process = None

    def read(self) -> tuple[list[dict[str, Any]], list[list[str]]]:
        command = [str(self.python), "-c", READ, self.address]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=os.environ | {"PYTHONPATH": ""}
        )
        assert done.returncode == 0, done.stderr
        found, versions = json.loads(done.stdout)
        return found, versions


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[Mlflow]:
    made = Mlflow(other_python("mlflow", "mlflow==3.17.2"), free_port(), tmp_path)
    made.start()
    yield made
    made.stop()


def one_round(world: World) -> None:
    world.clock.now += 10
    world.start_round(world.devices)
    for index, device in enumerate(world.devices):
        device.updating(**update(index))
    world.settle()


@pytest.mark.slow
def test_a_task_is_a_run_and_each_round_is_told_once(world: World, mlflow: Mlflow) -> None:
    task = world.create_task(privacy="plain", threshold=None, cohort=3, min_cohort=3, rounds=3)
    world.add_devices(3)
    client = MlflowClient(mlflow.address)
    sink = MlflowSink(world.services, client)
    one_round(world)
    sink.step()
    sink.step()
    # MLflow is away for a round: nothing of the server waits, and it gets the round afterwards.
    mlflow.stop()
    one_round(world)
    with pytest.raises(MlflowError, match="does not answer"):
        sink.step()
    mlflow.start()
    # A coordinator that was killed after MLflow had the metrics, and before it had the position.
    [run], _ = mlflow.read()
    early = run["tags"][POSITION_TAG]
    after = MlflowSink(world.services, MlflowClient(mlflow.address))
    after.step()
    client.log(run["id"], tags={POSITION_TAG: early})
    client.log(run["id"], tags={POSITION_TAG: "begun"})
    MlflowSink(world.services, MlflowClient(mlflow.address)).step()
    one_round(world)
    for _ in range(2):
        MlflowSink(world.services, MlflowClient(mlflow.address)).step()
    [run], versions = mlflow.read()
    rounds = [each for each in world.rounds(task["task_id"]) if each["phase"] == "committed"]
    assert len(rounds) == 3
    told = [[each["number"], each["weight_sum"], int(1000 * each["ended"])] for each in rounds]
    assert run["history"]["weight_sum"] == told
    assert [step for step, *_ in run["history"]["step_norm"]] == [1, 2, 3]
    assert run["status"] == "FINISHED"
    assert run["params"]["population"] == "pupils"
    model = world.task(task["task_id"])["model"]
    status, weights = world.operator("GET", f"/v1/blobs/{model}")
    assert status == 200
    assert run["files"] == {"weights.safetensors": hashlib.sha256(weights).hexdigest()}
    assert versions == [["tiny", "1", run["id"]]]
    # Nothing of single devices is there.
    assert not any(device.id in json.dumps(run) for device in world.devices)


@pytest.mark.slow
def test_an_evaluation_is_a_run_with_its_means(world: World, mlflow: Mlflow) -> None:
    world.create_task(kind="evaluation", privacy="plain", cohort=3, threshold=None, metrics=RANGES, max_examples=100)
    devices = world.add_devices(3)
    take_part(world, devices, [metric_arrays({"loss": 0.5, "accuracy": 0.75}, RANGES, 50, 100)] * 3)
    MlflowSink(world.services, MlflowClient(mlflow.address)).step()
    [run], versions = mlflow.read()
    values = {name: [value for _, value, _ in points] for name, points in run["history"].items()}
    assert values == {
        "devices": [3.0],
        "weight_sum": [pytest.approx(3 * 50 / 100)],
        "loss": [pytest.approx(0.5)],
        "accuracy": [pytest.approx(0.75)],
    }
    assert versions == []


def test_where_it_does_not_answer_the_error_names_it_and_no_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a-secret")
    with pytest.raises(MlflowError, match=r"127\.0\.0\.1:9 does not answer") as error:
        MlflowClient("http://127.0.0.1:9").experiment("archipel")
    assert "a-secret" not in str(error.value)
