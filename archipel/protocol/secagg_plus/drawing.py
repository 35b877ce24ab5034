"""Each device draws its own neighbours, from randomness of its own.

Bell et al. 2020 let a semi-honest server draw the graph. Randomness that many commit to and reveal would keep a
malicious one from choosing it, but the last to reveal choose among many graphs by keeping theirs back. What protects a
device are its own neighbours alone. So it draws them itself, when the cohort is already fixed: nobody can lead its
draw, and the server learns it only with the question who they are.
"""

from __future__ import annotations

from collections.abc import Callable


def draw_neighbours(size: int, own: int, count: int, randomness: Callable[[int], bytes]) -> list[int]:
    """`count` distinct places of a cohort of `size` other than `own`, uniform over all orders; all where it is less."""
    others = [place for place in range(size) if place != own]
    count = min(count, len(others))
    # The beginning of a Fisher-Yates shuffle.
    for index in range(count):
        chosen = index + _below(len(others) - index, randomness)
        others[index], others[chosen] = others[chosen], others[index]
    return others[:count]


def _below(bound: int, randomness: Callable[[int], bytes]) -> int:
    """Uniform from 0 to `bound` - 1: draws again instead of taking a remainder of what is not a multiple."""
    least = (1 << 32) % bound
    while (drawn := int.from_bytes(randomness(4), "big")) < least:
        pass
    return drawn % bound
