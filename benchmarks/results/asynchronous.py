"""Synchronous, semi-synchronous and asynchronous tasks by simulated wall-clock, on devices with a heavy tail.

    python benchmarks/results/asynchronous.py            three seeds, about four minutes on two cores
    python benchmarks/results/asynchronous.py --quick    one seed

Every writer of the digits in the package is a device, except for 20 whose digits are for tests. A device takes
Pareto(alpha) seconds a step, from 0.05 on: with alpha 1.1 every hundredth device is more than 65 times as slow as the
fastest. Printed are virtual seconds and megabytes uploaded until the model first has 87 percent of the test digits
right, and what the last of 120 versions reached. A version is made of 10 updates in every mode:

    synchronous          10 devices, all of them
    semi-synchronous     13 devices, the first 10 of them
    asynchronous         FedBuff: 20 devices at work, every 10 updates; those s versions behind count (1 + s)^-0.5
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import arguments, print_alone, state_run
from torch import manual_seed, nn

import archipel
from archipel import datasets
from archipel.simulation import Pacing, Result, SplitClients, Spread, System

GOAL, UPDATES, ROUNDS, TESTERS = 0.87, 10, 120, 20
MODES = {
    "synchronous": (UPDATES, Pacing(mode="synchronous")),
    "semi-synchronous": (13, Pacing(goal=UPDATES)),
    "asynchronous": (UPDATES, Pacing(mode="asynchronous", concurrency=2 * UPDATES)),
}


def run(mode: str, alpha: float, seed: int) -> Result:
    """One run of 120 versions."""
    digits = datasets.digits_by_writer()
    images = (digits.images.reshape(-1, 784) / 255).astype(np.float32)
    labels = digits.labels.astype(np.int64)
    writers = np.random.default_rng(seed).permutation(np.unique(digits.writers))
    tested = np.isin(digits.writers, writers[:TESTERS])
    parts = [np.flatnonzero(digits.writers == writer) for writer in writers[TESTERS:]]
    manual_seed(seed)
    network = nn.Sequential(OrderedDict(hidden=nn.Linear(784, 32), relu=nn.ReLU(), output=nn.Linear(32, 10)))
    cohort, pacing = MODES[mode]
    return archipel.simulate(
        network, SplitClients({"input": images, "label": labels}, parts), rounds=ROUNDS, cohort=cohort, seed=seed,
        epochs=2, batch_size=16, test=(images[tested], labels[tested]), test_every=2, privacy="plain", mode=pacing,
        system=System(seconds_per_step=Spread(best=0.05, alpha=alpha), up=Spread(median=2.5e5, sigma=1.0)),
        client_axis="on",
    )  # fmt: skip


def reached(result: Result) -> tuple[float, float, float]:
    """Virtual seconds and megabytes until the goal, infinite where it was not reached; the last accuracy."""
    megabytes = np.cumsum([row.bytes_up for row in result.history]) / 1e6
    last = result.history[-1].tested["accuracy"]
    for row in result.history:
        if row.tested.get("accuracy", 0.0) >= GOAL:
            return row.time, float(megabytes[row.number - 1]), last
    return np.inf, np.inf, last


def main() -> None:
    options = arguments(__doc__).parse_args()
    state_run(options.json, ("numpy", "onnxruntime", "torch"))
    for alpha in (1.1, 3.0):
        for mode in MODES:
            found = np.array([reached(run(mode, alpha, seed)) for seed in range(1 if options.quick else 3)])
            seconds, megabytes, last = found.T
            if options.json:
                named = {"virtual_seconds": float(seconds.mean()), "MB_up": float(megabytes.mean())}
                print_alone("asynchronous", f"alpha {alpha}, {mode}", **named, **{"%_at_last": 100 * last.mean()})
            else:
                each = " ".join(f"{value:.0f}" for value in seconds)
                print(
                    f"alpha {alpha}  {mode:17} {seconds.mean():6.0f} s to 87% ({each})  {megabytes.mean():6.1f} MB up  "
                    f"last {100 * last.mean():.1f}%",
                    flush=True,
                )


if __name__ == "__main__":
    main()
