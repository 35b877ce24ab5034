"""The owner sees for how long a device says nothing after it has looked at a version."""

from __future__ import annotations

import time

import pytest

from tests.support.registry import Registry


@pytest.mark.sampled(every=3)
def test_a_look_is_followed_by_a_silence_that_the_owner_is_told(registry: Registry) -> None:
    agent = registry.device(look_seconds=50.0)
    began = time.monotonic()
    outcome = agent.run_once()
    took = time.monotonic() - began
    [told] = registry.told(agent, "waiting")
    assert "silent after it has looked at a version" in str(told["reason"])
    # The silence ends 50 s after the look began, which is somewhere in `took`; then comes the usual wait.
    assert 50.0 - took <= float(told["retry_after"]) <= 50.0 + outcome.wait
    assert float(told["retry_after"]) == pytest.approx(outcome.wait, abs=1.0)
    agent.close()


def test_a_device_without_versions_is_told_the_usual_wait(registry: Registry) -> None:
    agent = registry.device(adopt=False)
    outcome = agent.run_once()
    assert registry.told(agent, "waiting") == [{"retry_after": outcome.wait}]
    agent.close()
