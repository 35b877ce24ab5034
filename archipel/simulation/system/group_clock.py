"""A round in secure groups, on a virtual clock: each goes its own way, and the version waits for those that are left.

So it is on a server (`archipel/server/rounds/groups/grouping.py`). A group that fails is left out. Where fewer are left
than the rule needs, all fail at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from archipel.simulation.system.clock import Outcome

TimeGroup = Callable[[Sequence[int], float], Outcome]
"""(devices, until) -> what comes of their group, as of `run_round`."""


def run_groups(time_group: TimeGroup, groups: Sequence[Sequence[int]], needed: int) -> Outcome:
    """The round of these groups, which begin together; with fewer than `needed` of them it fails."""
    found = [time_group(group, math.inf) for group in groups]
    failures = sorted((outcome.end, place) for place, outcome in enumerate(found) if outcome.failed)
    whole = Outcome(max(outcome.end for outcome in found))
    if len(groups) - len(failures) < needed:
        whole.end, place = failures[len(groups) - needed]
        whole.failed = f"{needed - 1} groups are left, {needed} needed; {found[place].failed}"
        found = [
            outcome if outcome.end <= whole.end else time_group(group, whole.end)
            for group, outcome in zip(groups, found, strict=True)
        ]
    for group, outcome in zip(groups, found, strict=True):
        whole.down, whole.up = whole.down + outcome.down, whole.up + outcome.up
        whole.left |= outcome.left
        whole.busy |= outcome.busy
        if outcome.failed:
            why = f"its group failed: {outcome.failed}"
            whole.left |= {client: why for client in group if client not in whole.left}
        elif not whole.failed:
            whole.counted += outcome.counted
    whole.counted.sort()
    return whole
