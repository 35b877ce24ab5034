"""Pages of another origin as devices of a real server, in rounds with Python agents."""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Error, Route

from archipel import bundle as b
from archipel.client import Agent
from archipel.lite_runtime import Runtime
from archipel.protocol.operator.tasks import TaskInfo
from archipel.protocol.sealed import encode, public_bytes
from archipel.protocol.vector import Layout
from tests.support.faults import Fault, Forward, Handler, Proxy, reset, running
from tests.support.federation import Federation, round_seed
from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.device_page import WEB, Fleet, Pages, device_page, eventually, fleet, pages
from tests.support.linear_bundle import W0, local_data
from tests.support.registry import BETTER, FIRST, MODEL, WORSE, Registry, X

ROUND = [
    "assigned", "trained", "advertised", "shared", "masked", "uploaded", "confirmed", "unmasked", "committed",
]  # fmt: skip


def expected(federation: Federation, task: TaskInfo, agents: list[tuple[Agent, int]], tabs: list[int]) -> np.ndarray:
    """What federated averaging in fixed point makes of the first round of these devices, without any mask.

    The tabs' data have four examples, one batch, so that no order of theirs matters."""
    runtime = Runtime(b.open_bundle(federation.folder / "linear", [public_bytes(federation.publisher_key)]))
    digest = federation.plan_digest(federation.rounds(task)[0].round_id)
    updates = [
        runtime.local_round(local_data(number), seed=round_seed(agent.config.folder, digest), parameters={"w": W0})
        for agent, number in agents
    ]
    for number in tabs:
        four = {name: array[:4] for name, array in local_data(number).items()}
        updates.append(runtime.local_round(four, seed=0, parameters={"w": W0}))
    layout = Layout.of(runtime.bundle.program("finish"))
    total = sum(layout.encode(update.arrays, modulus_bits=32, max_cohort=16) for update in updates)
    decoded = layout.decode_sum(np.asarray(total, np.uint32), cohort=len(updates), modulus_bits=32)
    assert decoded.weight is not None
    return W0 + decoded.deltas["w"] / decoded.weight


@pytest.mark.sampled(every=3)
def test_secure_rounds_with_agents(pages: Pages, fleet: Fleet) -> None:
    """Two rounds: the second begins with weights that the page finds in the server's log, and endorsed."""
    federation = pages.federation
    with pages.tab(3) as tab:
        assert tab.open(examples=4) == ""
        enrolled = tab.enrol()
        assert tab.enrol() == enrolled
        # The others verify what it signs with a key that has replaced its first one.
        assert tab.page.evaluate("() => device.rotateKey()")
        assert federation.operator.devices.get(enrolled).rotations == 1
        task = federation.task(rounds=2, min_cohort=4, cohort=4, threshold=3)
        tab.work()
        with fleet.working():
            fleet.await_end(task)
        first, second = federation.rounds(task)
        assert [(each.phase, enrolled in each.survivors) for each in (first, second)] == [("committed", True)] * 2
        eventually(lambda: tab.names() == ["enrolled", "rotated", *ROUND, *ROUND])
        report = tab.report()
        assert first.weights_out is not None
        weights = federation.operator.weights.read(first.weights_out)["w"]
        agents = list(zip(fleet.agents, range(3)))
        np.testing.assert_allclose(weights, expected(federation, task, agents, [3]), atol=2e-6)
    assert (report["deviceId"], report["population"], report["epsilon"]) == (enrolled, "pupils", 0)
    assert [(each["roundId"], each["result"], each["cohort"]) for each in report["rounds"]] == [
        (each.round_id, "took_part", 4) for each in (first, second)
    ]
    assert {name: report["totals"][name] for name in ("rounds", "tookPart", "smallest")} == {
        "rounds": 2, "tookPart": 2, "smallest": 4,
    }  # fmt: skip


RESUMED = ["resumed", "masked", "uploaded", "confirmed", "unmasked", "committed"]


