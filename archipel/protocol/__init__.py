"""What server and devices share, without I/O: messages, identities, fixed-point vectors, secure aggregation."""

from archipel.protocol.identity import (
    EnrolmentToken,
    VerifiedDevice,
    device_id,
    enrolment_request,
    issue_identity,
    mint_token,
    verify_chain,
    verify_enrolment,
)
from archipel.protocol.policy import check_plan, plan_digest
from archipel.protocol.sealed import Sealed, decode, encode, public_bytes, seal, unseal
from archipel.protocol.secagg import (
    Participant,
    add_masked,
    check_advertisement,
    check_confirmation,
    check_shares,
    check_unmasking,
    cohort_digest,
    survivors_digest,
    unmask_sum,
)
from archipel.protocol.vector import DecodedSum, Layout, pack, unpack

__all__ = [
    "DecodedSum",
    "EnrolmentToken",
    "Layout",
    "Participant",
    "Sealed",
    "VerifiedDevice",
    "add_masked",
    "check_advertisement",
    "check_confirmation",
    "check_plan",
    "check_shares",
    "check_unmasking",
    "cohort_digest",
    "decode",
    "device_id",
    "encode",
    "enrolment_request",
    "issue_identity",
    "mint_token",
    "pack",
    "plan_digest",
    "public_bytes",
    "seal",
    "survivors_digest",
    "unmask_sum",
    "unpack",
    "unseal",
    "verify_chain",
    "verify_enrolment",
]
