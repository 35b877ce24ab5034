"""ByzFL's grid: robust rules under attack at devices whose data differ, beside byzfl itself on the same batches.

    python benchmarks/results/byzfl_grid.py --data FOLDER              f = 2, 4; similarity 1, 0.33, 0: half an hour
    python benchmarks/results/byzfl_grid.py --data FOLDER --steps 800 --tolerated 1 2 3 4 --similarity 1 0.66 0.33 0
    python benchmarks/results/byzfl_grid.py --data FOLDER --groups 2 --tolerated 1 2    over secure groups of two
    python benchmarks/results/byzfl_grid.py --data FOLDER --quick      a row of 20 steps, without byzfl

In the setting of ByzFL's benchmark (github.com/LPD-EPFL/byzfl, `benchmark/benchmark.py`): ten honest devices have all
of MNIST, and f more attack; in each step every device uploads a gradient of 25 examples with its momentum of 0.9, the
rate is 0.1, the weight decay 1e-4; rules are nearest-neighbour mixing before the trimmed mean or the geometric median.
`similarity` is the share of the digits that is divided evenly; the rest is sorted by label. What differs, on both
sides: the dense network `fc_mnist` instead of `cnn_mnist`, 200 steps instead of 800, one seed instead of three; attacks
of a fixed strength (inner product manipulation 0.5, ALIE 1.5), since each library looks for the best strength on a grid
of its own; and the geometric median is iterated to its end.

Printed is the test accuracy after the last step: of the mean without attackers, of the rule without attackers and under
each attack, the worst of these, byzfl's worst, and the row's largest difference from byzfl. byzfl gets the first
weights and the very batches that our devices draw, so what differs is the rounds: archipel shortens steps that are more
than three times as long as is usual in the training, and how many were is printed too. It runs in an environment of its
own, which is made at first. Rounds are plain, since the rule needs single updates; with `--groups` they are secure sums
of groups.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tables import Table, draw_curves, result_arguments
from torch import manual_seed, nn, zeros

import archipel
from archipel import datasets
from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.converter import Signing, Training
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.shuffle import batches
from archipel.protocol.bounds import SLACK
from archipel.simulation import Aggregation, Attack, SplitClients
from archipel.simulation.draws import device_seed
from archipel.strategies.step_limits import Usual
from archipel.training import losses, optimizers

ROOT = Path(__file__).resolve().parents[2]
HONEST, BATCH, RATE, DECAY, MOMENTUM = 10, 25, 0.1, 1e-4, 0.9
# Bounds that never cut, as byzfl has none: the clip that adapts by default would cut a tenth of the updates, and where
# an attack wins gradients have norms of 100,000. Sums of groups are of whole numbers, which have to be small enough.
BOUNDS = {False: {"clip": 1e7, "value_range": 1e6, "bits": 24}, True: {"clip": 100.0, "value_range": 1.0, "bits": 24}}
RULES = {
    # Of byzfl with the arguments of its benchmark, except that the geometric median is iterated to its end.
    "nnm, trimmed-mean": ("trimmed-mean", {"name": "TrMean", "parameters": {}}),
    "nnm, geometric-median": ("geometric-median", {"name": "GeometricMedian", "parameters": {"nu": 1e-6, "T": 30}}),
}
ATTACKS: dict[str, tuple[str, dict[str, float]]] = {
    "sign-flip": ("SignFlipping", {}),
    "ipm": ("InnerProductManipulation", {"tau": 0.5}),
    # Deltas point against gradients: deviations that are added to deltas are taken off gradients.
    "alie": ("ALittleIsEnough", {"tau": -1.5}),
    "mimic": ("Mimic", {"epsilon": 0}),
}


@dataclass(frozen=True)
class Data:
    """Of MNIST, normalised as byzfl does."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def read(folder: Path) -> Data:
    data = datasets.mnist(folder, validation=1, flat=True)
    x, test_x = ((part.inputs - np.float32(0.1307)) / np.float32(0.3081) for part in (data.train, data.test))
    return Data(x, data.train.labels.astype(np.int64), test_x, data.test.labels.astype(np.int64))


