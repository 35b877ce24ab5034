"""How long a pipeline takes for one batch."""

from __future__ import annotations

from collections.abc import Sequence


def pipeline_seconds(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> float:
    """Seconds of the schedule 1F1B (Narayanan et al. 2019, section 2.2), played through.

    A stage first runs as many forward passes as there are stages from it on, and then takes turns: one backward, one
    forward. Each pass waits for its neighbour's. Of n equal stages and m microbatches that is m + n - 1 times one of
    both passes; of others less than the slowest would make it, because the quicker ones wait beside it.

    Arguments:
        forward: of each stage, for one microbatch; with what it sends.
        backward: the same.
        microbatches: 1 or more.

    Example:
        pipeline_seconds([1.0, 1.0], [2.0, 2.0], 4)   # 15.0
    """
    n = len(forward)
    free = [0.0] * n
    done = [[0, 0] for _ in range(n)]  # passes of each stage so far: forward, backward
    ended_forward = [[0.0] * microbatches for _ in range(n)]
    ended_backward = [[0.0] * microbatches for _ in range(n)]
    waiting = list(range(n))
    while waiting:
        stage = waiting.pop()
        while done[stage][1] < microbatches:
            ahead, back = done[stage]
            turn = min(microbatches, back + n - stage)  # forward passes before the next backward one
            if ahead < turn:
                if stage and done[stage - 1][0] <= ahead:
                    break
                start = max(free[stage], ended_forward[stage - 1][ahead] if stage else 0.0)
                free[stage] = ended_forward[stage][ahead] = start + forward[stage]
                done[stage][0] += 1
                waiting += [stage + 1] if stage < n - 1 else []
            else:
                if stage < n - 1 and done[stage + 1][1] <= back:
                    break
                start = max(free[stage], ended_backward[stage + 1][back] if stage < n - 1 else 0.0)
                free[stage] = ended_backward[stage][back] = start + backward[stage]
                done[stage][1] += 1
                waiting += [stage - 1] if stage else []
    return max(free)
