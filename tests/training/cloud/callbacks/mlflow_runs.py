"""Trains with MLflow's logger into the database that is named, and prints what MLflow then says: JSON.

Run by a Python that has MLflow: mlflow_runs.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import logged
import mlflow


def read(uri: str, number: int) -> dict[str, Any]:
    """The run of this number, from the oldest on."""
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs(["0"], order_by=["attributes.start_time ASC"])
    run = runs[number]
    metrics = {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return {
        "count": len(runs), "id": run.info.run_id, "status": run.info.status, "params": dict(run.data.params),
        "metrics": metrics, "tags": {k: v for k, v in run.data.tags.items() if k.startswith("archipel")},
    }  # fmt: skip


def main() -> None:
    uri = f"sqlite:///{Path(sys.argv[1])}/mlflow.db"
    found: dict[str, Any] = {"told": logged.told(logged.finish(mlflow=uri))}
    found["finished"] = read(uri, 0)
    model = mlflow.pyfunc.load_model(f"runs:/{found['finished']['id']}/model")
    (answers,) = model.predict(logged.X[:4]).values()
    found["answers"] = answers.tolist()

    found["error"] = logged.fail(mlflow=uri)
    found["failed"] = read(uri, 1)

    try:
        raise ValueError
    except ValueError:  # an error that has nothing to do with the training
        logged.finish(mlflow=uri)
    found["beside an error"] = read(uri, 2)

    with mlflow.start_run() as run:
        logged.finish(mlflow=uri)
        found["one of the caller"] = read(uri, 3)
        found["still active"] = mlflow.active_run().info.run_id == run.info.run_id

    logged.two_outputs(mlflow=uri)
    found["two outputs"] = read(uri, 4)
    found["no store"] = logged.fail(mlflow="ftp://me:secret@nowhere")
    print(json.dumps(found))


main()