@pytest.mark.sampled(every=8)
def test_a_reload_before_the_update(pages: Pages, fleet: Fleet) -> None:
    """The device goes on with the round, and what it had computed before is in the sum."""
    federation, fleet.hold_at = pages.federation, "advertised"
    with pages.tab(4) as tab:
        tab.open(examples=4)
        enrolled = tab.enrol()
        task = federation.task(
            rounds=1, min_cohort=4, cohort=4, threshold=3, deadlines={"sharing": 20.0, "advertising": 20.0}
        )
        tab.work()
        with fleet.working():
            eventually(lambda: "shared" in tab.names())
            tab.reload()
            assert tab.open(examples=4) == enrolled
            tab.work()
            eventually(lambda: "resumed" in tab.names())
            fleet.hold_at = ""
            fleet.hold.clear()
            fleet.await_end(task)
        (info,) = federation.rounds(task)
        assert (info.phase, enrolled in info.survivors) == ("committed", True)
        eventually(lambda: tab.names() == RESUMED)
        (entry,) = tab.report()["rounds"]
        assert (entry["roundId"], entry["result"], entry["cohort"]) == (info.round_id, "took_part", 4)
        assert info.weights_out is not None
        weights = federation.operator.weights.read(info.weights_out)["w"]
        agents = list(zip(fleet.agents, range(3)))
        np.testing.assert_allclose(weights, expected(federation, task, agents, [4]), atol=2e-6)
        assert tab.page.evaluate(SEALED) == ["state/linear"]


SEALED = """async () => {
    const database = await new Promise((done) => {
        const request = indexedDB.open("archipel-device/device");
        request.onsuccess = () => done(request.result);
    });
    const keys = await new Promise((done) => {
        const request = database.transaction("sealed").objectStore("sealed").getAllKeys();
        request.onsuccess = () => done(request.result);
    });
    database.close();
    return keys;
}"""
"""Where the device keeps what only its sealing key opens."""


@pytest.mark.sampled(every=4)
def test_a_reload_after_the_update_was_stored(pages: Pages, fleet: Fleet) -> None:
    """The very bytes that were stored are sent, and count; no other update is ever masked for this round."""
    federation = pages.federation
    with pages.tab(5) as tab:
        tab.open()
        enrolled = tab.enrol()
        sent: list[str | None] = []

        def lose(route: Route) -> None:
            sent.append(route.request.headers.get("digest-sha256"))
            route.abort()

        def note(route: Route) -> None:
            sent.append(route.request.headers.get("digest-sha256"))
            route.continue_()

        tab.page.context.route("**/update", lose)
        task = federation.task(deadlines={"masking": 20.0, "confirming": 10.0})
        tab.work()
        with fleet.working():
            eventually(lambda: "masked" in tab.names())
            tab.reload()
            assert len(tab.page.evaluate(SEALED)) > 1
            tab.page.context.unroute("**/update")
            tab.page.context.route("**/update", note)
            tab.open()
            assert tab.until("took_part")["reason"] == ""
            fleet.await_end(task)
        (info,) = federation.rounds(task)
        (entry,) = tab.report()["rounds"]
        assert (info.phase, enrolled in info.survivors) == ("committed", True)
        assert (entry["step"], entry["result"]) == ("closed", "took_part")
        assert len(sent) > 1
        assert set(sent) == {entry["masked"]}
        assert tab.page.evaluate(SEALED) == ["state/linear"]


