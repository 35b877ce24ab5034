"""A page as a device in secure rounds over neighbours, with Python agents and a real server."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Route

from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.device_page import WEB, Fleet, Pages, device_page, eventually, pages
from tests.support.linear_bundle import make_bundle
from tests.web.test_device_in_chromium import ROUND, expected

COUNT = 8
LONG = dict.fromkeys(("assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking"), 20.0)


VECTORS = json.loads((WEB.parent / "vectors" / "protocol" / "neighbours.json").read_text())


@pytest.fixture(scope="module")
def fleet(pages: Pages) -> Fleet:
    return Fleet(pages.federation, COUNT - 1)


@pytest.mark.parametrize(
    ("server", "rounds"), [("malicious", 2), pytest.param("semi-honest", 1, marks=pytest.mark.slow)]
)
@pytest.mark.sampled(every=8)
def test_rounds_over_neighbours_with_agents(pages: Pages, fleet: Fleet, server: str, rounds: int) -> None:
    """The second round begins with weights that devices of the first endorsed."""
    federation = pages.federation
    policy: dict[str, Any] = {"protocols": ("neighbours",), "server": server, "dropouts": 0.1}
    file = make_bundle(federation.folder / server / "linear", federation.publisher_key, **policy)
    with pages.tab(COUNT - 1) as tab:
        tab.open(examples=4)
        enrolled = tab.enrol()
        task = federation.task(
            bundle=federation.operator.bundles.upload(file).digest, rounds=rounds, cohort=COUNT, min_cohort=COUNT,
            threshold=None, protocol="neighbours", deadlines=LONG,
        )  # fmt: skip
        tab.work()
        with fleet.working():
            fleet.await_end(task, 60)
        carried_out = federation.rounds(task)
        assert [(each.phase, enrolled in each.survivors) for each in carried_out] == [("committed", True)] * rounds
        eventually(lambda: tab.names() == ["enrolled", *ROUND * rounds])
        report = tab.report()
    assert [(each["result"], each["cohort"]) for each in report["rounds"]] == [("took_part", 0)] * rounds
    made = carried_out[0].weights_out
    assert made is not None
    weights = federation.operator.weights.read(made)["w"]
    agents = list(zip(fleet.agents, range(COUNT - 1)))
    np.testing.assert_allclose(weights, expected(federation, task, agents, [COUNT - 1]), atol=2e-6)


@pytest.mark.sampled(every=6)
def test_the_vectors_of_rounds_in_chromium(pages: Pages) -> None:
    """Its Ed25519, X25519, HKDF and AES give the bytes that Python's give; lies are tested in Node."""
    steps = ["plan", "advertise", "draw", "deal", "receive", "mask", "confirm", "answer"]
    with pages.tab(COUNT) as tab:
        for given in VECTORS.values():
            for index, device in enumerate(given["devices"]):
                said = tab.page.evaluate("([round, index]) => replayedNeighbours(round, index)", [given, index])
                assert said == (steps if device["masked"] else steps[:5])


@pytest.mark.parametrize(
    "event",
    ["masked", *(pytest.param(each, marks=pytest.mark.slow) for each in ("advertised", "shared", "confirmed"))],
)  # fmt: skip
@pytest.mark.sampled(every=4)
def test_a_reload_in_a_round(pages: Pages, fleet: Fleet, event: str) -> None:
    """The device goes on where it was: it sends the same once more, and takes the next step."""
    federation = pages.federation
    policy: dict[str, Any] = {"protocols": ("neighbours",), "dropouts": 0.1}
    file = make_bundle(federation.folder / event / "linear", federation.publisher_key, **policy)
    # What it would send next is lost, until the page is loaded again.
    path = {"advertised": "invitation", "shared": "refused", "masked": "update", "confirmed": "answer"}[event]
    with pages.tab(COUNT - 1) as tab:
        tab.open(examples=4)
        enrolled = tab.enrol()
        sent: list[bytes | None] = []
        lost = [True]

        def pass_on(route: Route) -> None:
            if route.request.method != "OPTIONS":
                sent.append(route.request.post_data_buffer)
            route.abort() if lost[0] else route.continue_()

        tab.page.context.route(f"**/{path}", pass_on)
        task = federation.task(
            bundle=federation.operator.bundles.upload(file).digest, cohort=COUNT, min_cohort=COUNT, threshold=None,
            protocol="neighbours", deadlines=LONG,
        )  # fmt: skip
        tab.work()
        with fleet.working():
            # Playwright hands over requests only while it is asked for something.
            eventually(lambda: event in tab.names() and bool(sent))
            tab.reload()
            lost[0] = False
            assert tab.open(examples=4) == enrolled
            tab.work()
            eventually(lambda: tab.names()[-1:] == ["committed"], 60)
            fleet.await_end(task, 60)
        (info,) = federation.rounds(task)
        assert (info.phase, enrolled in info.survivors) == ("committed", True)
        eventually(lambda: [each["result"] for each in tab.report()["rounds"]] == ["took_part"])
        assert tab.names()[0] == "resumed"
        assert "trained" not in tab.names()
    # Whatever is sent before and after the reload is the same.
    assert len(sent) > 1
    assert len({data for data in sent if data is not None}) == (0 if path == "invitation" else 1)
    assert info.weights_out is not None
    weights = federation.operator.weights.read(info.weights_out)["w"]
    agents = list(zip(fleet.agents, range(COUNT - 1)))
    np.testing.assert_allclose(weights, expected(federation, task, agents, [COUNT - 1]), atol=2e-6)
