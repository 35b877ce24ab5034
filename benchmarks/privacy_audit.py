"""What attacks get out of federations, with differential privacy, secure sums and without: an audit of what is stated.

    python benchmarks/privacy_audit.py                       everything, about four minutes of one core
    python benchmarks/privacy_audit.py --quick               few federations, canaries and steps: no figures to quote
    python benchmarks/privacy_audit.py --only canaries       one of membership, canaries, inversion

The task is that of `archipel demo`, handwritten digits by writer, with a small network on smaller pictures, so that
hundreds of federations can be trained. Rounds are those of the simulator: signed programs, clipped updates in whole
numbers, the server's noise from `archipel.privacy.central.release_sum`, and the accountant's epsilon.

- `membership`: did a device take part? By likelihood ratio (LiRA) and simpler attacks, from the last model, over many
  federations of 400 devices, 160 of them in a round; `peer` is the same without noise.
- `canaries`: devices with updates that are found most easily take part or not, and a lower bound on epsilon follows
  from how many guesses about them are right; it holds with confidence 95%. `peer` is the epsilon that the account
  states. `estimate` is no bound: the epsilon of a normal distribution with the scores' means and variances.
- `inversion`: pictures out of what a server sees: the sum of 32 devices, or (`peer`) one update; and as much as
  somebody without any update guesses, with the mean picture of each class.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from measure import Report, Row, arguments

sys.path.append(str(Path(__file__).parent / "privacy"))
import canaries
import inversion
from bounds import epsilon_of_normal
from federations import DELTA, EPSILON, Federations, make_bundle, make_devices, noise
from membership import attack

from archipel.protocol.operator.differential_privacy import DifferentialPrivacy

PARTS = ("membership", "canaries", "inversion")
NAME = "privacy_audit"
DEVICES, COHORT, DIGITS, RATE, EPOCHS, ROUNDS = 800, 160, 10, 0.3, 2, 60
FEDERATIONS = 32
CANARIES, RUNS, CANARY_DEVICES, CANARY_ROUNDS, GUESSED = 2000, 6, 100, 20, 0.04
"""The share of canaries that is guessed at with noise; without it all are."""
SUMMED, SUMS, STEPS = 32, 4, 800


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be given several times")
    options = parser.parse_args()
    report = Report(options.json, ("numpy", "onnxruntime", "dp-accounting", "torch", "scipy"))
    for part, run in zip(PARTS, (membership, canary, invert)):
        if not options.only or part in options.only:
            with tempfile.TemporaryDirectory() as folder:
                report.add(run(Path(folder), options.quick))


def row(case: str, ours: float, peer: float, peer_name: str, unit: str) -> Row:
    return Row(NAME, case, ours, peer, peer_name, ours / peer if peer else float("inf"), unit)


def membership(folder: Path, quick: bool) -> list[Row]:
    size, cohort, count, rounds = (40, 10, 6, 5) if quick else (DEVICES, COHORT, FEDERATIONS, ROUNDS)
    devices = make_devices(size, DIGITS)
    federations = Federations(make_bundle(folder, rate=RATE, epochs=EPOCHS, digits=DIGITS), devices)
    without = attack(federations, devices, count, cohort, rounds, DifferentialPrivacy(), seed=1)
    found = attack(federations, devices, count, cohort, rounds, noise(rounds), seed=1)
    assert found.epsilon is not None
    return [
        row("membership, LiRA", found.likelihood_ratio, without.likelihood_ratio, "without noise", "AUC"),
        row("membership, best attack", found.best, without.best, "without noise", "AUC"),
        row("membership, its error", found.error, without.error, "without noise", "AUC"),
        row("membership, found at 1%", found.true_positives, without.true_positives, "without noise", "share"),
        row("membership, accuracy", found.accuracy, without.accuracy, "without noise", "share"),
        row("membership, stated", found.epsilon, EPSILON, "asked for", "epsilon"),
    ]


def canary(folder: Path, quick: bool) -> list[Row]:
    count, times, size, rounds = (
        (200, 1, 40, 3) if quick else (CANARIES, RUNS, CANARY_DEVICES, CANARY_ROUNDS)
    )  # fmt: skip
    federations = Federations(
        make_bundle(folder, rate=RATE, epochs=EPOCHS, digits=DIGITS), make_devices(size, DIGITS)
    )  # fmt: skip
    rows, rng = [], np.random.default_rng(2)
    for privacy, share, name in (
        (noise(rounds), GUESSED, "canaries"), (DifferentialPrivacy(), 1.0, "canaries without noise"),
    ):  # fmt: skip
        runs = [canaries.run(federations, np.arange(size), count, rounds, privacy, rng) for _ in range(times)]
        least, right, guesses = canaries.lower_bound(runs, share)
        stated = runs[0].epsilon or EPSILON
        told = "stated" if privacy.is_central else "stated with noise"
        rows += [
            row(f"{name}, bound", least, stated, told, "epsilon"),
            row(f"{name}, right", right, guesses, "guesses", "canaries"),
        ]
        if privacy.is_central:
            scores = np.concatenate([each.scores for each in runs])
            taken = np.concatenate([each.taken for each in runs])
            estimate = epsilon_of_normal(scores[taken], scores[~taken], DELTA)
            rows.append(row(f"{name}, estimate", estimate, stated, told, "epsilon"))
    return rows


def invert(folder: Path, quick: bool) -> list[Row]:
    summed, times, steps = (4, 1, 60) if quick else (SUMMED, SUMS, STEPS)
    devices = make_devices(summed * times, digits=1, side=28)
    federations = Federations(make_bundle(folder, rate=0.1, epochs=1, digits=1, side=28), devices)
    pictures = np.concatenate([client[0] for client in devices.clients])
    labels = np.concatenate([client[1] for client in devices.clients])
    test, answers = devices.test
    classes = np.stack([test[answers == digit].mean(axis=0) for digit in range(10)])
    single, together, guessed = [], [], []
    for number in range(times):
        members = np.arange(number * summed, (number + 1) * summed)
        parameters, change = inversion.sum_of(federations, members)
        found = inversion.invert(parameters, change, labels[members], steps=steps, seed=number)
        together.append(inversion.compare(found, pictures[members]))
        guessed.append(inversion.compare(classes, pictures[members]))
        for member in members[:: max(1, summed // 4)]:
            parameters, change = inversion.sum_of(federations, members=np.array([member]))
            found = inversion.invert(parameters, change, labels[[member]], steps=steps, seed=number)
            single.append(inversion.compare(found, pictures[[member]]))

    def mean(values: list[inversion.Similarity], name: str) -> float:
        return float(np.mean([getattr(each, name) for each in values]))

    return [
        row(f"inversion, {case}", mean(together, name), mean(peer, name), peer_name, unit)
        for case, name, unit in (("correlation", "correlation", "r"), ("PSNR", "psnr", "dB"))
        for peer, peer_name in ((single, "a single update"), (guessed, "no update: class means"))
    ]


if __name__ == "__main__":
    main()
