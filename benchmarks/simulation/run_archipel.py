"""archipel's simulation of a bundle, with the sums of secure rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tasks import Prepared, Task, load, parts, serve

import archipel
from archipel.bundle import open_bundle
from archipel.lite_runtime import Runtime
from archipel.simulation import SplitClients


def prepare(task: Task, rounds: int, folder: Path) -> Prepared:
    x, y = load(folder, mapped=True)
    clients = SplitClients({"input": x, "label": y}, parts(len(x), task))
    publisher = (folder / f"{task.name}.pub").read_bytes()
    bundle = open_bundle(folder / f"{task.name}.bundle", [publisher], folder / "cache", allow_development=True)

    def run() -> Any:
        return archipel.simulate(bundle, clients, rounds=rounds, cohort=task.cohort, workers=task.workers)

    def measure(result: Any) -> float:
        runtime = Runtime(bundle)
        runtime.set_parameters({name: np.asarray(array) for name, array in result.parameters.items()})
        x, y = np.load(folder / "tx.npy"), np.load(folder / "ty.npy")
        answers = np.asarray(runtime.predict(x))
        return float((answers.argmax(axis=1) == y).mean())

    return run, measure


if __name__ == "__main__":
    serve(prepare)
