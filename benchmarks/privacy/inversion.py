"""Gradient inversion: pictures out of one device's update, and with the same attack out of a secure sum of many.

The attack is that of Geiping et al. 2020 ("Inverting gradients"), section 4: it looks for pictures whose gradient has
the direction of what was sent, by Adam on the cosine distance, and it is told the labels. It looks for as many pictures
as there are devices. Each device has one digit and makes one step, the easiest case for the attack.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from bounds import Numbers
from federations import Federations, Tensors
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, relu

from archipel.simulation.rounds import Rounds, RoundSettings
from archipel.simulation.sums import SecureSum

PARAMETERS = ("0.weight", "0.bias", "2.weight", "2.bias")


@dataclass(frozen=True)
class Similarity:
    """How much what was found is like the true pictures: of each true picture the most like it, then means.

    `correlation`: 1 for the same picture; `psnr`: decibels, more for a better copy.
    """

    correlation: float
    psnr: float


def sum_of(federations: Federations, members: NDArray[np.int64]) -> tuple[Tensors, Tensors]:
    """What a round begins with, and what a server learns of it: the decoded sum of the members' updates, by tensor."""
    course = Rounds(federations.bundle, len(members), RoundSettings(cohort=len(members)), None)
    work = course.first_work()
    total = federations.lanes.run(work, [int(member) for member in members]).total
    assert isinstance(total, SecureSum)
    return work.parameters, total.decoded(len(members)).deltas


def invert(
    parameters: Tensors, change: Tensors, labels: NDArray[np.int64], *, steps: int, seed: int, tries: int = 2
) -> NDArray[np.float32]:
    """The pictures, [labels, pixels], whose step changes the parameters most in this direction.

    `tries` begin at other pictures; the one with the least distance is taken, which the attack sees.
    """
    weights = [torch.tensor(np.asarray(parameters[name])).requires_grad_() for name in PARAMETERS]
    # A step of gradient descent goes against the gradient.
    target = torch.cat([-torch.tensor(np.asarray(change[name], np.float32)).reshape(-1) for name in PARAMETERS])
    target /= target.norm()
    answers, generator = torch.tensor(labels), torch.Generator().manual_seed(seed)
    best, least = None, float("inf")
    for _ in range(tries):
        pictures = torch.rand(len(labels), weights[0].shape[1], generator=generator).requires_grad_()
        optimizer = torch.optim.Adam([pictures], lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            logits = relu(pictures @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
            # The sum over devices, each with one digit.
            loss = cross_entropy(logits, answers, reduction="sum")
            found = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, weights, create_graph=True)])
            distance = 1 - found @ target / found.norm().clamp_min(1e-12)
            (pictures.grad,) = torch.autograd.grad(distance, pictures)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                pictures.clamp_(0, 1)
        if distance.item() < least:
            best, least = pictures.detach().numpy(), distance.item()
    assert best is not None
    return best


def compare(found: NDArray[np.float32], true: NDArray[np.float32]) -> Similarity:
    """Of each true picture, [n, pixels], the one found that is most like it."""

    def centred(pictures: NDArray[np.float32]) -> Numbers:
        rows = pictures.astype(np.float64) - pictures.mean(axis=1, keepdims=True)
        return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))

    correlations = centred(true) @ centred(found).T
    errors = ((true[:, None].astype(np.float64) - found[None]) ** 2).mean(axis=2)
    psnr = -10 * np.log10(np.maximum(errors.min(axis=1), 1e-12))
    return Similarity(float(correlations.max(axis=1).mean()), float(psnr.mean()))
