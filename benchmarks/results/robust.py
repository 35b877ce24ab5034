"""Robust aggregation under attack: ten honest devices and one to four attackers, the worst attack counts.

    python benchmarks/results/robust.py --data FOLDER                      f = 1, 2, 4; three degrees of heterogeneity
    python benchmarks/results/robust.py --data FOLDER --quick              f = 2, few rounds
    python benchmarks/results/robust.py --data FOLDER --groups 6 --quick   the rules over secure groups of two devices

After ByzFL's benchmark (github.com/LPD-EPFL/byzfl: ten honest devices on MNIST, batches of 25, a rate of 0.1,
similarity 1, 0.66, 0.33 and 0). What differs: rounds of 8 local steps instead of single gradients with momentum, and a
network of one hidden layer of 32, so that the table takes minutes on two cores. `similarity` is the share of each
device's examples that are drawn from all classes; the others are sorted by class. Printed is the test accuracy after
the last round, in percent: without attackers, then under each attack, then the lowest of these. "mean" has no rule, so
it shows what an attack does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tables import Curve, Table, draw_curves, result_arguments, spread
from torch import manual_seed, nn, zeros

import archipel
from archipel import datasets
from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.converter import Signing, Training
from archipel.simulation import Aggregation, Attack, SplitClients
from archipel.training import losses, optimizers

HONEST, EXAMPLES, BATCH = 10, 200, 25
RULES = {
    "mean": {}, "median": {"rule": "median"}, "trimmed-mean": {"rule": "trimmed-mean"}, "krum": {"rule": "krum"},
    "multi-krum": {"rule": "multi-krum"}, "geometric-median": {"rule": "geometric-median"},
    "centered-clipping": {"rule": "centered-clipping"}, "norm-bounding": {"rule": "norm-bounding"},
    "nnm, trimmed-mean": {"rule": "trimmed-mean", "mixing": "nnm"},
    "nnm, geometric-median": {"rule": "geometric-median", "mixing": "nnm"},
}  # fmt: skip
ATTACKS = ("sign-flip", "best-ipm", "best-alie", "mimic", "label-flip")


def make_bundle(folder: Path) -> Bundle:
    manual_seed(0)
    layers = OrderedDict(hidden=nn.Linear(784, 32), relu=nn.ReLU(), output=nn.Linear(32, 10))
    training = Training(
        losses.cross_entropy(), optimizers.sgd(lr=0.1), strategy_options={"weighting": "uniform"}, epochs=1,
        batch_size=BATCH,
    )  # fmt: skip
    # Groups of two are for this table: they would hide nobody behind anybody.
    policy = PrivacyPolicy(modes=("secure", "plain"), min_cohort=2, threshold=0.67, max_clip=1000.0, max_bits=24)
    model = archipel.Model.from_torch(nn.Sequential(layers), zeros(2, 784))
    return archipel.convert(
        model, folder / "mnist.bundle", training=training, privacy=policy, signing=Signing(generate_key())
    )


def divide(labels: np.ndarray, similarity: float, attackers: int, seed: int) -> list[np.ndarray]:
    """Each honest device's rows: a share of all, the rest sorted by class; attackers have a device's worth of all."""
    rows = np.random.default_rng(seed).permutation(len(labels))[: (HONEST + attackers) * EXAMPLES]
    mine, theirs = rows[: HONEST * EXAMPLES], rows[HONEST * EXAMPLES :]
    alike = round(similarity * EXAMPLES) * HONEST
    drawn, rest = mine[:alike], mine[alike:]
    ordered = rest[np.argsort(labels[rest], kind="stable")]
    parts = zip(np.array_split(drawn, HONEST), np.array_split(ordered, HONEST))
    return [np.concatenate(pair) for pair in parts] + np.array_split(theirs, attackers)


def measure(
    bundle: Bundle, data: datasets.LabelledSplits, similarity: float, tolerated: int, attack: str, options: Any,
    rule: dict[str, str], seed: int,
) -> float:  # fmt: skip
    labels = data.train.labels.astype(np.int64)
    parts = divide(labels, similarity, tolerated, seed)
    count = HONEST + tolerated if attack else HONEST
    aggregation = Aggregation(**rule, tolerated=tolerated if rule else 0)
    result = archipel.simulate(
        bundle, SplitClients({"input": data.train.inputs, "label": labels}, parts[:count]),
        rounds=8 if options.quick else options.rounds, seed=seed, aggregation=aggregation,
        privacy="secure" if options.groups else "plain", secure_groups=min(options.groups, count // 2),
        attack=Attack(name=attack, clients=tuple(range(HONEST, count))), client_axis="on", test_every=1000,
        test=(data.test.inputs, data.test.labels.astype(np.int64)),
    )  # fmt: skip
    failed = [row.failed for row in result.history if row.failed]
    if failed:
        print(f"{attack}: {len(failed)} rounds failed: {failed[0]}", file=sys.stderr)
    return 100 * result.history[-1].tested["accuracy"]


def main() -> None:
    parser = result_arguments(__doc__, "MNIST's four files")
    parser.set_defaults(seeds=[0])
    parser.add_argument("--rules", nargs="+", choices=list(RULES))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--tolerated", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--similarity", type=float, nargs="+", default=[1.0, 0.33, 0.0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--groups", type=int, default=0, help="secure groups of each round; 0: single updates")
    options = parser.parse_args()
    table = Table("robust", options, ("no attack", *options.attacks, "worst"))
    if options.quick:
        options.tolerated, options.similarity = [2], [0.33]
    quick = ["mean", "median", "trimmed-mean", "geometric-median", "nnm, trimmed-mean"]
    data = datasets.mnist(options.data, validation=1, flat=True)
    panels: dict[str, dict[str, list[Curve]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bundle = make_bundle(Path(folder))
        for similarity in options.similarity:
            lines = panels[f"similarity {similarity:g}"] = {}
            for tolerated in options.tolerated:
                for name in options.rules or (quick if options.quick else list(RULES)):
                    worst = add_row(table, bundle, data, similarity, tolerated, name, options)
                    lines.setdefault(name, [[]])[0].append((tolerated, worst))
    if options.plot:
        draw_curves(options.plot, panels, "attackers", "accuracy under the worst attack, %")


def add_row(
    table: Table,
    bundle: Bundle,
    data: datasets.LabelledSplits,
    similarity: float,
    tolerated: int,
    name: str,
    options: argparse.Namespace,
) -> float:
    """A rule's row. Returns the mean accuracy under the worst attack."""

    def values(attack: str) -> list[float]:
        """Of each seed."""
        key = f"{options.groups}-{options.rounds}-{similarity:g}-{tolerated}-{name}-{attack}"
        return [
            table.cell(
                f"{key}-{seed}",
                partial(measure, bundle, data, similarity, tolerated, attack, options, RULES[name], seed),
            )
            for seed in options.seeds
        ]

    rows = [values(attack) for attack in ("", *options.attacks)]
    worst = min(rows[1:], key=lambda each: float(np.mean(each)))
    table.add(
        f"similarity {similarity:g}, f = {tolerated}, {name}",
        [spread(each) for each in (*rows, worst)],
        **{"%_without_attack": float(np.mean(rows[0])), "%_under_the_worst": float(np.mean(worst))},
    )
    return float(np.mean(worst))


if __name__ == "__main__":
    main()
