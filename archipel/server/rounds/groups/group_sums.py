"""The sums of a round's secure groups: each is kept in the spool, and all become one by the task's rule."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.plain import PlainSum
from archipel.protocol.vector import DecodedSum, Layout
from archipel.server.rounds.robust import combine_parts
from archipel.server.storage.spool import UpdateSpool
from archipel.strategies.robust.parts import Part, add_parts
from archipel.strategies.strategy import Tensors


def store_sum(spool: UpdateSpool, round_id: str, total: DecodedSum, layout: Layout) -> str:
    """Store a group's unmasked sum, durably when this returns. Returns its digest."""
    arrays = {port.name: np.asarray(total.read(port), np.float64) for port in layout.updates}
    return spool.keep_sum(round_id, (PlainSum(layout, arrays).encode(),)).digest


def combine_groups(
    spool: UpdateSpool,
    groups: Sequence[tuple[str, str, int]],
    layout: Layout,
    request: TaskRequest,
    state: Tensors,
) -> tuple[DecodedSum, Tensors]:
    """What stands for the sum of all groups, and what the rule keeps.

    Arguments:
        groups: each one's round, the digest of its sum, and how many devices are in it.
        layout: of the updates.
        state: what the rule has kept.

    Raises ServerError for a sum that is lost or damaged, BoundError.
    """
    parts = [Part(PlainSum.decode(spool.read_sum(*each[:2]), layout).decoded(), each[2]) for each in groups]
    if not request.aggregation.robust:
        total = add_parts(parts, layout)
        layout.check_sum(total, sum(part.devices for part in parts))
        return total, {}
    # Two sums are never the same bytes by chance; the round's id tells apart those of devices that did not move.
    digests = [hashlib.sha256(f"{round_id}/{digest}".encode()).hexdigest() for round_id, digest, _ in groups]
    return combine_parts(parts, layout, request, state, digests)
