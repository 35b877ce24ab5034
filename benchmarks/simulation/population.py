"""A population whose clients are made when they are drawn: `population.py POPULATION COHORT`, a line a round."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import archipel
from archipel.graph import Model
from archipel.simulation import DrawnClients

EXAMPLES, FEATURES, ROUNDS = 20, 32, 5


def main() -> None:
    population, cohort = int(sys.argv[1]), int(sys.argv[2])
    weights = np.random.default_rng(0).standard_normal((FEATURES, 4))

    def make(number: int) -> dict[str, np.ndarray]:
        inputs = np.random.default_rng(number).standard_normal((EXAMPLES, FEATURES)).astype(np.float32)
        return {"input": inputs, "label": np.argmax(inputs @ weights, axis=1)}

    network = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    model = Model.from_torch(network, torch.zeros(2, FEATURES))
    with tempfile.TemporaryDirectory() as folder:
        clients = DrawnClients(population, EXAMPLES, make)
        result = archipel.simulate(
            model, clients, rounds=ROUNDS, cohort=cohort, batch_size=10, client_axis="on", folder=Path(folder)
        )
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    for row in result.history:
        print(json.dumps({"seconds": row.seconds, "memory": most}))


if __name__ == "__main__":
    main()
