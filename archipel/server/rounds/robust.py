"""Rounds whose updates become one by a robust rule. The rule itself is archipel.strategies.robust.

A rule needs the single updates of a plain round, so these stay in the spool, acknowledged and durable, until the round
ends: nothing is folded, and a kill anywhere leaves the same files. The check of the task bounds how much that is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from archipel.errors import PolicyError, ServerError
from archipel.permutations import permutation
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.plain import decode_plain
from archipel.protocol.vector import DecodedSum, Layout
from archipel.server.rounds.folding import Pending
from archipel.server.storage.spool import UpdateSpool
from archipel.strategies.robust.parts import Part, aggregate_parts
from archipel.strategies.strategy import Tensors

_BUCKETS = 0x6275636B


def keeps_single(request: TaskRequest) -> bool:
    """Whether the task's rule takes the single updates of its rounds."""
    return request.aggregation.robust and request.privacy == "plain"


def combine_updates(
    spool: UpdateSpool, updates: Sequence[Pending], layout: Layout, request: TaskRequest, state: Tensors
) -> tuple[DecodedSum, Tensors]:
    """The rule over single updates: what stands for their sum, checked, and what the rule keeps.

    Raises ServerError for an update that is lost or damaged, PolicyError for too few, BoundError.
    """
    # Not in the order in which they came: what the rule makes in the last digits is no device's to choose.
    chosen = sorted(updates, key=lambda update: update.device_id)
    parts = []
    root: Part | None = None
    for update in chosen:
        data = spool.read(update.origin, update.device_id, update.digest)
        arrays = decode_plain(data, layout)
        part = Part(DecodedSum.of({port: arrays[port.name] for port in layout.updates}), 1)
        if update.device_id == request.aggregation.root:
            root = part
        else:
            parts.append(part)
    if request.aggregation.root and root is None:
        raise ServerError("the update of the task's root device is not there")
    return combine_parts(parts, layout, request, state, [update.digest for update in chosen], root)


def combine_parts(
    parts: Sequence[Part],
    layout: Layout,
    request: TaskRequest,
    state: Tensors,
    digests: Sequence[str],
    root: Part | None = None,
) -> tuple[DecodedSum, Tensors]:
    """The rule over the parts of a round, with the digest of each part's bytes, and the update of its root device,
    which is none of the parts. Raises PolicyError, BoundError."""
    if not parts:
        raise ServerError("no update is there")
    try:
        made, after = aggregate_parts(parts, layout, request.aggregation, state, _order(digests, len(parts)), root)
    except PolicyError as error:
        raise ServerError(f"aggregation: {error}") from None
    layout.check_sum(made, sum(part.devices for part in parts))
    return made, after


def _order(digests: Sequence[str], parts: int) -> np.ndarray:
    """Of buckets: the same after a kill, and nobody knows it who does not know all updates."""
    seed = hashlib.sha256("".join(sorted(digests)).encode()).digest()[:4]
    return permutation(parts, int.from_bytes(seed, "big"), _BUCKETS, 0)
