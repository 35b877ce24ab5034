"""Devices of several kinds, and devices with different models: IFCA and federated distillation beside their baselines.

    python benchmarks/results/clusters.py              both parts, three seeds, about twenty minutes
    python benchmarks/results/clusters.py --quick      one seed, few rounds

turned          120 writers' digits, turned by 0, 90, 180 or 270 degrees, all those of a writer alike (Ghosh et al. 2020
                turn MNIST); 40 writers a round, 30 rounds of 3 epochs, a dense network with 64 hidden units, untrained
other models    40 writers of upright digits, of whom one half have 32, the others 128 hidden units, all in each of 15
                rounds of 2 epochs, half of their digits to learn from

Batches of 10, SGD with a rate of 0.1. Printed is the mean over devices, in percent, of the accuracy on a fifth (turned)
or a half of the device's own examples, which nobody learns from: of the model that IFCA's device chose last, and of
the device's own model in the second part, where `alone` is distillation with a strength of 0.
"""

from __future__ import annotations

import numpy as np
from tables import Table, result_arguments, spread

import archipel
from archipel.datasets import digits_by_writer
from archipel.models import mlp
from archipel.simulation import Evaluation

WRITERS, ROUNDS, COHORT = 120, 30, 40
PAIRS, SHARED_ROUNDS = 40, 15
TURNED = {
    "fedavg": ("fedavg", {}),
    "ifca, spread 0.5": ("ifca", {"models": 4, "spread": 0.5}),
    "ifca, spread 1": ("ifca", {"models": 4, "spread": 1.0}),
}
STRENGTHS = {
    "alone": 0.0,
    "feddistill, strength 0.3": 0.3,
    "feddistill, strength 1": 1.0,
    "feddistill, strength 3": 3.0,
}


def main() -> None:
    options = result_arguments(__doc__).parse_args()
    seeds = options.seeds[:1] if options.quick else options.seeds
    digits = digits_by_writer()
    writers = digits.writers_in([1, 2, 3, 4])
    images = [(digits.of([writer]).inputs(), digits.of([writer]).targets()) for writer in writers[:WRITERS]]
    turned = [
        (np.rot90(x, number % 4, axes=(2, 3)).reshape(-1, 784), y) for number, (x, y) in enumerate(images)
    ]  # fmt: skip
    table = Table("clusters", options, ["accuracy"])
    for case, (strategy, given) in TURNED.items():
        found = []
        for seed in seeds:
            own = {**given, "seed": seed} if given else {}

            def run(strategy: str = strategy, own: dict[str, object] = own, seed: int = seed) -> float:
                return mean_of(
                    mlp(seed, hidden=64), turned, strategy, own, 5 if options.quick else ROUNDS, COHORT, 3, 0.2, seed
                )[0]

            found.append(table.cell(f"turned-{case}-{seed}", run))
        table.add(f"turned, {case}", [spread(found)], percent=float(np.mean(found)))
    upright = [(x.reshape(-1, 784), y) for x, y in images[:PAIRS]]
    for case, strength in STRENGTHS.items():
        found = []
        for seed in seeds:

            def share(strength: float = strength, seed: int = seed) -> list[float]:
                models = [mlp(seed, hidden=32), mlp(seed + 100, hidden=128)]
                rounds = 3 if options.quick else SHARED_ROUNDS
                return mean_of(models, upright, "feddistill", {"strength": strength}, rounds, PAIRS, 2, 0.5, seed)

            found.append(table.cell(f"models-{strength}-{seed}", share))
        small, large = np.array(found).T
        table.add(
            f"other models, {case}", [f"{spread(list(small))} small, {spread(list(large))} large"],
            percent=float(np.mean(found)),
        )  # fmt: skip


def mean_of(
    model: object, clients: list[tuple[np.ndarray, np.ndarray]], strategy: str, given: dict[str, object], rounds: int,
    cohort: int, epochs: int, hold_out: float, seed: int,
) -> list[float]:  # fmt: skip
    """The mean accuracy in percent of the devices with each of the models, on examples of their own."""
    result = archipel.simulate(
        model, clients, strategy, rounds=rounds, cohort=cohort, seed=seed, strategy_options=given, epochs=epochs,
        batch_size=10, evaluation=Evaluation(hold_out=hold_out, every=rounds),
    )  # fmt: skip
    kinds = len(model) if isinstance(model, list) else 1
    tested = {client: row.tested["accuracy"] for client, row in result.clients.items() if row.tested}
    return [
        100 * float(np.mean([each for client, each in tested.items() if client % kinds == k])) for k in range(kinds)
    ]


if __name__ == "__main__":
    main()
