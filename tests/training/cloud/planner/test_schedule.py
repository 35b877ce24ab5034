"""The time of a pipeline against Narayanan et al. (2019) and schedules written down by hand."""

from __future__ import annotations

import pytest

from archipel.training.cloud.planner.schedule import pipeline_seconds


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (2, 4), (3, 4), (4, 16), (5, 3)])
def test_equal_stages(stages: int, microbatches: int) -> None:
    expected = (microbatches + stages - 1) * 3.0
    assert pipeline_seconds([1.0] * stages, [2.0] * stages, microbatches) == expected


def test_a_slow_last_stage_waits_for_the_first_microbatch_alone() -> None:
    # The first stage's pass before, four times both passes of the last one, the first stage's pass after.
    assert pipeline_seconds([1.0, 5.0], [2.0, 7.0], 4) == 1 + 4 * 12 + 2


def test_a_slow_first_stage_hides_the_last_one() -> None:
    # First stage: F0 0-5, F1 5-10, B0 10-17, F2 17-22, B1 22-29, F3 29-34, B2 34-41, B3 41-48. The last one is done
    # with a microbatch three seconds after it came, long before the first one wants its gradient.
    assert pipeline_seconds([5.0, 1.0], [7.0, 2.0], 4) == 48


def test_with_one_microbatch_one_stage_follows_the_other() -> None:
    assert pipeline_seconds([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 1) == 21
