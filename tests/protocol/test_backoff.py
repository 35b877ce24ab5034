"""Waits after failures, worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from archipel.protocol.backoff import Backoff


def test_each_wait_is_longer_up_to_the_longest() -> None:
    backoff = Backoff(0.5, longest=10.0)
    assert [backoff.after(failures) for failures in range(1, 8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert [Backoff(2.0, growth=3.0).after(failures) for failures in (1, 2, 3)] == [2.0, 6.0, 18.0]
    assert [Backoff(2.0, growth=1.0).after(failures) for failures in (1, 2, 9)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("growth", [2, 2.0])
def test_failures_without_end(growth: float) -> None:
    assert Backoff(0.25, growth=growth, longest=900.0).after(10**9) == 900.0
    assert Backoff(0.25, growth=growth).after(10**9) == math.inf


def test_what_the_server_asks_for() -> None:
    backoff = Backoff(0.5, longest=10.0)
    assert [backoff.after(failures, retry_after=3.0) for failures in (1, 9)] == [3.0, 3.0]
    assert backoff.after(9, retry_after=0.0) == 0.0
    # Never longer than the longest, unless that is for others to say.
    assert backoff.after(1, retry_after=3600.0) == 10.0
    assert Backoff(0.5, longest=10.0, longest_asked=7200.0).after(1, retry_after=3600.0) == 3600.0
    assert Backoff(0.5, longest=10.0, longest_asked=7200.0).after(1, retry_after=1e9) == 7200.0
    assert Backoff(0.5, longest=10.0, longest_asked=7200.0).after(9) == 10.0


def test_waits_differ_by_the_share() -> None:
    backoff = Backoff(8.0, jitter=0.25, longest=100.0)
    assert [backoff.after(1, draw=draw) for draw in (0.0, 0.25, 0.5, 0.75)] == [6.0, 7.0, 8.0, 9.0]
    assert backoff.after(1, retry_after=4.0, draw=0.0) == 3.0
    assert backoff.jittered(100.0, 0.75) == 112.5
    assert Backoff(8.0).after(1, draw=0.0) == 8.0


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Backoff(1.0).first = 2.0  # type: ignore[misc]