def make_bundle(folder: Path, seed: int, in_groups: bool) -> Bundle:
    manual_seed(seed)
    layers = OrderedDict(_f1=nn.Linear(784, 100), relu=nn.ReLU(), _f2=nn.Linear(100, 10))
    training = Training(
        losses.cross_entropy(), optimizers.sgd(lr=RATE, weight_decay=DECAY), strategy="fedsgd", batch_size=BATCH,
        strategy_options={"weighting": "uniform", "momentum": MOMENTUM, **BOUNDS[in_groups]},
    )  # fmt: skip
    # Groups of two are for this table: they would hide nobody behind anybody.
    policy = PrivacyPolicy(modes=("secure", "plain"), min_cohort=2, threshold=0.67, max_clip=1e7, max_bits=24)
    model = archipel.Model.from_torch(nn.Sequential(layers), zeros(2, 784))
    return archipel.convert(
        model, folder / "mnist.bundle", training=training, privacy=policy, signing=Signing(generate_key())
    )


def divide(labels: np.ndarray, similarity: float, seed: int) -> list[np.ndarray]:
    """Each honest device's rows."""
    rows = np.random.default_rng(seed).permutation(len(labels))
    alike = int(similarity * len(labels))
    ordered = rows[alike:][np.argsort(labels[rows[alike:]], kind="stable")]
    parts = zip(np.array_split(rows[:alike], HONEST), np.array_split(ordered, HONEST))
    return [np.concatenate(pair) for pair in parts]


def train(
    bundle: Bundle, data: Data, parts: list[np.ndarray], rule: Aggregation, attack: str, attackers: int, seed: int,
    options: argparse.Namespace,
) -> float:  # fmt: skip
    """The accuracy after the last step, in percent."""
    count = HONEST + (attackers if attack else 0)
    # What attackers send over updates does not depend on their data.
    clients = SplitClients({"input": data.x, "label": data.y}, [*parts, *parts[: count - HONEST]])
    result = archipel.simulate(
        bundle, clients, rounds=options.steps, seed=seed, aggregation=rule, client_axis="on",
        privacy="secure" if options.groups else "plain", secure_groups=count // options.groups if options.groups else 0,
        attack=Attack(name=attack, clients=tuple(range(HONEST, count))), test=(data.test_x, data.test_y),
        test_every=options.steps,
    )  # fmt: skip
    failed = [row.failed for row in result.history if row.failed]
    if failed:
        print(f"{rule.rule}, {attack}: {len(failed)} steps failed: {failed[0]}", file=sys.stderr)
    limited = limited_steps(row.step for row in result.history)
    if limited:
        where = f"{rule.rule}, {attack or 'no attack'}, {attackers} tolerated"
        print(f"{where}: steps that were shortened: {len(limited)}, first step {limited[0]}", file=sys.stderr)
    return 100 * result.history[-1].tested["accuracy"]


def limited_steps(norms: Iterable[float]) -> list[int]:
    """The numbers of the steps, from 1, that archipel made shorter, as it does with unusually long ones."""
    usual, limited = Usual(), []
    for number, norm in enumerate(norms, start=1):
        if norm >= usual.limit * (1 - SLACK):
            limited.append(number)
        usual.add(norm)
    return limited


def drawn_batches(parts: list[np.ndarray], steps: int, seed: int) -> np.ndarray:
    """The rows of the examples that each honest device takes in each step, `[steps, devices, 25]`."""
    rows = np.empty((steps, len(parts), BATCH), np.int64)
    for step in range(steps):
        for device, own in enumerate(parts):
            drawn = batches(
                len(own), BATCH, epochs=None, steps=1, shuffle=True, seed=device_seed(seed, step + 1, device), phase=0,
                whole=False,
            )  # fmt: skip
            rows[step, device] = own[next(drawn).indices]
    return rows


