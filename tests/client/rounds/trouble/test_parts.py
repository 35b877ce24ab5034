"""Large updates go up in parts: what a broken connection costs is one part, whoever of the two starts anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from archipel.client.rounds import exchange
from archipel.server.http.api import updates
from tests.support.faults import Fault, Proxy, lost_answer, lost_request, running, status
from tests.support.federation import Federation

PART = 4


@pytest.fixture
def proxy(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Updates have a few parts of four bytes each."""
    monkeypatch.setattr(exchange, "WHOLE_BYTES", PART)
    for module in (exchange, updates):
        monkeypatch.setattr(module, "PART_BYTES", PART)
    with running(Proxy(federation.server.port)) as made:
        yield made


def one_round(federation: Federation, proxy: Proxy) -> tuple[list[bytes], list[str]]:
    """Three devices, the first behind the proxy: the parts that the server took of it, and all paths it was asked."""
    agents = [
        federation.agent(0, server=proxy.url, read_timeout=2.0, patience=30.0, attempts=2),
        federation.agent(1),
        federation.agent(2),
    ]
    task = federation.task(cohort=3, deadlines={"masking": 20.0})
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    [info] = federation.rounds(task)
    assert (info.phase, len(info.survivors)) == ("committed", 3)
    before = federation.operator.weights.read(info.weights_in)["w"]
    expected = federation.expected_weights(before, list(zip(agents, range(3))), task)
    np.testing.assert_allclose(federation.operator.weights.read(info.weights_out)["w"], expected, rtol=1e-6)
    taken = [body for _, path, code, body in proxy.seen if "/update/parts/" in path and code == 200]
    return taken, [f"{method} {path.partition('/update')[2]}" for method, path, _ in proxy.came if "/update" in path]


@pytest.mark.sampled(every=4)
def test_a_link_that_breaks_again_and_again(federation: Federation, proxy: Proxy) -> None:
    """Every second part meets a fault, also of an answer that is lost; no part that the server has is sent again."""
    faults = [lost_request, lost_answer, status(503), status(502)]
    met = Counter[str]()

    def fault(method: str, path: str) -> Fault | None:
        if method != "PUT" or "/update/parts/" not in path:
            return None
        met[path] += 1
        number = int(path.rsplit("/", 1)[1])
        return faults[number % len(faults)] if number % 2 and met[path] == 1 else None

    proxy.fault = fault
    taken, _ = one_round(federation, proxy)
    assert len(met) >= 3, "the update has too few parts for this test"
    [whole] = {body for method, path, body in proxy.came if path.endswith("/update")}
    assert whole == b""
    # A part whose answer was lost is there, and goes up again only as part of the same call.
    assert max(met.values()) <= 2
    assert set(map(len, taken[:-1])) == {PART}


@pytest.mark.sampled(every=8)
def test_after_a_restart_only_what_is_missing_goes_up(
    federation: Federation, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is down from the third part on until the device asks which parts are there."""
    down = {"now": False}
    sent = Counter[str]()

    def fault(method: str, path: str) -> Fault | None:
        if path.endswith("/update/parts"):
            down["now"] = False
        if method == "PUT" and "/update/parts/" in path:
            number = path.rsplit("/", 1)[1]
            if number == "3" and not sent["3"]:
                down["now"] = True
            sent[number] += 1
        return lost_request if down["now"] else None

    proxy.fault = fault
    one_round(federation, proxy)
    assert (sent["1"], sent["2"]) == (1, 1)
    assert sent["3"] == 3  # two attempts of the first call, one of the next


@pytest.mark.sampled(every=4)
def test_a_server_that_takes_no_parts_gets_the_whole(federation: Federation, proxy: Proxy) -> None:
    proxy.fault = lambda method, path: status(404) if path.endswith("/update/parts") else None
    taken, asked = one_round(federation, proxy)
    assert taken == []
    assert asked == ["GET /parts", "PUT "]