@pytest.mark.sampled(every=6)
def test_a_download_that_breaks_goes_on_where_it_was(pages: Pages, fleet: Fleet) -> None:
    federation, broken = pages.federation, list[str]()

    def fault(method: str, path: str) -> Fault | None:
        if method != "GET" or "/bundles/" not in path or broken:
            return None
        broken.append(path)
        return half

    def half(handler: Handler, forward: Forward) -> None:
        reset(handler, forward)
        time.sleep(0.5)  # what has come by the time of the break reaches the page

    with running(Proxy(federation.server.port)) as proxy, pages.tab(6, server=proxy.url) as tab:
        proxy.fault = fault
        tab.open(examples=4)
        enrolled = tab.enrol()
        task = federation.task(rounds=1, min_cohort=4, cohort=4, threshold=3)
        tab.work()
        with fleet.working():
            fleet.await_end(task)
        (info,) = federation.rounds(task)
        assert (info.phase, enrolled in info.survivors) == ("committed", True)
        assert [code for method, path, code, _ in proxy.seen if [path] == broken and method == "GET"] == [200, 206]


@pytest.mark.sampled(every=4)
def test_the_vectors_of_a_round_in_chromium(pages: Pages) -> None:
    """Its Ed25519, X25519, HKDF and AES give the bytes that Python's give; refusals are tested in Node."""
    round_ = json.loads((WEB.parent / "vectors" / "protocol" / "round.json").read_text())
    steps = ["plan", "advertise", "keys", "share", "complain", "mask", "confirm", "unmask"]
    with pages.tab(9) as tab:
        for index in range(5):
            assert tab.page.evaluate("([round, index]) => replayed(round, index)", [round_, index]) == steps


@pytest.mark.sampled(every=8)
def test_the_documentation_s_code_runs(pages: Pages, fleet: Fleet) -> None:
    federation = pages.federation
    with pages.tab(10) as tab:
        tab.page.context.route("**/token.json", lambda route: route.fulfill(body=tab.token))
        said: list[str] = []
        tab.page.on("console", lambda line: said.append(line.text.split()[0]))
        tab.page.on("pageerror", lambda error: said.append(str(error)))
        task = federation.task(min_cohort=4, cohort=4, threshold=3)
        # Playwright hands over the token, and what the page says, only while it is asked for something.
        with tab.page.expect_console_message(lambda line: line.text.startswith("enrolled")):
            tab.page.evaluate("() => snippet()")
        with fleet.working():
            fleet.await_end(task)
        eventually(lambda: bool(tab.page.title()) and "committed" in said)
        assert [name for name in said if name != "waiting"] == ["enrolled", *ROUND]


@pytest.mark.sampled(every=3)
def test_one_device_per_profile(pages: Pages) -> None:
    with pages.tab(6) as first:
        first.open()
        second = pages.tab_of(first.page.context, 6)
        with pytest.raises(Error, match="OtherTabError: another tab of this browser is this device already"):
            second.open()
        assert second.open(name="another") == ""
        second.page.evaluate("() => device.close()")
        second.page.evaluate("() => { window.waiting = start({ x: [1, 2, 3], y: [1], wait: true }); }")
        first.page.close()
        assert second.page.evaluate("() => waiting") == ""


@pytest.mark.sampled(every=4)
def test_what_the_owner_decides(pages: Pages, fleet: Fleet) -> None:
    federation = pages.federation
    with pages.tab(7) as tab:
        for wrong, said in (
            ({"minCohort": 0}, "minCohort"),
            ({"mincohort": 3}, "mincohort"),
            ({"name": "a/b"}, "name"),
        ):
            with pytest.raises(Error, match=f"ClientError: setting {said}: "):
                tab.open(**wrong)
        tab.open(populations=["others"])
        with pytest.raises(Error, match="OwnerRefusalError: population pupils, its owner allows others"):
            tab.enrol()
        tab.page.evaluate("() => device.close()")
        enrolled = tab.open(minCohort=5) or tab.enrol()
        # A pause outlasts a reload, and the page's own conditions come after it.
        tab.page.evaluate("() => device.pause('at night')")
        tab.reload()
        assert tab.open(minCohort=5) == enrolled
        assert tab.until("paused")["reason"] == "paused by its owner: at night"
        tab.page.evaluate("() => device.resume()")
        tab.page.evaluate("() => { may = 'on battery'; }")
        assert tab.until("paused")["reason"] == "the conditions for work do not hold: on battery"
        tab.page.evaluate("() => { may = true; }")
        task = federation.task(min_cohort=3, cohort=4, threshold=3)
        with fleet.working():
            refused = tab.until("refused")
            info = fleet.await_end(task)
        assert "a cohort of 3 or more, its owner allows 5 (minCohort)" in refused["reason"]
        assert info.refused == {"cohort": 1}


