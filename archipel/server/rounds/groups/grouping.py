"""Secure groups: a round in several parts, each a secure round of its own with its own plan, keys and sum.

Devices know of their group alone, and nothing of a device's protocol is different. All groups of a round have the same
number and the same `part_of`, the id of the first. They begin together, with a cohort that is drawn once and dealt out
by chance. Then each goes its own way until its sum is unmasked and stored (`group_sum`). A group that fails is left
out. When all others have their sums, the first of them makes the version of the sums of all; where fewer are left than
the task's rule needs, all fail together.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.protocol.operator.tasks import TaskRequest
from archipel.server.database.tables import Round
from archipel.strategies.robust.composing import least_parts


def group_size(request: TaskRequest) -> int:
    """The most devices of one sum: of a group, or of the cohort."""
    return -(-request.cohort // max(request.secure_groups, 1))


def groups_needed(request: TaskRequest) -> int:
    """With how few groups a round ends well."""
    return least_parts(request.aggregation)


def other_groups(session: Session, current: Round) -> list[Round]:
    """The other live groups of the same round, in their order; none of a round that has no groups."""
    if current.part_of is None:
        return []
    query = select(Round).where(
        Round.part_of == current.part_of, Round.ended.is_(None), Round.round_id != current.round_id
    )
    return list(session.scalars(query.order_by(Round.place)))


def waits(session: Session, current: Round) -> bool:
    """Whether a group has nothing to do by itself now: the first group begins for all, and ends for all."""
    if current.part_of is None:
        return False
    if current.phase == "assigning":
        return current.part_of != current.round_id
    if current.group_sum is None:
        return False
    others = other_groups(session, current)
    return any(each.group_sum is None or (each.place or 0) < (current.place or 0) for each in others)


def deal(devices: Sequence[str], groups: int) -> list[list[str]]:
    """The devices in groups whose sizes differ by one at most.

    Nobody can predict it, so that no device can arrange with which others it is in one sum.
    """
    shuffled = list(devices)
    secrets.SystemRandom().shuffle(shuffled)
    dealt: list[list[str]] = [[] for _ in range(groups)]
    for place, device in enumerate(shuffled):
        dealt[place * groups // len(shuffled)].append(device)
    return dealt


def keep_sum(session: Session, current: Round, digest: str, *, ends: float) -> None:
    """Note that the spool has the group's sum. `ends` (Unix seconds): until when the groups' sums become a version."""
    current.group_sum = digest
    give_time([current, *other_groups(session, current)], ends=ends)


def give_time(groups: Sequence[Round], *, ends: float) -> None:
    """Have the time of groups that have their sums end then: they waited for others."""
    for each in groups:
        if each.group_sum is not None:
            each.phase_ends = ends
