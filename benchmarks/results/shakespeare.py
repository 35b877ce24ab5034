"""Next characters by role: federated averaging beside Adam and Yogi on the server (Reddi et al. 2021).

    python benchmarks/results/shakespeare.py --data FOLDER            three seeds, about ten minutes of a core
    python benchmarks/results/shakespeare.py --data FOLDER --quick    three rounds

After the Shakespeare task of Reddi et al. 2021 and LEAF: every role is a device, ten roles train in a round, one epoch
in batches of ten sequences of 80 characters, plain SGD on the device; tau is 1e-3, the moments' rates are 0.9 and 0.99.
The devices' rate and the server's are each strategy's best of a small grid, by the test accuracy of the last round with
the first seed.

What is shortened: the data are Tiny Shakespeare (141 roles with 1,000 characters or more, of 715), one LSTM
layer of 128 instead of two of 256, 25 rounds instead of 1,200. A role's last fifth is for testing. Printed is the
accuracy over all roles' test characters, in percent.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

import numpy as np
from tables import Curve, Table, draw_curves, result_arguments, spread

import archipel
from archipel.models import char_rnn
from archipel.simulation import RoundRow, SplitClients
from archipel.training import losses, optimizers

LENGTH, LEAST, TESTED, EVERY, EARLY = 80, 1000, 0.2, 5, 10
ROUNDS, COHORT, BATCH = 25, 10, 10
GRID = {
    # The devices' rate, the server's.
    "fedavg": ((1.0, 1.0), (3.16, 1.0), (10.0, 1.0), (31.6, 1.0)),
    "fedadam": ((1.0, 0.01), (1.0, 0.0316), (1.0, 0.1), (1.0, 0.316), (3.16, 0.1)),
    "fedyogi": ((1.0, 0.01), (1.0, 0.0316), (1.0, 0.1), (1.0, 0.316), (3.16, 0.1)),
}


def read(folder: Path) -> tuple[SplitClients, tuple[np.ndarray, np.ndarray], int]:
    """The roles, the test sequences, and the number of different characters."""
    with gzip.open(folder / "by_role.json.gz") as file:
        roles = {role: "\n".join(speeches) for role, speeches in json.load(file).items()}
    characters = sorted(set("".join(roles.values())))
    numbers = {character: number for number, character in enumerate(characters)}
    inputs, labels, parts, tests, start = [], [], [], [], 0
    for text in roles.values():
        if len(text) < LEAST:
            continue
        ids = np.array([numbers[character] for character in text], np.int64)
        count = (len(ids) - 1) // LENGTH
        rows = start + np.arange(count)
        inputs.append(ids[: count * LENGTH].reshape(count, LENGTH))
        labels.append(ids[1 : count * LENGTH + 1].reshape(count, LENGTH))
        kept = count - round(TESTED * count)
        parts.append(rows[:kept])
        tests.append(rows[kept:])
        start += count
    x, y, tested = np.concatenate(inputs), np.concatenate(labels), np.concatenate(tests)
    return SplitClients({"characters": x, "label": y}, parts), (x[tested], y[tested]), len(characters)


def run(
    strategy: str, rates: tuple[float, float], seed: int, options: argparse.Namespace, table: Table
) -> list[tuple[float, float]]:
    """The test accuracy after every fifth round."""
    local, server = rates
    key = f"{strategy}-{local:g}-{server:g}-{seed}"

    def make() -> list[tuple[float, float]]:
        clients, test, characters = read(options.data)

        def show(row: RoundRow) -> None:
            if row.tested:
                print(f"{key}: round {row.number}: {row.tested} {row.failed}", file=sys.stderr)

        result = archipel.simulate(
            char_rnn(seed, vocabulary=characters, hidden=128, layers=1), clients, strategy,
            rounds=3 if options.quick else ROUNDS, cohort=COHORT, batch_size=BATCH, loss=losses.cross_entropy(axis=-1),
            optimizer=optimizers.sgd(lr=local), hyperparameters={"server_lr": server}, seed=seed, client_axis="off",
            test=test, test_every=EVERY, folder=table.run_folder(key), on_round=show,
        )  # fmt: skip
        return [(float(row.number), 100 * row.tested["accuracy"]) for row in result.history if row.tested]

    return [(float(where), float(value)) for where, value in table.cell(key, make)]


def main() -> None:
    parser = result_arguments(__doc__, "by_role.json.gz")
    parser.add_argument("--strategies", nargs="+", choices=list(GRID), default=list(GRID))
    options = parser.parse_args()
    if options.quick:
        options.seeds = options.seeds[:1]
    table = Table("shakespeare", options, ("devices' rate, server's", f"round {EARLY}", "last round"))
    lines: dict[str, list[Curve]] = {}
    for strategy in options.strategies:
        grid = GRID[strategy][:1] if options.quick else GRID[strategy]
        first = {rates: run(strategy, rates, options.seeds[0], options, table)[-1][1] for rates in grid}
        rates = max(first, key=lambda each: first[each])
        runs = [run(strategy, rates, seed, options, table) for seed in options.seeds]
        early = [next((value for where, value in each if where >= EARLY), each[-1][1]) for each in runs]
        last = [each[-1][1] for each in runs]
        table.add(
            strategy, [f"{rates[0]:g}, {rates[1]:g}", spread(early), spread(last)],
            **{"%_early": float(np.mean(early)), "%_last": float(np.mean(last))},
        )  # fmt: skip
        lines[strategy] = list(runs)
    if options.plot:
        draw_curves(options.plot, {"Shakespeare by role": lines}, "round", "test accuracy, %")


if __name__ == "__main__":
    main()
