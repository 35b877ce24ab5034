"""'It prints `coefficients ()`: is something broken?'"""

from __future__ import annotations

from archipel.cli.input_output.remote import fields
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy


def test_what_is_empty_is_left_out() -> None:
    noise = DifferentialPrivacy(mechanism="central", noise_multiplier=1.0)
    assert [line.split()[0] for line in fields(noise)] == ["mechanism", "noise_multiplier", "delta"]


def test_and_what_is_not_is_a_list() -> None:
    noise = DifferentialPrivacy(mechanism="correlated", noise_multiplier=1.0, separation=2, coefficients=(3, 2, 1))
    assert "coefficients      3, 2, 1" in fields(noise)
