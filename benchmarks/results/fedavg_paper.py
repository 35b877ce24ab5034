"""The rounds of federated averaging on MNIST, in the setting of McMahan et al. 2017, tables 1 and 2.

    python benchmarks/results/fedavg_paper.py --data FOLDER               the 2NN, three seeds: about fifteen minutes
    python benchmarks/results/fedavg_paper.py --data FOLDER --cells cnn-iid --rates 0.1 --seeds 0    the CNN, hours
    python benchmarks/results/fedavg_paper.py --data FOLDER --quick       some rounds of the 2NN

100 clients with 600 digits each, drawn evenly (iid) or two shards of digits sorted by label (shards); ten clients a
round, batches of 10, plain SGD at a constant rate. The 2NN trains one epoch a round until 97% of the test digits are
right, the CNN five epochs until 99%. As in the paper the curve is the best accuracy so far, and the number of rounds
lies on the line between two rounds; the rate is the one that takes the fewest rounds, of a grid with the resolution
10^(1/3), here with seed 0. Published are numbers of one run each.

Rounds sum whole numbers, as secure rounds do, with the default clip. What differs: a client of 59,999 digits in all has
599 (the reader keeps one for validation); shards lie in the order of the file within a label.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

import numpy as np
from tables import Table, draw_curves, reaches, result_arguments, rising, spread

import archipel
from archipel import datasets
from archipel.models import fedavg_cnn, mlp
from archipel.simulation import RoundRow, SplitClients
from archipel.training import optimizers

CLIENTS, COHORT, BATCH = 100, 10, 10
RATES = (0.0464, 0.1, 0.215, 0.464)


@dataclass(frozen=True)
class Cell:
    """A cell of the paper's tables. `most` rounds are run at the most; `published` are the paper's."""

    network: str
    partition: str
    epochs: int
    goal: float
    most: int
    published: int


CELLS = {
    "2nn-iid": Cell("2nn", "iid", 1, 0.97, 300, 87),
    "2nn-shards": Cell("2nn", "shards", 1, 0.97, 1000, 664),
    "cnn-iid": Cell("cnn", "iid", 5, 0.99, 60, 20),
    "cnn-iid-1": Cell("cnn", "iid", 1, 0.99, 100, 34),
    "cnn-shards-1": Cell("cnn", "shards", 1, 0.99, 500, 350),
}


def run(
    name: str, rate: float, seed: int, options: argparse.Namespace, table: Table, most: float = math.inf
) -> list[tuple[float, float]]:
    """The accuracy after each round until the goal, of `most` rounds at the most."""
    cell, key = CELLS[name], f"{name}-{rate:g}-{seed}"

    def make() -> list[tuple[float, float]]:
        data = datasets.mnist(options.data, validation=1, flat=cell.network == "2nn")
        labels = data.train.labels.astype(np.int64)
        parts = (
            datasets.split_iid(len(labels), CLIENTS, seed=seed) if cell.partition == "iid"
            else datasets.split_shards(labels, CLIENTS, seed=seed)
        )  # fmt: skip

        def goes_on(row: RoundRow) -> bool:
            print(f"{key}: round {row.number}: {row.tested} {row.failed}", file=sys.stderr)
            return row.tested["accuracy"] < cell.goal and row.number < most

        result = archipel.simulate(
            (mlp if cell.network == "2nn" else fedavg_cnn)(seed),
            SplitClients({"input": data.train.inputs, "label": labels}, parts),
            rounds=10 if options.quick else options.rounds or cell.most, cohort=COHORT, epochs=cell.epochs,
            batch_size=BATCH, optimizer=optimizers.sgd(lr=rate),
            test=(data.test.inputs, data.test.labels.astype(np.int64)), seed=seed,
            client_axis="off", on_round=goes_on, folder=table.run_folder(key),
        )  # fmt: skip
        return [(float(row.number), row.tested["accuracy"]) for row in result.history]

    return [(float(where), float(value)) for where, value in table.cell(key, make)]


def choose_rate(name: str, options: argparse.Namespace, table: Table) -> float:
    """The rate of the grid with the fewest rounds, for the first seed; where none gets there, the highest accuracy."""
    if len(options.rates) == 1:
        return float(options.rates[0])
    costs: dict[float, tuple[float, float]] = {}
    for rate in options.rates:
        fewest = min((rounds for rounds, _ in costs.values()), default=math.inf)
        curve = run(name, rate, options.seeds[0], options, table, most=fewest)
        costs[rate] = reaches(curve, CELLS[name].goal), -rising(curve)[-1][1]
    return min(costs, key=lambda rate: costs[rate])


def main() -> None:
    parser = result_arguments(__doc__, "MNIST's four files")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=["2nn-iid", "2nn-shards"])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="the grid; one: no search")
    parser.add_argument("--rounds", type=int, help="run no more than so many")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.rates = options.seeds[:1], [0.1]
    table = Table("fedavg_paper", options, ("rate", "rounds", "published", "best accuracy"))
    panels, goals = {}, []
    for name in options.cells:
        cell = CELLS[name]
        rate = choose_rate(name, options, table)
        runs = [run(name, rate, seed, options, table) for seed in options.seeds]
        rounds = [reaches(each, cell.goal) for each in runs]
        best = [100 * rising(each)[-1][1] for each in runs]
        title = f"{cell.network.upper()}, {cell.partition}, E = {cell.epochs}"
        table.add(
            f"{title}, to {cell.goal:.0%}", [f"{rate:g}", spread(rounds), str(cell.published), f"{spread(best, 2)}%"],
            published=("McMahan et al. 2017", cell.published), rounds=float(np.mean(rounds)), rate=rate,
            **{"%_best": float(np.mean(best))},
        )  # fmt: skip
        panels[title] = {f"seed {seed}": [rising(each)] for seed, each in zip(options.seeds, runs)}
        goals.append(cell.goal)
    if options.plot:
        draw_curves(options.plot, panels, "round", "test accuracy, best so far", goals)


if __name__ == "__main__":
    main()
