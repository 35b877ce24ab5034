"""How large the server's messages of a round over neighbours may be: what the plan says bounds them."""

from __future__ import annotations

from archipel.protocol.messages import RoundPlan
from archipel.protocol.secagg.keys import KEY_BYTES
from archipel.protocol.secagg_plus.member import MAX_MEMBER_BYTES
from archipel.protocol.secagg_plus.messages import (
    SIGNATURE_BYTES,
    Inbox,
    Inclusions,
    Invitation,
    Neighbours,
    Packed,
    Partners,
    Question,
)
from archipel.protocol.secagg_plus.terms import agreement_of
from archipel.protocol.secagg_plus.tree import HASH_BYTES

# At most, in MessagePack: a number below 2^32, and what stands before bytes or a list.
_NUMBER = _HEADER = 5
_MOST_FIELDS = 4


def largest_message(kind: type[Packed], plan: RoundPlan) -> int:
    """The bytes of the largest message of this kind that an honest server sends a device in a round of the plan."""
    most, known, agreement = plan.max_cohort, plan.neighbours + 1, agreement_of(plan.protocol)
    depth = (most - 1).bit_length()
    sizes: dict[type[Packed], int] = {
        Invitation: 2 * _NUMBER + KEY_BYTES,
        Neighbours: known * (_HEADER + MAX_MEMBER_BYTES + depth * HASH_BYTES),
        Inbox: most * (2 * _NUMBER + KEY_BYTES + agreement.dealt_bytes() + agreement.told_bytes),
        Partners: plan.partners * _NUMBER + most * (_NUMBER + KEY_BYTES),
        Question: most * _NUMBER,
        Inclusions: plan.neighbours * (_NUMBER + SIGNATURE_BYTES),
    }
    return (1 + _MOST_FIELDS) * _HEADER + sizes[kind]
