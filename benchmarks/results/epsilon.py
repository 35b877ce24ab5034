"""What privacy costs in accuracy: digits by writer, with the server's noise for several epsilons.

    python benchmarks/results/epsilon.py              three seeds, about eight minutes of one core
    python benchmarks/results/epsilon.py --quick      one seed, few rounds, an epsilon of 8

A device has 100 digits of one writer, of the digits in the package; 24 writers, drawn by the seed, have the test digits
and no device. 60 rounds of two epochs in batches of 10, plain SGD with a rate of 0.2 on the devices and a momentum of
0.9 on the server, updates clipped to 0.5; a network of two convolutions with 3,898 parameters. All rows have these
settings, but the last: what the same network reaches without noise at a clip that hardly ever cuts, 1, and a rate of
0.1, which is better then.

Noise is that of the server (archipel.privacy.central, docs/privacy.md), made for a unit of one device and a delta of
1e-5. There are not enough writers for a cohort of 1,000, and noise is for those: a round sums 40 devices, with 40/1000
of the noise that a sum of 1,000 would get, so the mean has the noise that a mean of 1,000 has. Epsilon is that of such
a federation, by its accountant: with "central" of every device, in whatever rounds it was; with "correlated" of every
device where none comes more often than every fourth round, so of 4,000 devices or more. "as they are" are rows of the
40 devices alone, with the noise that these need.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tables import Table, draw_curves, result_arguments, spread
from torch import nn

import archipel
from archipel.datasets import digits_by_writer
from archipel.privacy import spent_epsilon
from archipel.privacy.central import events_of, settle
from archipel.simulation import DifferentialPrivacy

COHORT, STATED, SEPARATION, TESTERS, DIGITS = 40, 1000, 4, 24, 100
"""Devices in a round, devices whose noise it has, rounds between two of a device, writers of test digits, digits of a
device."""
ROUNDS, EPOCHS, RATE, CLIP = 60, 2, 0.2, 0.5
UNCLIPPED = {"clip": 1.0, "rate": 0.1}
EPSILONS = (8.0, 4.0, 2.0, 1.0)
DELTA = 1e-5
TIMES = 10
"""Measurements of a run."""

Examples = tuple[np.ndarray, np.ndarray]


def make_devices(seed: int) -> tuple[list[Examples], Examples]:
    """The digits of each device, and those of the writers who have none."""
    digits, rng = digits_by_writer(), np.random.default_rng(seed)
    order = rng.permutation(np.unique(digits.writers))
    images, labels = digits.inputs(), digits.targets()
    of_each = [rng.permutation(np.flatnonzero(digits.writers == writer))[:DIGITS] for writer in order[TESTERS:]]
    tested = np.isin(digits.writers, order[:TESTERS])
    return [(images[own], labels[own]) for own in of_each if len(own) == DIGITS], (images[tested], labels[tested])


def make_network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, stride=2), nn.ReLU(), nn.Conv2d(6, 12, 5, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(192, 10),
    )  # fmt: skip


def make_noise(mechanism: str, epsilon: float, rounds: int) -> DifferentialPrivacy:
    """The least noise with which so many rounds cost epsilon. Checks by the account that they do, and hardly less."""
    separation = SEPARATION if mechanism == "correlated" else None
    asked = DifferentialPrivacy(mechanism=mechanism, epsilon=epsilon, delta=DELTA, separation=separation)  # type: ignore[arg-type]
    settled = settle(asked, rounds)
    cost = spent_epsilon(events_of(settled, 0, rounds), DELTA)
    if not 0.99 * epsilon < cost <= epsilon:
        raise RuntimeError(f"{mechanism}: {rounds} rounds cost {cost}, asked for {epsilon}")
    return settled


def train(
    noise: DifferentialPrivacy | None, share: float, seed: int, rounds: int, clip: float = CLIP, rate: float = RATE
) -> list[float]:
    """The accuracy in percent on the test digits after every tenth of the rounds, with that share of the noise."""
    devices, test = make_devices(seed)
    added = None
    if noise is not None and noise.noise_multiplier is not None:
        # Without the target: the simulation's own account is of the smaller noise.
        added = DifferentialPrivacy(
            mechanism=noise.mechanism, noise_multiplier=noise.noise_multiplier * share, delta=DELTA,
            separation=noise.separation, coefficients=noise.coefficients,
        )  # fmt: skip
    result = archipel.simulate(
        make_network(seed), devices, "fedavgm", rounds=rounds, cohort=COHORT, seed=seed, epochs=EPOCHS, batch_size=10,
        strategy_options={"weighting": "uniform", "clip": clip}, hyperparameters={"lr": rate, "server_lr": 1.0},
        test=test, test_every=max(rounds // TIMES, 1), differential_privacy=added,
    )  # fmt: skip
    return [100 * row.tested["accuracy"] for row in result.history if row.tested]


def main() -> None:
    options = result_arguments(__doc__).parse_args()
    seeds: Sequence[int] = options.seeds[:1] if options.quick else options.seeds
    rounds, epsilons = (4, EPSILONS[:1]) if options.quick else (ROUNDS, EPSILONS)
    table = Table("epsilon", options, ("epsilon", "noise multiplier", "accuracy", "below no noise"))
    none = [
        table.cell(f"none-{seed}", lambda seed=seed: train(None, 0.0, seed, rounds))[-1] for seed in seeds
    ]  # fmt: skip

    def add(case: str, epsilon: float | None, multiplier: float | None, runs: list[list[float]]) -> None:
        last = [run[-1] for run in runs]
        lost = [before - after for before, after in zip(none, last)]
        told = ["none" if epsilon is None else f"{epsilon:g}", "0" if multiplier is None else f"{multiplier:.2f}"]
        below = float(np.mean(lost))
        table.add(case, [*told, spread(last), spread(lost)], percent=float(np.mean(last)), points_below=below)

    add("no noise", None, None, [[each] for each in none])
    lines: dict[str, list[list[tuple[float, float]]]] = {}
    for mechanism in ("central", "correlated"):
        found = {}
        for epsilon in epsilons:
            noise = make_noise(mechanism, epsilon, rounds)
            found[epsilon] = runs = [
                table.cell(
                    f"{mechanism}-{epsilon:g}-{seed}",
                    lambda seed=seed, noise=noise: train(noise, COHORT / STATED, seed, rounds),
                )
                for seed in seeds
            ]  # fmt: skip
            add(f"{mechanism}, a cohort of {STATED:,}", epsilon, noise.noise_multiplier, runs)
        lines[mechanism] = [[(each, found[each][place][-1]) for each in sorted(found)] for place in range(len(seeds))]
    for mechanism in ("central", "correlated"):
        noise = make_noise(mechanism, EPSILONS[0], rounds)
        runs = [
            table.cell(
                f"{mechanism}-alone-{seed}", lambda seed=seed, noise=noise: train(noise, 1.0, seed, rounds)
            )
            for seed in seeds
        ]  # fmt: skip
        add(f"{mechanism}, the {COHORT} as they are", EPSILONS[0], noise.noise_multiplier, runs)
    runs = [
        table.cell(f"unclipped-{seed}", lambda seed=seed: train(None, 0.0, seed, rounds, **UNCLIPPED))
        for seed in seeds
    ]  # fmt: skip
    add("no noise, a longer clip", None, None, runs)
    if options.plot:
        draw_curves(
            options.plot, {"digits by writer, 60 rounds": lines}, "epsilon (delta 1e-5)", "test accuracy, %",
            [float(np.mean(none))], log=True, marks=sorted(epsilons),
        )  # fmt: skip


if __name__ == "__main__":
    main()
