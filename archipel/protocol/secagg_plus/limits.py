"""How large the server's messages of a round over neighbours may be: what the plan says bounds them."""

from __future__ import annotations

from archipel.protocol.messages import RoundPlan
from archipel.protocol.secagg_plus.envelope import DEALT_BYTES
from archipel.protocol.secagg_plus.member import MAX_MEMBER_BYTES
from archipel.protocol.secagg_plus.messages import (
    Dealing,
    Inbox,
    Inclusion,
    Inclusions,
    Invitation,
    Neighbours,
    Packed,
    Partner,
    Partners,
    Question,
)
from archipel.protocol.secagg_plus.tree import HASH_BYTES

# At most, in MessagePack: a number below 2^32, and what stands before bytes or a list.
_NUMBER = _HEADER = 5
_KEY = _HEADER + 32
_OF_ONE: dict[type, int] = {
    Dealing: _HEADER + 2 * _NUMBER + _KEY + _HEADER + DEALT_BYTES,
    Partner: _HEADER + _NUMBER + _KEY,
    Inclusion: _HEADER + _NUMBER + _HEADER + 64,
}


def largest_message(kind: type[Packed], plan: RoundPlan) -> int:
    """The bytes of the largest message of this kind that an honest server sends a device in a round of the plan."""
    most, known = plan.max_cohort, plan.neighbours + 1
    depth = (most - 1).bit_length()
    sizes: dict[type[Packed], int] = {
        Invitation: 2 * _NUMBER + _KEY,
        Neighbours: known * (_HEADER + MAX_MEMBER_BYTES + depth * HASH_BYTES) + 2 * _HEADER,
        Inbox: most * _OF_ONE[Dealing] + _HEADER,
        Partners: plan.partners * _NUMBER + most * _OF_ONE[Partner] + 2 * _HEADER,
        Question: most * _NUMBER + 2 * _HEADER,
        Inclusions: plan.neighbours * _OF_ONE[Inclusion] + _HEADER,
    }
    return _HEADER + sizes[kind]
