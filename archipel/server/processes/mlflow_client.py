"""The part of MLflow's REST API that the sink needs, over the HTTP client that archipel has: no package of MLflow's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import urllib3

MOST_BYTES = 16 << 20
SECONDS = 30.0
_API = "/api/2.0/mlflow/"
_PROXIED = re.compile(r"mlflow-artifacts:/+([A-Za-z0-9][A-Za-z0-9._/-]*)")
_NAME = re.compile(r"[^A-Za-z0-9_. :/-]")


class MlflowError(Exception):
    """MLflow does not answer, or refuses; `code` is its own word for why, empty where it has none."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class MlflowClient:
    """Requests to the MLflow server at `address`. Credentials come from MLflow's own environment variables."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._headers = _credentials(os.environ)
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=1)

    def experiment(self, name: str) -> str:
        """The id of the experiment of that name, which is made if there is none."""
        query = urlencode({"experiment_name": name})
        try:
            found = self._call("GET", f"experiments/get-by-name?{query}")
            return str(found["experiment"]["experiment_id"])
        except MlflowError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return str(self._call("POST", "experiments/create", {"name": name})["experiment_id"])

    def runs(self, experiment: str, tag: str, value: str) -> Iterator[dict[str, Any]]:
        """All runs of the experiment with that tag, the oldest first."""
        wanted: dict[str, Any] = {
            "experiment_ids": [experiment],
            "filter": f"tags.`{tag}` = '{value}'",
            "max_results": 1000,
            "order_by": ["attributes.start_time ASC"],
        }
        while True:
            page = self._call("POST", "runs/search", wanted)
            yield from page.get("runs", [])
            if not page.get("next_page_token"):
                return
            wanted["page_token"] = page["next_page_token"]

    def create_run(self, experiment: str, name: str, tags: Mapping[str, str], started: float) -> dict[str, Any]:
        """A new run, which began at `started` (Unix seconds)."""
        body = {
            "experiment_id": experiment,
            "run_name": name,
            "start_time": int(started * 1000),
            "tags": _pairs(tags),
        }
        run: dict[str, Any] = self._call("POST", "runs/create", body)["run"]
        return run

    def log(
        self,
        run_id: str,
        metrics: Sequence[tuple[str, float, float, int]] = (),
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> None:
        """Add metrics (name, value, Unix seconds, step), then set tags. At most 1,000 metrics."""
        values = [
            {"key": metric_name(name), "value": value, "timestamp": int(1000 * when), "step": step}
            for name, value, when, step in metrics
        ]
        body = {"run_id": run_id, "metrics": values, "tags": _pairs(tags or {}), "params": _pairs(params or {})}
        self._call("POST", "runs/log-batch", body)

    def end(self, run_id: str, status: str, ended: float) -> None:
        """Set a run's status ("FINISHED", "FAILED", "KILLED") and its end (Unix seconds)."""
        self._call("POST", "runs/update", {"run_id": run_id, "status": status, "end_time": int(1000 * ended)})

    def upload(self, run: Mapping[str, Any], name: str, path: Path) -> str | None:
        """Store a file with the run, and return its folder's URI; None where MLflow does not store files itself."""
        uri = str(run["info"]["artifact_uri"])
        place = _PROXIED.fullmatch(uri)
        if place is None:
            return None
        with open(path, "rb") as file:
            target = f"/api/2.0/mlflow-artifacts/artifacts/{quote(place[1])}/{quote(name)}"
            length = {"Content-Length": str(path.stat().st_size), "Content-Type": "application/octet-stream"}
            self._request("PUT", target, file, length)
        return uri

    def register(self, name: str, run_id: str, source: str) -> None:
        """Make the files of a run a version of the registered model `name`, unless they are one already."""
        try:
            self._call("POST", "registered-models/create", {"name": name})
        except MlflowError as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":
                raise
        query = urlencode({"filter": f"run_id = '{run_id}'", "max_results": 1})
        if not self._call("GET", f"model-versions/search?{query}").get("model_versions"):
            self._call("POST", "model-versions/create", {"name": name, "source": source, "run_id": run_id})

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else msgspec.json.encode(body)
        answer = self._request(method, _API + path, data, {"Content-Type": "application/json"})
        try:
            return dict(msgspec.json.decode(answer))
        except (msgspec.DecodeError, TypeError, ValueError):
            raise MlflowError(f"{self._address}: the answer is not MLflow's") from None

    def _request(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> bytes:
        try:
            response = self._pool.request(
                method, self._address + path, body=body, headers={**self._headers, **headers}, retries=False,
                redirect=False, timeout=SECONDS, preload_content=False,
            )  # fmt: skip
            try:
                data = response.read(MOST_BYTES + 1)
            finally:
                response.drain_conn()
                response.release_conn()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise MlflowError(f"{self._address} does not answer ({type(error).__name__})") from None
        if response.status != 200 or len(data) > MOST_BYTES:
            raise MlflowError(f"{self._address} answered {method} {path.partition('?')[0]} with {response.status}",
                              _code(data))  # fmt: skip
        return data


def metric_name(name: str) -> str:
    """The name with '_' for what MLflow does not take."""
    return _NAME.sub("_", name)[:250]


def _code(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data)["error_code"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return ""


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def _credentials(environment: Mapping[str, str]) -> dict[str, str]:
    if token := environment.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    user, password = environment.get("MLFLOW_TRACKING_USERNAME"), environment.get("MLFLOW_TRACKING_PASSWORD")
    return dict(urllib3.make_headers(basic_auth=f"{user}:{password}")) if user and password else {}
