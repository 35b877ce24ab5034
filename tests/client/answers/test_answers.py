"""Each row of "What the server may answer" in docs/agent-answers.md, against a real agent; no row is without a case."""

from __future__ import annotations

import pytest

from tests.client.answers import (  # noqa: F401 - their cases
    about_weights,
    identity,
    in_rounds,
    interrupted,
    to_check_ins,
    to_downloads,
)
from tests.client.answers.world import CASES, World, rows


@pytest.mark.parametrize(("table", "answer"), list(rows()))
@pytest.mark.sampled(every=6)
def test_each_answer_has_the_next_step_that_the_page_says(world: World, table: str, answer: str) -> None:
    assert (table, answer) in CASES, "a row of docs/agent-answers.md without a case"
    CASES[table, answer](world)


def test_every_case_is_a_row() -> None:
    assert set(CASES) <= set(rows())
    assert len(set(rows())) == len(list(rows())) > 40
