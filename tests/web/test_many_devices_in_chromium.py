"""Twenty agents and three tabs in one federation: one tab is closed in the middle, one is loaded again."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import pytest

from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.device_page import Fleet, Pages, device_page, eventually, pages


@pytest.mark.slow
def test_twenty_agents_and_three_tabs(pages: Pages) -> None:
    federation = pages.federation
    fleet = Fleet(federation, 20)
    fleet.hold_at = "advertised"
    patient = {"advertising": 60.0, "sharing": 60.0, "complaining": 20.0, "masking": 20.0}
    with pages.tab(20) as staying, pages.tab(21) as closed, pages.tab(22) as again:
        ids = []
        for tab in (staying, closed, again):
            tab.open(patience=30)
            ids.append(tab.enrol())
        task = federation.task(
            rounds=2, min_cohort=20, cohort=23, threshold=15, deadlines={"assigning": 5.0, **patient}
        )
        for tab in (staying, closed, again):
            tab.work()
        with fleet.working():
            for tab in (staying, closed, again):
                eventually(lambda tab=tab: "shared" in tab.names(), 60)  # type: ignore[misc]
            closed.page.close()
            again.reload()
            assert again.open(patience=30) == ids[2]
            again.work()
            eventually(lambda: "resumed" in again.names())
            fleet.hold_at = ""
            fleet.hold.clear()
            fleet.await_end(task, 150)
        first, second = federation.rounds(task)
        assert (first.phase, second.phase) == ("committed", "committed")
        assert [device in first.survivors for device in ids] == [True, False, True]
        assert len(first.survivors) == 22
        assert [device in second.survivors for device in ids] == [True, False, True]
        for tab in (staying, again):
            eventually(lambda tab=tab: [each["result"] for each in tab.report()["rounds"]] == ["took_part"] * 2)  # type: ignore[misc]
