"""What an optimizer on the server is worth: federated averaging beside momentum, Adam, Yogi, Adagrad, FedExP, q-FedAvg.

    python benchmarks/server_optimizers.py              both settings, three seeds, some minutes
    python benchmarks/server_optimizers.py --quick      one setting and seed, ten rounds

120 pupils are devices, ten of them in a round; a small dense network starts untrained, and devices make an epoch of SGD
in batches of 20. In the setting `alike` a device has all digits of its writer, in `two classes` those of two classes,
drawn for each writer. The rates of devices and server are chosen on the digits of one half of the pupils who are no
devices, with the seed 0; the accuracy is on those of the other half, as the mean of the seeds and, in brackets, the
worst and best. Rounds are those of `archipel.simulate`: exact sums, clips and limits of steps included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from measure import arguments, print_alone, state_run

import archipel
from archipel.bundle import Bundle, generate_key
from archipel.converter import Signing, Training
from archipel.datasets import DigitsByWriter, digits_by_writer, split_writers
from archipel.models import mlp
from archipel.training import losses, optimizers

DEVICES, COHORT, ROUNDS, SEEDS = 120, 10, 30, (0, 1, 2)
LOCAL = (0.1, 0.3)
SERVER: Mapping[str, tuple[float, ...]] = {
    "fedavg": (1.0,),
    "fedavgm": (0.3, 1.0),
    "fedadam": (0.01, 0.03, 0.1),
    "fedyogi": (0.01, 0.03, 0.1),
    "fedadagrad": (0.01, 0.03, 0.1),
    "fedexp": (1.0,),
    "qfedavg": (1.0,),
}

Client = tuple[np.ndarray, np.ndarray]


def main() -> None:
    options = arguments(__doc__).parse_args()
    digits = digits_by_writer()
    split = split_writers(digits, devices=DEVICES, seed=0)
    half = len(split.held_out) // 2
    chooses, measures = (whole(digits.of(part)) for part in (split.held_out[:half], split.held_out[half:]))
    settings = {"alike": [whole(digits.of([writer])) for writer in split.devices]}
    rng = np.random.default_rng(0)
    settings["two classes"] = [some(each, rng.choice(10, 2, replace=False)) for each in settings["alike"]]
    if options.quick:
        settings.pop("alike")
    rounds, seeds = (10, SEEDS[:1]) if options.quick else (ROUNDS, SEEDS)
    state_run(options.json)
    if not options.json:
        when = f"{f'round {rounds // 3}':>12}{f'round {rounds}':>10}"
        print(f"{'setting':<13}{'strategy':<12}{'lr':>5}{'server_lr':>10}{when}")
    for setting, clients in settings.items():
        for strategy, rates in SERVER.items():
            candidates = [{"lr": local, "server_lr": rate} for local in LOCAL for rate in rates]
            with tempfile.TemporaryDirectory() as folder:
                bundle = make(strategy, Path(folder))
                tried = [run(bundle, given, clients, chooses, rounds, 0)[-1] for given in candidates]
                best = candidates[int(np.argmax(tried))]
                found = [run(bundle, best, clients, measures, rounds, seed) for seed in seeds]
            early, last = [each[rounds // 3 - 1] for each in found], [each[-1] for each in found]
            if options.json:
                print_alone(
                    "server_optimizers", f"{setting}, {strategy}", **best,
                    early=float(np.mean(early)), last=float(np.mean(last)), worst=min(last), best=max(last),
                )  # fmt: skip
            else:
                print(
                    f"{setting:<13}{strategy:<12}{best['lr']:>5g}{best['server_lr']:>10g}{np.mean(early):>12.1%}{np.mean(last):>10.1%}"
                    f"  ({min(last):.1%} to {max(last):.1%})",
                    flush=True,
                )


def make(strategy: str, folder: Path) -> Bundle:
    training = Training(
        losses.cross_entropy(), optimizers.sgd(lr=LOCAL[0]), strategy=strategy, epochs=1, batch_size=20
    )  # fmt: skip
    return archipel.convert(
        mlp(0, hidden=64), folder / "digits", example=np.zeros((2, 784), np.float32), training=training,
        signing=Signing(generate_key()),
    )  # fmt: skip


def run(
    bundle: Bundle, given: Mapping[str, float], clients: list[Client], test: Client, rounds: int, seed: int
) -> list[float]:
    """The accuracy after each round in which it was measured, else NaN: every third of the rounds."""
    result = archipel.simulate(
        bundle, clients, rounds=rounds, cohort=COHORT, seed=seed, hyperparameters=given, test=test,
        test_every=rounds // 3, client_axis="on",
    )  # fmt: skip
    return [row.tested.get("accuracy", float("nan")) for row in result.history]


def whole(digits: DigitsByWriter) -> Client:
    return digits.inputs().reshape(-1, 784), digits.targets()


def some(client: Client, classes: np.ndarray) -> Client:
    rows = np.isin(client[1], classes)
    return client[0][rows], client[1][rows]


if __name__ == "__main__":
    main()
