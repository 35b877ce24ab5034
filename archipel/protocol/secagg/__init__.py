"""Secure aggregation: the server adds up what it cannot read."""

from archipel.protocol.secagg.checks import (
    check_advertisement,
    check_confirmation,
    check_envelope_keys,
    check_shares,
    check_unmasking,
    survivors_digest,
)
from archipel.protocol.secagg.cohort import cohort_digest, hand_out_keys, read_session
from archipel.protocol.secagg.complaints import (
    check_complaint,
    check_complaints,
    complaints_digest,
    merge_complaints,
)
from archipel.protocol.secagg.key_tree import KeyTree
from archipel.protocol.secagg.masks import add_masked
from archipel.protocol.secagg.participant import Participant
from archipel.protocol.secagg.session import Session
from archipel.protocol.secagg.unmask import disputes, liars, unmask_sum

__all__ = [
    "KeyTree",
    "Participant",
    "Session",
    "add_masked",
    "check_advertisement",
    "check_complaint",
    "check_complaints",
    "check_confirmation",
    "check_envelope_keys",
    "check_shares",
    "check_unmasking",
    "cohort_digest",
    "complaints_digest",
    "disputes",
    "hand_out_keys",
    "liars",
    "merge_complaints",
    "read_session",
    "survivors_digest",
    "unmask_sum",
]
