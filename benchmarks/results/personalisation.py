"""What a model of one's own is worth: digits by writer and activities by person, on held-out examples of everybody.

    python benchmarks/results/personalisation.py --data FOLDER            both data sets, three seeds
    python benchmarks/results/personalisation.py --only digits            the digits alone, which the package has
    python benchmarks/results/personalisation.py --only digits --quick    one seed, few writers and rounds

digits      40 writers of the digits in the package, drawn by the seed, half of their digits to learn from
activity    the 30 people of HAPT: the last bout of each activity in each recording is held out, as in examples/activity

Everybody is in every one of 15 rounds, of five epochs (digits) or one (activity) in batches of 10, plain SGD; a network
of two convolutions, each with BatchNormalization, and two dense layers. A fifth of everybody's own examples is not
learned from (and what is over a multiple of ten, since BatchNormalization of a last batch of one means nothing): with
the first seed, the mean accuracy on these chooses the rate of 0.05 and 0.15 with which FedAvg is better, which all
methods then have, and for some methods a setting of two. Printed are the mean over people and the mean of the worst
tenth of them, in percent. `alone` never meets others (50 epochs); fine-tuned, per-FedAvg and Reptile end with one or
five epochs of plain SGD on the own examples.

There is no published table of these data by these methods: this one compares the methods with each other. Rounds sum
whole numbers, as secure rounds do.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tables import Table, draw_curves, result_arguments, spread
from torch import manual_seed, nn, zeros

import archipel
from archipel import datasets
from archipel.bundle import Bundle, generate_key
from archipel.converter import Signing, Training
from archipel.lite_runtime import DeviceState, Runtime
from archipel.simulation import SplitClients
from archipel.simulation.states import StateFolder
from archipel.training import losses, optimizers

WRITERS, ROUNDS, BATCH, CHECKED, WORST, ALONE = 40, 15, 10, 5, 10, 50
EPOCHS = {"digits": 5, "activity": 1}
RATES = (0.05, 0.15)
Rows = np.ndarray


@dataclass(frozen=True)
class People:
    """Whose examples are which: rows to learn from, to choose settings with and to measure on, for each person."""

    inputs: np.ndarray
    labels: np.ndarray
    learn: list[Rows]
    choose: list[Rows]
    measure: list[Rows]


@dataclass(frozen=True)
class Method:
    """A strategy with the settings to choose from; `adapts` with so many epochs of plain SGD on the own examples, of
    which the row `counts` some (None: all)."""

    strategy: str
    options: tuple[Mapping[str, Any], ...] = ({},)
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    adapts: tuple[int, ...] = (0,)
    counts: tuple[int, ...] | None = None


METHODS = {
    "alone": Method("", adapts=(ALONE,)),
    "FedAvg": Method("fedavg", adapts=(0, 1, 5), counts=(0,)),
    "FedAvg, fine-tuned": Method("fedavg", adapts=(0, 1, 5), counts=(1, 5)),
    "Ditto": Method("ditto", ({"strength": 0.1}, {"strength": 1.0})),
    "FedPer": Method("fedper", ({"personal": "output.*"},)),
    "FedRep": Method("fedrep", ({"personal": "output.*", "personal_epochs": 2},)),
    "FedBN": Method("fedbn"),
    "pFedMe": Method("pfedme", ({"strength": 15.0, "local_lr": 0.05}, {"strength": 1.0, "local_lr": 0.5})),
    "per-FedAvg": Method("perfedavg", ({"inner_lr": 0.01}, {"inner_lr": 0.05}), adapts=(1, 5)),
    "Reptile": Method("reptile", hyperparameters={"server_lr": 0.5}, adapts=(1, 5)),
}
QUICK = ["FedAvg", "FedAvg, fine-tuned", "Ditto", "FedBN"]


def writers(count: int, seed: int) -> People:
    digits = datasets.digits_by_writer()
    drawn = np.random.default_rng(seed).permutation(np.unique(digits.writers))[:count].tolist()
    halves = [datasets.split_own_digits(digits, writer, seed=seed) for writer in drawn]
    return gather([(own.inputs(), own.targets(), rest.inputs(), rest.targets()) for own, rest in halves], seed)


def people(folder: Path, seed: int) -> People:
    windows = datasets.har_by_person(folder)
    later = np.zeros(len(windows), bool)
    places = np.stack([windows.recordings, windows.labels], axis=1)
    for place in np.unique(places, axis=0):
        own = np.all(places == place, axis=1)
        later |= own & (windows.bouts == windows.bouts[own].max())
    early = windows.inputs[~later].astype(np.float64)
    mean, deviation = early.mean(axis=(0, 2)), early.std(axis=(0, 2))
    inputs = ((windows.inputs - mean[:, None]) / deviation[:, None]).astype(np.float32)
    each = []
    for person in np.unique(windows.people):
        own, rest = ((windows.people == person) & part for part in (~later, later))
        each.append((inputs[own], windows.labels[own], inputs[rest], windows.labels[rest]))
    return gather(each, seed)


def gather(each: list[tuple[np.ndarray, ...]], seed: int) -> People:
    """One array of all examples; of what a person may learn from, a fifth is for choosing settings."""
    inputs, labels, learn, choose, measure, start = [], [], [], [], [], 0
    rng = np.random.default_rng(seed)
    for x, y, held_x, held_y in each:
        order = start + rng.permutation(len(y))
        kept = (len(y) - len(y) // CHECKED) // BATCH * BATCH
        learn.append(order[:kept])
        choose.append(order[kept:])
        measure.append(start + len(y) + np.arange(len(held_y)))
        inputs += [x, held_x]
        labels += [y, held_y]
        start += len(y) + len(held_y)
    return People(np.concatenate(inputs), np.concatenate(labels), learn, choose, measure)


def network(data: str, seed: int) -> nn.Module:
    manual_seed(seed)
    if data == "digits":
        first, second, pool = nn.Conv2d(1, 8, 5), nn.Conv2d(8, 16, 5), nn.MaxPool2d
        norms, wide, classes = nn.BatchNorm2d, 16 * 4 * 4, 10
    else:
        first, second, pool = nn.Conv1d(6, 32, 5, padding=2), nn.Conv1d(32, 32, 5, padding=2), nn.MaxPool1d
        norms, wide, classes = nn.BatchNorm1d, 32 * 32, 6
    layers = OrderedDict(
        conv1=first, norm1=norms(first.out_channels), relu1=nn.ReLU(), pool1=pool(2),
        conv2=second, norm2=norms(second.out_channels), relu2=nn.ReLU(), pool2=pool(2), flatten=nn.Flatten(),
        hidden=nn.Linear(wide, 64), relu3=nn.ReLU(), output=nn.Linear(64, classes),
    )  # fmt: skip
    return nn.Sequential(layers)


def make_bundle(file: Path, data: str, seed: int, strategy: str, options: Mapping[str, Any]) -> Bundle:
    training = Training(
        losses.cross_entropy(), optimizers.sgd(lr=RATES[0]), strategy=strategy, strategy_options=dict(options),
        epochs=EPOCHS[data], batch_size=BATCH,
    )  # fmt: skip
    model = archipel.Model.from_torch(network(data, seed), zeros(2, *((1, 28, 28) if data == "digits" else (6, 128))))
    return archipel.convert(model, file, training=training, signing=Signing(generate_key()))


def measure(runtime: Runtime, own: People, rows: list[Rows], person: int) -> float:
    logits = runtime.predict(own.inputs[rows[person]])
    return float((logits.argmax(1) == own.labels[rows[person]]).mean())


def run(
    data: str, own: People, name: str, options: Mapping[str, Any], rate: float, seed: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Everybody's accuracy on the rows to choose with and to measure on, by the number of epochs of one's own."""
    method = METHODS[name]
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plain = make_bundle(folder / "plain.bundle", data, seed, "fedavg", {}) if any(method.adapts) else None
        bundle, parameters = plain, None
        if method.strategy:
            bundle = make_bundle(folder / "own.bundle", data, seed, method.strategy, options)
            clients = SplitClients({"input": own.inputs, "label": own.labels}, own.learn)
            result = archipel.simulate(
                bundle, clients, rounds=rounds, seed=seed, hyperparameters={"lr": rate, **method.hyperparameters},
                client_axis="off", folder=folder / "run",
            )  # fmt: skip
            failed = [row.failed for row in result.history if row.failed]
            if failed:
                print(f"{data} {name} {options} {rate}: {len(failed)} rounds failed: {failed[0]}", file=sys.stderr)
            parameters = result.parameters
        states = StateFolder(folder / "run" / "states")
        for epochs in method.adapts:
            accuracies: dict[str, list[float]] = {"choose": [], "measure": []}
            # What a device keeps belongs to the strategy's bundle; whoever adapts begins with the global model alone.
            runtime = Runtime(plain if epochs else bundle, delegates="cpu")
            begin = parameters if parameters is not None else runtime.parameters()
            for person in range(len(own.learn)):
                if epochs:
                    runtime.set_parameters(begin)
                    rows = own.learn[person]
                    runtime.fit(
                        own.inputs[rows], own.labels[rows], epochs=epochs if rounds == ROUNDS else 1,
                        batch_size=BATCH, seed=seed,
                        hyperparameters={"lr": rate if name != "per-FedAvg" else options["inner_lr"]},
                    )  # fmt: skip
                else:
                    state = states.load(person, rounds + 1) if method.strategy else DeviceState()
                    runtime = Runtime(bundle, delegates="cpu", state=state)
                    runtime.set_parameters(begin)
                accuracies["choose"].append(measure(runtime, own, own.choose, person))
                accuracies["measure"].append(measure(runtime, own, own.measure, person))
            found[str(epochs)] = accuracies
    return found