@pytest.mark.sampled(every=3)
def test_keys_that_no_script_can_read_and_their_end(pages: Pages) -> None:
    look = """async () => {
        const database = await new Promise((done) => {
            const request = indexedDB.open("archipel-device/device");
            request.onsuccess = () => done(request.result);
        });
        const keys = await new Promise((done) => {
            const request = database.transaction("own").objectStore("own").get("keys");
            request.onsuccess = () => done(request.result);
        });
        database.close();
        const all = [keys.identity.privateKey, keys.sealing, keys.seeds];
        const export_ = (key) => Promise.any(["raw", "pkcs8", "jwk"].map((form) => crypto.subtle.exportKey(form, key)));
        return Promise.all(all.map((key) => export_(key).then(() => "read", () => "cannot be read")));
    }"""
    with pages.tab(8) as tab:
        tab.open()
        enrolled = tab.enrol()
        assert tab.page.evaluate(look) == ["cannot be read"] * 3
        tab.page.evaluate("() => device.erase()")
        assert tab.names() == ["enrolled", "erased"]
        assert tab.page.evaluate("async () => (await indexedDB.databases()).map((each) => each.name)") == []
        assert tab.open() == ""
        assert tab.report()["rounds"] == []
        # The token was for the device that is gone.
        with pytest.raises(Error, match="RefusedError"):
            tab.enrol()
        tab.token = encode(pages.federation.token()).decode()
        assert tab.enrol() != enrolled


@pytest.mark.sampled(every=4)
def test_versions_that_the_server_offers(pages: Pages) -> None:
    """A page takes a model's first version, then a better one, keeps that when a worse one comes, and goes back."""
    registry = Registry(pages.federation, {})
    ask = """async ([model, x]) => {
        const data = Float32Array.from(x);
        const answer = await device.predict(model, { dtype: "float32", dims: [data.length / 3, 3], data });
        return [await device.models(), Array.from(answer.data)];
    }"""
    with pages.tab(9) as tab:
        tab.open(adopt=True, lookSeconds=0.01)
        tab.enrol()

        def decide(version: int) -> str:
            """The page checks in until it has decided about this offer."""
            before, told = len(tab.events()), list[dict[str, Any]]()
            while not told:
                tab.until("waiting")
                told = [each for each in tab.events()[before:] if each["name"] in ("adopted", "kept")]
            (each,) = told
            assert each["detail"]["version"] == version
            return f"{each['name']}: {each['detail']['reason']}"

        def runs(version: int) -> None:
            models, answers = tab.page.evaluate(ask, [MODEL, X.ravel().tolist()])
            assert models == {MODEL: version}
            np.testing.assert_allclose(answers, registry.answer(version), rtol=1e-5)

        registry.add(FIRST)
        assert decide(1) == "adopted: the first version of this model on this device"
        runs(1)
        registry.add(BETTER)
        found = re.match(r"adopted: loss (\S+) on this device, of version 1 (\S+)$", decide(2))
        assert found is not None
        assert [float(each) for each in found.groups()] == pytest.approx(
            [registry.loss(n, 9) for n in (2, 1)], rel=1e-5
        )
        runs(2)
        tab.reload()
        tab.open(adopt=True, lookSeconds=0.01)
        registry.add(WORSE)
        assert re.match("kept: loss .* worse by more than 0.05 of that", decide(3))
        runs(2)
        pages.federation.operator.models.promote(MODEL, 1)
        assert decide(1) == "adopted: in place of version 2, which the server took back"
        runs(1)
