"""The other end of lite_peers.py: answers requests, one JSON object a line, in a peer's own environment.

Requests come on standard input, answers go to the file descriptor that is the only argument.
Needs NumPy and nothing of this project. Requests: load, outputs, time, profile, quit.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from typing import Any, Protocol

import numpy as np


class Model(Protocol):
    """A network ready to run; `predict` takes the array that `prepare` made of an example and returns a new one."""

    def prepare(self, x: np.ndarray) -> Any: ...
    def predict(self, x: Any) -> np.ndarray: ...


class Engine(Protocol):
    version: str

    def load(self, kind: str, files: dict[str, str], threads: int) -> Model: ...


def seconds(model: Model, x: Any, calls: int) -> float:
    """The median of `calls` timed predictions, after three that are not: others have used the caches meanwhile."""
    predict, clock = model.predict, time.perf_counter
    for _ in range(3):
        predict(x)
    times = []
    for _ in range(calls):
        started = clock()
        predict(x)
        times.append(clock() - started)
    return statistics.median(times)


def serve(engine: Engine) -> None:
    # Libraries print to standard output as they like, so answers have a pipe of their own.
    answers = os.fdopen(int(sys.argv[1]), "w")
    models: dict[str, Model] = {}
    inputs: dict[str, np.ndarray] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        kind = request.get("kind", "")
        match request["do"]:
            case "load":
                models.pop(kind, None)
                inputs[kind] = np.load(request["files"]["inputs"])
                models[kind] = engine.load(kind, request["files"], request["threads"])
                return {"version": engine.version}
            case "outputs":
                model = models[kind]
                rows = [np.array(model.predict(model.prepare(x[None]))) for x in inputs[kind]]
                return {"outputs": np.concatenate(rows).tolist()}
            case "time":
                model = models[kind]
                return {"seconds": seconds(model, model.prepare(inputs[kind][:1]), request["calls"])}
            case "profile":
                return {"rows": models[kind].profile(inputs[kind][:1])}  # type: ignore[attr-defined]
        raise ValueError(f"unknown request {request['do']!r}")

    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "quit":
            break
        try:
            reply = answer(request)
        except Exception as error:  # noqa: BLE001  told to the parent, which names the peer and goes on
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(reply), file=answers, flush=True)
