"""What correlated noise saves: the error of a model that adds up the sums of 200 rounds, at the same privacy.

Error: the root mean square, over the rounds, of the noise in one element of the sum of all rounds so far, for a noise
multiplier of 1 for all rounds together. Devices come again after `separation` rounds at the earliest. "ours" are the
coefficients that a task gets (archipel.privacy.correlated). "tree" is the binary tree, with the best weights for all
nodes that are complete (Honaker 2015), as of devices that come at even distances, which favours it: others may cost
more. "tree, as it comes" adds up the nodes alone, "independent" draws noise for each round. The last rows are the time
to draw a round's noise for a million elements, with all earlier noise in memory.

    python benchmarks/correlated_noise.py             200 rounds, five separations (a minute)
    python benchmarks/correlated_noise.py --quick     one separation
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from measure import Report, Row, arguments
from numpy.typing import NDArray

from archipel.lite_runtime.many_samples import sample_gaussian
from archipel.privacy.correlated import correlate, settle_coefficients
from archipel.privacy.factorization import prefix_error
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy

ROUNDS = 200
SEPARATIONS = (200, 100, 50, 20, 10, 5)
ELEMENTS = 1_000_000
SCALE = 1 << 20

Matrix = NDArray[np.float64]


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(options.json, ("numpy", "scipy"))
    for separation in (20,) if options.quick else SEPARATIONS:
        coefficients = given(separation)
        ours = prefix_error([each / coefficients[0] for each in coefficients], ROUNDS, separation)
        nodes = tree(ROUNDS)
        peers = {
            "tree": tree_error(nodes, separation, best_weights),
            "tree, as it comes": tree_error(nodes, separation, plain_weights),
            "independent": prefix_error([1.0], ROUNDS, separation),
        }
        case = f"separation {separation}, {len(coefficients)} bands"
        report.add(Row("correlated_noise", case, ours, peer, name, ours / peer, "rms") for name, peer in peers.items())
    elements = ELEMENTS // 10 if options.quick else ELEMENTS
    alone, correlated = seconds(elements, (1,)), seconds(elements, given(50))
    case = f"{elements:,} elements"
    report.add([Row("correlated_noise", case, correlated, alone, "independent", correlated / alone, "s")])


def given(separation: int) -> tuple[int, ...]:
    """The coefficients that a task of so many rounds gets."""
    wanted = DifferentialPrivacy(mechanism="correlated", noise_multiplier=1.0, separation=separation)
    return settle_coefficients(wanted, ROUNDS).coefficients


def tree(rounds: int) -> Matrix:
    """The nodes of the binary tree that are complete by the last round, the smallest first, `[nodes, rounds]`."""
    nodes, width = [], 1
    while width <= rounds:
        nodes += [np.arange(rounds) // width == place for place in range(rounds // width)]
        width *= 2
    return np.array(nodes, np.float64)


def tree_error(nodes: Matrix, separation: int, weights: Callable[[Matrix], Matrix]) -> float:
    """As archipel.privacy.factorization.prefix_error; `weights` of the nodes that a prefix may use."""
    rounds = nodes.shape[1]
    worst = max(float(np.linalg.norm(nodes[:, first::separation].sum(axis=1))) for first in range(separation))
    squares = 0.0
    for end in range(1, rounds + 1):
        squares += float(np.sum(weights(nodes[(nodes[:, end:] == 0).all(axis=1), :end]) ** 2))
    return worst * math.sqrt(squares / rounds)


def best_weights(nodes: Matrix) -> Matrix:
    """With which the nodes add up to the prefix and have the least noise."""
    return np.asarray(np.linalg.lstsq(nodes.T, np.ones(nodes.shape[1]), rcond=None)[0])


def plain_weights(nodes: Matrix) -> Matrix:
    """The largest nodes that cover the prefix, each once."""
    covered, chosen = np.zeros(nodes.shape[1], bool), np.zeros(len(nodes))
    for place in range(len(nodes) - 1, -1, -1):
        if not covered[nodes[place] > 0].any():
            covered |= nodes[place] > 0
            chosen[place] = 1.0
    return chosen


def seconds(elements: int, coefficients: tuple[int, ...]) -> float:
    """To draw the noise of a round after which all earlier noise that it needs is there; the least of three."""
    past = [sample_gaussian(SCALE, elements) for _ in coefficients[1:]]
    took = []
    for _ in range(3):
        began = time.perf_counter()
        correlate(coefficients, sample_gaussian(SCALE, elements), past)
        took.append(time.perf_counter() - began)
    return min(took)


if __name__ == "__main__":
    main()
