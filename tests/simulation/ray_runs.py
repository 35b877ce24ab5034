"""Simulations over a Ray cluster of this machine; prints what they gave as JSON. Run by test_ray.py."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray

import archipel
from archipel.bundle import Bundle, open_bundle
from archipel.errors import SimulationError
from archipel.simulation import DrawnClients, SplitClients

CLIENTS = 12


def examples(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    size = 5 + 3 * (number * 7 % CLIENTS)
    return {"input": rng.standard_normal((size, 6), np.float32), "label": rng.integers(0, 3, size)}


def split() -> SplitClients:
    made = [examples(number) for number in range(CLIENTS)]
    ends = np.cumsum([len(each["label"]) for each in made])
    arrays = {name: np.concatenate([each[name] for each in made]) for name in ("input", "label")}
    return SplitClients(arrays, [np.arange(end - len(each["label"]), end) for end, each in zip(ends, made)])


def deadly(mark: Path) -> DrawnClients:
    """The process that first takes client 5 is killed, or with a mark that is a folder every such process."""

    def make(number: int) -> dict[str, np.ndarray]:
        if number == 5 and not mark.is_file():
            if not mark.is_dir():
                mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return examples(number)

    return DrawnClients(CLIENTS, 20, make)


def told(bundle: Bundle, clients: Any, **options: Any) -> dict[str, Any]:
    try:
        result = archipel.simulate(bundle, clients, rounds=2, **{"client_axis": "off", **options})
    except SimulationError as error:
        return {"error": str(error)}
    return {
        "parameters": {name: np.asarray(value).tolist() for name, value in result.parameters.items()},
        "clients": {number: [row.counted, row.loss] for number, row in result.clients.items()},
    }


def main() -> None:
    folder, bundle_folder, key = sys.argv[1:]
    bundle = open_bundle(bundle_folder, [bytes.fromhex(key)])
    marks = Path(folder)
    (marks / "always").mkdir()
    runs = {}
    for privacy in ("secure", "plain"):
        runs[f"{privacy}, here"] = told(bundle, split(), privacy=privacy)
        # The first run starts a cluster of its own, the others find this one.
        runs[f"{privacy}, Ray"] = told(bundle, split(), privacy=privacy, workers=2, cluster="ray")
        if not ray.is_initialized():
            ray.init(address="local", num_cpus=3, include_dashboard=False)
    runs["at once, Ray"] = told(bundle, split(), workers=0, cluster="ray", client_axis="on")
    runs["measured, Ray"] = told(bundle, split(), workers=2, cluster="ray", client_axis="auto")
    runs["lost once"] = told(bundle, deadly(marks / "once"), workers=2, cluster="ray")
    runs["lost always"] = told(bundle, deadly(marks / "always"), workers=2, cluster="ray")
    runs["too many"] = told(bundle, split(), workers=1000, cluster="ray")
    runs["stays"] = ray.is_initialized()
    ray.shutdown()
    runs["not there"] = _at("127.0.0.1:1", bundle)
    print(json.dumps(runs))


def _at(address: str, bundle: Bundle) -> dict[str, Any]:
    os.environ["RAY_ADDRESS"] = address
    try:
        return told(bundle, split(), workers=1, cluster="ray")
    finally:
        del os.environ["RAY_ADDRESS"]


if __name__ == "__main__":
    main()
