"""Membership inference by likelihood ratio (LiRA: Carlini et al. 2022) with a device as the unit: did it take part?

Many federations are trained, each by a random half of the devices. Each is attacked in turn, with all others as its
shadows: of those that a device was in, and of those that it was not in, a normal distribution is fitted to the model's
confidence in the device's digits. The score is the logarithm of the ratio of the two densities of what the attacked
model says. Variances are those of all devices together, since each device has few shadows (there, section VI.A).

Where noise hides most of the difference, a mean of few shadows is worse than none. So there are two simpler attacks
beside it: the confidence less its mean over all shadows, and the confidence itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from bounds import Flags, Numbers, area, true_positives
from federations import Devices, Federations, Tensors, answer

from archipel.protocol.operator.differential_privacy import DifferentialPrivacy


@dataclass(frozen=True)
class Membership:
    """What attacks on all federations found, as means over these.

    `likelihood_ratio` is the area under the curve of the best likelihood ratio, `best` that of the best attack of all,
    `error` its standard error, `true_positives` the share of members that it finds where it takes one of a hundred
    others for one. `accuracy` is that of the models on digits of no device, `epsilon` what each cost.
    """

    likelihood_ratio: float
    best: float
    error: float
    true_positives: float
    accuracy: float
    epsilon: float | None


def attack(
    federations: Federations,
    devices: Devices,
    count: int,
    cohort: int,
    rounds: int,
    privacy: DifferentialPrivacy,
    seed: int,
) -> Membership:
    """Train so many federations of a half of the devices each, and attack every one of them.

    What is looked at is the confidence in each digit by itself, as if these were independent, the mean of a device's
    digits, and the least of them. The best of several attacks looks a little better than it is, which is to the
    attack's advantage.
    """
    rng, size = np.random.default_rng(seed), len(devices.clients)
    members = np.zeros((count, size), bool)
    trained, values = [], []
    for number in range(count):
        members[number, rng.permutation(size)[: size // 2]] = True
        trained.append(federations.train(np.flatnonzero(members[number]), cohort, rounds, privacy, seed=number))
        values.append(confidences(trained[-1].parameters, devices))
    each = np.array(values)
    of_devices = [each.mean(axis=2), each.min(axis=2)]
    ratios = [likelihood_ratios(each, members), *(likelihood_ratios(one[:, :, None], members) for one in of_devices)]
    # Less the mean of all federations: a multiple of the difference to the mean of all others.
    simpler = [*of_devices, *(one - one.mean(axis=0) for one in of_devices)]
    areas = np.array([[area(*pair) for pair in zip(scores, members)] for scores in [*ratios, *simpler]])
    best = int(areas.mean(axis=1).argmax())
    found = [true_positives(*pair, 0.01) for pair in zip([*ratios, *simpler][best], members)]
    return Membership(
        likelihood_ratio=float(areas[: len(ratios)].mean(axis=1).max()),
        best=float(areas[best].mean()),
        error=float(areas[best].std(ddof=1) / np.sqrt(count)),
        true_positives=float(np.mean(found)),
        accuracy=float(np.mean([one.accuracy for one in trained])),
        epsilon=trained[0].epsilon,
    )


def confidences(parameters: Tensors, devices: Devices) -> Numbers:
    """log(p / (1 - p)) of the right answer, for each digit of each device, [devices, digits]."""
    pictures = np.concatenate([pictures for pictures, _ in devices.clients])
    labels = np.concatenate([labels for _, labels in devices.clients])
    logits = answer(parameters, pictures).astype(np.float64)
    rows = np.arange(len(labels))
    right = logits[rows, labels]
    logits[rows, labels] = -np.inf
    return (right - np.logaddexp.reduce(logits, axis=1)).reshape(len(devices.clients), -1)


def likelihood_ratios(values: Numbers, members: Flags) -> Numbers:
    """The scores of all devices in all federations, [federations, devices]: higher for a device that took part.

    values [federations, devices, digits], members [federations, devices]; each device is in one federation at least,
    and not in two, or the other way round, beside the one attacked.
    """
    found = np.empty(members.shape)
    for target in range(len(values)):
        others = np.arange(len(values)) != target
        inside = members[others][:, :, None]
        found[target] = (
            _log_density(values[target], values[others], inside) - _log_density(values[target], values[others], ~inside)
        ).sum(axis=1)
    return found


def _log_density(at: Numbers, values: Numbers, chosen: Flags) -> Numbers:
    """Of normal distributions with the means of the chosen federations' values, [devices, digits], and one variance."""
    counts = np.maximum(chosen.sum(axis=0), 1)
    means = (values * chosen).sum(axis=0) / counts
    free = chosen.sum() * values.shape[2] - means.size
    variance = (((values - means) ** 2) * chosen).sum() / free
    return np.asarray(-((at - means) ** 2) / (2 * variance) - 0.5 * np.log(variance))
