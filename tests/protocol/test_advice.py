"""Whoever reads why a round failed reads what to do, for each reason that devices and rounds can have."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from archipel.protocol.messages import LeaveReason
from archipel.protocol.operator.advice import OF_REASONS, advise_on_failure, advise_on_refusals
from tests.support.pages import ROOT

PAGE = (ROOT / "docs/failed-rounds.md").read_text()
PHASES = dict(re.findall(r"^\| `N [\w ]+ by the deadline of phase (\w+)`.* \| (.*) \| .* \|$", PAGE, re.M))


def test_each_reason_of_a_device_has_an_advice_and_is_on_the_page() -> None:
    assert {*OF_REASONS} == {*get_args(LeaveReason), "untold"}
    for reason in OF_REASONS:
        assert f"`{reason}`" in PAGE
    assert list(advise_on_refusals({"data": 1, "size": 3, "later": 9})) == ["size", "data"]


@pytest.mark.parametrize("phase", [*PHASES, "buffering"])
def test_each_phase_of_the_page_has_an_advice(phase: str) -> None:
    assert advise_on_failure(f"round 2: 5 devices did so by the deadline of phase {phase}, 6 needed")


def test_the_page_has_the_phases_that_wait_for_devices() -> None:
    assert {*PHASES} == {"assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking",
                         "updating"}  # fmt: skip
    left = "3 of 8 devices left the round in phase advertising, 6 needed"
    assert advise_on_failure(left) == "look at what the devices gave as their reason"
    assert advise_on_failure("the sum was not ready in time") == ""
