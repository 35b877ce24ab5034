"""Synchronous, semi-synchronous and asynchronous tasks by simulated wall-clock, on devices with a heavy tail.

    python benchmarks/results/asynchronous.py            three seeds, about four minutes on two cores
    python benchmarks/results/asynchronous.py --quick    one seed and tail, 40 versions

Every writer of the digits in the package is a device, except for 20 whose digits are for tests. A device takes
Pareto(alpha) seconds a step, from 0.05 on: with alpha 1.1 every hundredth device is more than 65 times as slow as the
fastest. Printed are virtual seconds and megabytes uploaded until the model first has 87 percent of the test digits
right, and what the last of 120 versions reached. A version is made of 10 updates in every mode:

    synchronous          10 devices, all of them
    semi-synchronous     13 devices, the first 10 of them
    asynchronous         FedBuff: 20 devices at work, every 10 updates; those s versions behind count (1 + s)^-0.5
"""

from __future__ import annotations

import argparse
from collections import OrderedDict

import numpy as np
from tables import Curve, Table, draw_curves, result_arguments, spread
from torch import manual_seed, nn

import archipel
from archipel import datasets
from archipel.simulation import Pacing, SplitClients, Spread, System

GOAL, UPDATES, ROUNDS, TESTERS = 0.87, 10, 120, 20
ALPHAS = (1.1, 3.0)
MODES = {
    "synchronous": (UPDATES, Pacing(mode="synchronous")),
    "semi-synchronous": (13, Pacing(goal=UPDATES)),
    "asynchronous": (UPDATES, Pacing(mode="asynchronous", concurrency=2 * UPDATES)),
}


Point = tuple[float, float, float]
"""Virtual seconds, megabytes uploaded so far, accuracy."""


def run(mode: str, alpha: float, seed: int, rounds: int) -> list[Point]:
    """One run: after every second version."""
    digits = datasets.digits_by_writer()
    images = (digits.images.reshape(-1, 784) / 255).astype(np.float32)
    labels = digits.labels.astype(np.int64)
    writers = np.random.default_rng(seed).permutation(np.unique(digits.writers))
    tested = np.isin(digits.writers, writers[:TESTERS])
    parts = [np.flatnonzero(digits.writers == writer) for writer in writers[TESTERS:]]
    manual_seed(seed)
    network = nn.Sequential(OrderedDict(hidden=nn.Linear(784, 32), relu=nn.ReLU(), output=nn.Linear(32, 10)))
    cohort, pacing = MODES[mode]
    result = archipel.simulate(
        network, SplitClients({"input": images, "label": labels}, parts), rounds=rounds, cohort=cohort, seed=seed,
        epochs=2, batch_size=16, test=(images[tested], labels[tested]), test_every=2, privacy="plain", mode=pacing,
        system=System(seconds_per_step=Spread(best=0.05, alpha=alpha), up=Spread(median=2.5e5, sigma=1.0)),
        client_axis="on",
    )  # fmt: skip
    megabytes = np.cumsum([row.bytes_up for row in result.history]) / 1e6
    return [
        (row.time, float(megabytes[row.number - 1]), row.tested["accuracy"]) for row in result.history if row.tested
    ]


def reached(points: list[Point]) -> tuple[float, float, float]:
    """Virtual seconds and megabytes until the goal, infinite where it was not reached; the last accuracy."""
    last = points[-1][2]
    return next(((*spent, last) for *spent, accuracy in points if accuracy >= GOAL), (np.inf, np.inf, last))


def main() -> None:
    options = result_arguments(__doc__).parse_args()
    if options.quick:
        options.seeds = options.seeds[:1]
    columns = (f"virtual seconds to {GOAL:.0%}", "of each seed", "MB uploaded", "at last")
    table = Table("asynchronous", options, columns)
    panels: dict[str, dict[str, list[Curve]]] = {}
    for alpha in ALPHAS[:1] if options.quick else ALPHAS:
        lines = panels[f"Pareto({alpha:g})"] = {}
        for mode in MODES:
            runs = [cell(mode, alpha, seed, options, table) for seed in options.seeds]
            seconds, megabytes, last = (list(each) for each in zip(*map(reached, runs)))
            table.add(
                f"Pareto({alpha:g}), {mode}",
                [spread(seconds, 0), ", ".join(f"{value:.0f}" for value in seconds), spread(megabytes),
                 spread([100 * value for value in last]) + "%"],
                virtual_seconds=float(np.mean(seconds)), MB_up=float(np.mean(megabytes)),
                **{"%_at_last": 100 * float(np.mean(last))},
            )  # fmt: skip
            lines[mode] = [[(time, accuracy) for time, _, accuracy in runs[0] if time > 0]]
    if options.plot:
        draw_curves(
            options.plot, panels, "virtual seconds, first seed", "test accuracy", [GOAL] * len(panels), log=True
        )


def cell(mode: str, alpha: float, seed: int, options: argparse.Namespace, table: Table) -> list[Point]:
    made = table.cell(f"{mode}-{alpha:g}-{seed}", lambda: run(mode, alpha, seed, 40 if options.quick else ROUNDS))
    return [(time, megabytes, accuracy) for time, megabytes, accuracy in made]


if __name__ == "__main__":
    main()