def worst(accuracies: list[float]) -> float:
    """The mean of the worst tenth of the people."""
    return float(np.mean(np.sort(accuracies)[: max(1, len(accuracies) // WORST)]))


def main() -> None:
    parser = result_arguments(__doc__)
    parser.add_argument("--data", type=Path, help="the folder with hapt_raw.npz")
    parser.add_argument("--only", nargs="+", choices=["digits", "activity"], default=["digits", "activity"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = parser.parse_args()
    if "activity" in options.only and options.data is None:
        parser.error("activity needs --data, the folder with hapt_raw.npz; or give --only digits")
    if options.quick:
        options.seeds, options.methods = options.seeds[:1], QUICK
    table = Table("personalisation", options, ("rate", "setting", "mean over people", "worst tenth", "worst person"))
    panels = {}
    for data in options.only:
        rate = choose_rate(data, options, table)
        panels[data] = {name: show(data, name, rate, options, table) for name in options.methods}
    if options.plot:
        draw_curves(options.plot, panels, "share of people", "accuracy at most, %")


def cell(
    data: str, name: str, setting: Mapping[str, Any], rate: float, seed: int, options: argparse.Namespace, table: Table
) -> dict[str, dict[str, list[float]]]:
    """A run that may be kept; rows of one strategy share it."""
    what = METHODS[name].strategy or name
    key = "-".join([data, what, *(f"{each}={value}" for each, value in setting.items()), f"{rate:g}", str(seed)])
    own = writers(10 if options.quick else WRITERS, seed) if data == "digits" else people(options.data, seed)
    rounds = 3 if options.quick else ROUNDS
    found: dict[str, dict[str, list[float]]] = table.cell(
        key, lambda: run(data, own, name, setting, rate, seed, rounds)
    )
    return found


def choose_rate(data: str, options: argparse.Namespace, table: Table) -> float:
    """The rate with which FedAvg is better."""
    if options.quick:
        return RATES[0]
    seed = options.seeds[0]
    return max(RATES, key=lambda rate: np.mean(cell(data, "FedAvg", {}, rate, seed, options, table)["0"]["choose"]))


def show(
    data: str, name: str, rate: float, options: argparse.Namespace, table: Table
) -> list[list[tuple[float, float]]]:
    """A row of a method; for each seed everybody's accuracy in ascending order."""
    method = METHODS[name]
    settings = method.options[:1] if options.quick else method.options
    counts = method.adapts if method.counts is None else method.counts
    scores = {
        (number, epochs): float(np.mean(found[str(epochs)]["choose"]))
        for number, setting in enumerate(settings)
        for found in [cell(data, name, setting, rate, options.seeds[0], options, table)]
        for epochs in counts
    }
    number, epochs = max(scores, key=lambda each: scores[each])
    setting = settings[number]
    runs = [cell(data, name, setting, rate, seed, options, table)[str(epochs)]["measure"] for seed in options.seeds]
    mean, tenth, least = ([100 * float(of(each)) for each in runs] for of in (np.mean, worst, min))
    told = [f"{each} {value}" for each, value in setting.items() if each != "personal"]
    told += [f"{epochs} epoch{'s' * (epochs > 1)} of one's own"] if epochs and method.strategy else []
    table.add(
        f"{data}: {name}", [f"lr {rate:g}", ", ".join(told), spread(mean), spread(tenth), spread(least)],
        **{"%_mean": float(np.mean(mean)), "%_worst_tenth": float(np.mean(tenth)), "%_worst": float(np.mean(least))},
    )  # fmt: skip
    return [[((place + 0.5) / len(each), 100 * value) for place, value in enumerate(sorted(each))] for each in runs]


if __name__ == "__main__":
    main()
