"""Federated learning on label skew, in the setting of Li et al. 2022 as Flower's niid_bench runs it.

    python benchmarks/results/niid_bench.py --data FOLDER                      Fashion-MNIST, Dirichlet 0.5, one seed
    python benchmarks/results/niid_bench.py --data FOLDER --partition labels   two labels a client
    python benchmarks/results/niid_bench.py --data FOLDER --set CIFAR-10       with the other data
    python benchmarks/results/niid_bench.py --data FOLDER --quick              two rounds of one epoch

Ten clients, all in every round, 50 rounds of 10 local epochs over nine tenths of a client's examples, batches of 64,
SGD at 0.01 with momentum 0.9 and weight decay 1e-5; a network of two convolutions (6 and 16 filters of 5 x 5) and
layers of 120, 84 and 10. The accuracy is the best of all rounds on the test part, as in the published table
(github.com/adap/flower, baselines/niid_bench: three seeds). What differs: SCAFFOLD's correction goes into the gradient
before the momentum, and its control variates are divided by the weights of all gradients, see docs/strategies.md.
FedProx has mu 0.01. CIFAR-10's pictures are reflected at their borders, cut and turned at random in training, as there;
they are of the repository of JPEG pictures (quality 75), so they have lost a little.

Every round goes through the programs of a bundle and sums whole numbers, as a secure round does. With --folder a run
that was stopped goes on, and finished cells are not run again.
"""

from __future__ import annotations

import statistics
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from tables import Curve, Table, draw_curves, result_arguments, spread
from torch import manual_seed, nn, zeros

import archipel
from archipel import datasets, preprocessing
from archipel.simulation import RoundRow, SplitClients
from archipel.training import optimizers

CLIENTS, ROUNDS, EPOCHS, BATCH = 10, 50, 10, 64
STRATEGIES = ("fedavg", "scaffold", "fedprox", "fednova")
PUBLISHED = {
    ("Fashion-MNIST", "dirichlet"): ((88.09, 0.29), (88.44, 0.25), (88.15, 0.42), (88.22, 0.12)),
    ("Fashion-MNIST", "labels"): ((78.10, 2.51), (33.80, 41.22), (78.05, 0.99), (71.67, 2.34)),
    ("CIFAR-10", "dirichlet"): ((62.47, None), (68.08, None), (65.63, None), (63.89, None)),
    ("CIFAR-10", "labels"): ((51.17, None), (49.42, None), (50.44, None), (46.90, None)),
}
"""Mean and, where it is known here, standard deviation of the best accuracy, in percent, by strategy."""
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {}, "fedprox": {"mu": 0.01}, "scaffold": {"control_clip": 1000.0},
    # What devices send is divided by the thousands of steps of a round, with momentum.
    "fednova": {"step_cap": 60_000, "clip": 0.1, "value_range": 0.01},
}  # fmt: skip
# Clips that never cut, 24 bits, and weights by examples: nothing that the published runs do not have.
WIDE = {"clip": 100.0, "value_range": 10.0, "bits": 24, "weight_cap": 60_000}


def network(seed: int, channels: int = 1, features: int = 256) -> nn.Module:
    manual_seed(seed)
    layers = OrderedDict(
        conv1=nn.Conv2d(channels, 6, 5), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2), flatten=nn.Flatten(),
        fc1=nn.Linear(features, 120), relu3=nn.ReLU(), fc2=nn.Linear(120, 84), relu4=nn.ReLU(), fc3=nn.Linear(84, 10),
    )  # fmt: skip
    return nn.Sequential(layers)


def colour_network(seed: int) -> archipel.Model:
    """With what Flower's clients do to CIFAR-10's pictures before the network."""
    model = archipel.Model.from_torch(network(seed, channels=3, features=400), zeros(2, 3, 32, 32))
    mean, deviation = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
    moved = preprocessing.RandomShift(4, axes=(2, 3), fill="reflect")
    turned, scaled = preprocessing.RandomFlip(3), preprocessing.Normalize(mean, deviation, axis=1)
    return preprocessing.put_before(model, [preprocessing.Raw("float32", ("batch", 3, 32, 32)), moved, turned, scaled])


def divide(labels: np.ndarray, partition: str, seed: int) -> list[np.ndarray]:
    """The rows on which each client trains: nine tenths of its part, for Flower's clients keep a tenth to validate."""
    if partition == "dirichlet":
        parts = datasets.split_dirichlet(labels, CLIENTS, alpha=0.5, seed=seed)
    else:
        parts = datasets.split_labels(labels, CLIENTS, each=2, seed=seed)
    rng = np.random.default_rng(seed)
    return [np.sort(rng.permutation(part)[len(part) // 10 :]) for part in parts]


def run(
    data: datasets.LabelledSplits, partition: str, strategy: str, seed: int, options: Any, folder: Path | None
) -> list[float]:
    """The accuracy after each round, in percent."""
    labels = data.train.labels.astype(np.int64)
    clients = SplitClients({"input": data.train.inputs, "label": labels}, divide(labels, partition, seed))

    def show(row: RoundRow) -> None:
        print(f"{partition} {strategy} seed {seed} round {row.number}: {row.tested} {row.failed}", file=sys.stderr)

    colour = options.set == "CIFAR-10"
    case = f"{'cifar10-' if colour else ''}{partition}-{strategy}-{seed}"
    result = archipel.simulate(
        colour_network(seed) if colour else network(seed), clients, strategy,
        rounds=2 if options.quick else options.rounds, epochs=1 if options.quick else EPOCHS, batch_size=BATCH,
        optimizer=optimizers.sgd(0.9, weight_decay=1e-5, lr=0.01), strategy_options={**WIDE, **OPTIONS[strategy]},
        test=(data.test.inputs, data.test.labels.astype(np.int64)), seed=seed, workers=options.workers,
        engine=options.engine, client_axis="off" if options.engine == "onnxruntime" else "on",
        folder=None if folder is None else folder / case, on_round=show,
    )  # fmt: skip
    return [100 * row.tested["accuracy"] for row in result.history]


def main() -> None:
    parser = result_arguments(__doc__, "Fashion-MNIST's four files, or CIFAR-10's")
    parser.set_defaults(seeds=[0])
    parser.add_argument("--set", choices=sorted({name for name, _ in PUBLISHED}), default="Fashion-MNIST")
    parser.add_argument("--partition", choices=sorted({way for _, way in PUBLISHED}), default="dirichlet")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="onnxruntime", help="torch:cuda trains all clients at once on a GPU")
    options = parser.parse_args()
    table = Table("niid_bench", options, ("best accuracy, %", "seeds", "published"))
    read = datasets.cifar10 if options.set == "CIFAR-10" else datasets.fashion_mnist
    data = read(options.data, validation=1)
    published = dict(zip(STRATEGIES, PUBLISHED[options.set, options.partition]))
    lines: dict[str, list[Curve]] = {}
    for strategy in options.strategies:
        runs = [run(data, options.partition, strategy, seed, options, options.folder) for seed in options.seeds]
        best = [max(each) for each in runs]
        mean, deviation = published[strategy]
        table.add(
            f"{options.set}, {options.partition}, {strategy}",
            [spread(best, 2), str(len(best)), f"{mean}" if deviation is None else f"{mean} ± {deviation}"],
            published=("Flower niid_bench, published", mean), **{"%_accuracy": statistics.mean(best)},
        )  # fmt: skip
        lines[strategy] = [list(enumerate(each, 1)) for each in runs]
    if options.plot:
        draw_curves(options.plot, {f"{options.set}, {options.partition}": lines}, "round", "test accuracy, %")


if __name__ == "__main__":
    main()
