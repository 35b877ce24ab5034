from __future__ import annotations

import subprocess
import sys

import pytest

import archipel.protocol
import archipel.protocol.secagg


def test_public_names():
    assert archipel.protocol.__all__ == [
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
    assert archipel.protocol.secagg.__all__ == [
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
    for package in (archipel.protocol, archipel.protocol.secagg):
        assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.sampled(every=3)
def test_a_device_can_import_it():
    # None in sys.modules makes an import fail, as it would where the package is not installed.
    script = (
        "import sys\n"
        "for name in ('onnx', 'onnx_ir', 'onnxscript', 'torch', 'flask', 'sqlalchemy'): sys.modules[name] = None\n"
        "import archipel.protocol\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
