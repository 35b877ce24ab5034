"""Secure aggregation: the server adds up what it cannot read."""

from archipel.protocol.secagg.checks import (
    check_advertisement,
    check_confirmation,
    check_shares,
    check_unmasking,
    survivors_digest,
)
from archipel.protocol.secagg.cohort import cohort_digest
from archipel.protocol.secagg.masks import add_masked
from archipel.protocol.secagg.participant import Participant
from archipel.protocol.secagg.unmask import disputes, unmask_sum

__all__ = [
    "Participant",
    "add_masked",
    "check_advertisement",
    "check_confirmation",
    "check_shares",
    "check_unmasking",
    "cohort_digest",
    "disputes",
    "survivors_digest",
    "unmask_sum",
]
