"""A page of another origin as a device of an edge server, in rounds of the root's."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser

from archipel import bundle as b
from archipel.lite_runtime import Runtime
from archipel.protocol.sealed import encode, public_bytes
from tests.edge.test_rounds import uplink
from tests.support.edge_world import TIMES, ComputedSite, averaged, open_edge_world
from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.device_page import READY, Tab, device_page, eventually, served
from tests.support.linear_bundle import W0, local_data
from tests.web.test_device_in_chromium import ROUND


@pytest.mark.sampled(every=6)
def test_a_page_is_a_device_of_an_edge_server(chromium: Browser, device_page: Path, tmp_path: Path) -> None:
    """Two rounds: the second begins with weights of the root's log, which sites have endorsed."""
    with (
        served(device_page) as origin,
        open_edge_world(tmp_path, origins=[origin]) as world,
        chromium.new_context() as context,
    ):
        agent = world.device(1)
        world.site("b", ComputedSite([3, 4, 5]))
        world.site("c", ComputedSite([6, 7]))
        edge = uplink(world)
        page = context.new_page()
        page.goto(f"{origin}/index.html")
        page.wait_for_function(READY)
        tab = Tab(page, 2, encode(world.device_token()).decode())
        # Four examples are one batch, so that no order of theirs matters.
        tab.open(examples=4, patience=30)
        enrolled = tab.enrol()
        task = world.task(min_cohort=3, rounds=2, deadlines={**TIMES, "advertising": 60.0})
        tab.work()
        with world.running():
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
            eventually(lambda: tab.names().count("committed") == 2, 30)
        first, second = (each for each in world.rounds(task) if each.phase == "committed")
        counted = [each for each in world.rows() if each.state == "counted"]
        for above, row in zip((first, second), counted, strict=True):
            assert edge.device_id in above.survivors
            own = world.edge_operator.rounds.get(row.local_round)
            assert sorted(own.survivors) == sorted([agent.device_id, enrolled])
        assert tab.names() == ["enrolled", *ROUND, *ROUND]
        rounds = tab.report()["rounds"]
        assert [each["result"] for each in rounds] == ["took_part"] * 2
        assert first.weights_out is not None
        bundle = b.open_bundle(world.folder / "linear", [public_bytes(world.keys["publisher"])])
        four = {name: array[:4] for name, array in local_data(2).items()}
        update = Runtime(bundle).local_round(four, seed=0, parameters={"w": W0})
        weights = world.operator.weights.read(first.weights_out)["w"]
        np.testing.assert_allclose(weights, averaged(bundle, [1, 3, 4, 5, 6, 7], [update.arrays]), atol=2e-6)