def ask_byzfl(
    bundle: Bundle,
    data: Data,
    parts: list[np.ndarray],
    name: str,
    tolerated: int,
    seed: int,
    options: argparse.Namespace,
) -> dict[str, float]:
    """byzfl's accuracies of a row, by attack."""
    made, script = RULES[name][1], ROOT / "benchmarks" / "peers" / "run_byzfl.py"
    mixing, parameters = [{"name": "NNM", "parameters": {"f": tolerated}}], {**made["parameters"], "f": tolerated}
    runs = [
        {"attack": attack, "parameters": given, "attackers": count, "mixing": mixing,
         "rule": {"name": made["name"], "parameters": parameters}}
        for attack, given, count in [("NoAttack", {}, 0), *((*each, tolerated) for each in ATTACKS.values())]
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for each in ("x", "y", "test_x", "test_y"):
            np.save(folder / f"{each}.npy", getattr(data, each))
        np.save(folder / "batches.npy", drawn_batches(parts, options.steps, seed))
        np.save(folder / "first.npy", start_of(bundle))
        given = {"rate": RATE, "weight_decay": DECAY, "momentum": MOMENTUM, "runs": runs}
        (folder / "given.json").write_text(json.dumps(given))
        done = subprocess.run([options.python, script, folder], stdout=subprocess.PIPE, env={}, check=True, text=True)
    return dict(zip(["none", *ATTACKS], (100 * value for value in json.loads(done.stdout.splitlines()[-1]))))


def start_of(bundle: Bundle) -> np.ndarray:
    """The bundle's parameters as byzfl lays them out: by layer, weight before bias, each [outputs, inputs]."""
    arrays = Runtime(bundle, delegates="cpu").parameters()
    return np.concatenate(
        [arrays[f"{layer}.{each}"].ravel() for layer in ("_f1", "_f2") for each in ("weight", "bias")]
    )


def byzfl_python() -> str:
    """The Python of an environment with byzfl, which is made where it is missing."""
    place = ROOT / ".cache" / "environments" / "byzfl"
    command = [sys.executable, ROOT / "scripts" / "environment.py", place, "--", "byzfl==0.0.11"]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.strip()


def main() -> None:
    parser = result_arguments(__doc__, "MNIST's four files")
    parser.set_defaults(seeds=[0])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--tolerated", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--similarity", type=float, nargs="+", default=[1.0, 0.33, 0.0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--groups", type=int, default=0, help="devices of a secure group; 0: single updates")
    parser.add_argument("--python", help="a Python that has byzfl 0.0.11; left out: an environment is made")
    parser.add_argument("--without-byzfl", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.similarity, options.tolerated, options.rules = [0.33], [2], list(RULES)[:1]
        options.steps, options.without_byzfl = 20, True
    if options.groups:
        options.without_byzfl = True
    if not options.without_byzfl:
        options.python = options.python or byzfl_python()
    peer = () if options.without_byzfl else ("byzfl's worst", "largest difference")
    table = Table("byzfl_grid", options, ("mean, no attack", "no attack", *ATTACKS, "worst", *peer))
    panels: dict[str, dict[str, list[list[tuple[float, float]]]]] = {}
    data = read(options.data)
    with tempfile.TemporaryDirectory() as scratch:
        for seed in options.seeds:
            bundle = make_bundle(Path(scratch) / str(seed), seed, bool(options.groups))
            for similarity in options.similarity:
                lines = panels.setdefault(f"similarity {similarity:g}", {})
                for tolerated in options.tolerated:
                    for name in options.rules:
                        worst = add_row(table, bundle, data, similarity, tolerated, name, seed, options)
                        runs = lines.setdefault(name, [[] for _ in options.seeds])
                        runs[options.seeds.index(seed)].append((tolerated, worst))
    if options.plot:
        draw_curves(options.plot, panels, "attackers", "accuracy under the worst attack, %")


def add_row(
    table: Table, bundle: Bundle, data: Data, similarity: float, tolerated: int, name: str, seed: int,
    options: argparse.Namespace,
) -> float:  # fmt: skip
    """A row. Returns our accuracy under the worst attack."""
    parts = divide(data.y, similarity, seed)
    rule = Aggregation(rule=RULES[name][0], mixing="nnm", tolerated=tolerated)
    where = f"{options.groups}-{options.steps}-{similarity:g}-{seed}"

    def train_all() -> dict[str, float]:
        return {
            attack or "none": train(bundle, data, parts, rule, attack, tolerated, seed, options)
            for attack in ("", *ATTACKS)
        }

    plain = table.cell(f"{where}-mean", lambda: train(bundle, data, parts, Aggregation(), "", 0, seed, options))
    key = f"{where}-{tolerated}-{RULES[name][0]}"
    ours = table.cell(key, train_all)
    worst = min(value for attack, value in ours.items() if attack != "none")
    texts = [f"{value:.1f}" for value in (plain, *ours.values(), worst)]
    measured = {"%_mean_without_attack": plain, "%_without_attack": ours["none"], "%_worst": worst}
    if not options.without_byzfl:
        peer = table.cell(f"{key}-byzfl", lambda: ask_byzfl(bundle, data, parts, name, tolerated, seed, options))
        theirs = min(value for attack, value in peer.items() if attack != "none")
        apart = max((ours[attack] - peer[attack] for attack in ours), key=abs)
        texts += [f"{theirs:.1f}", f"{apart:+.1f}"]
        measured |= {"%_worst_of_byzfl": theirs, "points_apart_at_most": abs(apart)}
    table.add(f"similarity {similarity:g}, f = {tolerated}, {name}", texts, **measured)
    return float(worst)


if __name__ == "__main__":
    main()
