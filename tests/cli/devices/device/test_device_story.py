"""One device's life by its commands: enroll, run, status beside it, pause, resume, stop, erase."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.commands import Command
from tests.support.device_process import Device, run_beside
from tests.support.federation import Federation
from tests.support.linear_bundle import local_data


def status(archipel: Command, device: Device) -> dict[str, Any]:
    return json.loads(archipel("device", "status", str(device.config), "--json")[0])


@pytest.mark.parametrize("isolated", [pytest.param("false", marks=pytest.mark.slow), "true"])
@pytest.mark.sampled(every=8)
def test_from_enrolment_to_erasing(
    archipel: Command,
    federation: Federation,
    device_of: Callable[[int], Device],
    isolated: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = device_of(0)
    device.settings(isolated=isolated)
    out, _ = archipel("device", "enroll", str(device.config), str(device.token))
    device_id = status(archipel, device)["device_id"]
    assert out.startswith(f"device {device_id}: enrolled in population 'pupils' at {federation.url}\n")
    assert "enrolled already" in archipel("device", "enroll", str(device.config), str(device.token))[0]
    device.start()
    assert device.until("started")["device"] == device_id
    device.until("waiting")
    task = federation.task(min_cohort=3, cohort=3, threshold=3, rounds=2)
    run_beside(federation, lambda: federation.wait(task))
    trained = device.until("trained")
    assert trained["detail"]["examples"] == 5
    assert device.until("committed")["round"] == trained["round"]
    device.until("committed")
    device.until("waiting")

    view = status(archipel, device)
    assert (view["running"], view["paused"], view["conditions"]) == (True, "", [])
    assert view["totals"]["took_part"] == len(view["rounds"]) == 2
    assert view["cache_bytes"] > 0
    assert view["totals"]["sent"] == sum(each["sent"] for each in view["rounds"]) > 0
    [spent] = [each["spent"] for each in view["privacy"]["tasks"]]
    expected = {
        "task_id": task.task_id, "model": "linear", "kind": "training", "secure": 2, "told": 2, "smallest": 3,
        "devices": 6, "plain": 0, "unsure": 0, "noised": 0,
    }  # fmt: skip
    assert {name: spent[name] for name in expected} == expected
    text, _ = archipel("device", "status", str(device.folder))
    assert "agent       running\n" in text
    assert "rounds      2 since " in text
    assert "3 at least, 3 on average" in text

    assert archipel("device", "pause", str(device.config), "--for", "1h")[0].startswith("paused by its owner until ")
    assert device.until("paused")["detail"]["reason"].startswith("paused by its owner until ")
    assert status(archipel, device)["paused"].startswith("paused by its owner until ")
    assert archipel("device", "resume", str(device.folder))[0] == "resumed\n"
    device.until("waiting")
    assert archipel("device", "resume", str(device.folder))[0] == "it was not paused\n"

    _, err = archipel("device", "erase", str(device.folder), "--yes", code=1)
    assert err == f"archipel: {device.folder}: its agent is running; stop that first. Nothing was erased\n"
    assert device.stop() == 0, device.error
    assert device.until("stopped")["device"] == device_id
    assert status(archipel, device)["running"] is False

    for answer in ("", "n\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        _, err = archipel("device", "erase", str(device.folder), code=1)
        assert "archipel: nothing was erased; --yes does it without asking\n" in err
    assert (device.folder / "device.json").exists()
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    out, _ = archipel("device", "erase", str(device.folder))
    assert f"device {device_id}, its keys, its place in 'pupils'" in out
    assert "journal of 2 rounds" in out
    assert [path.name for path in device.folder.iterdir()] == ["lock"]
    assert status(archipel, device)["device_id"] == ""


@pytest.mark.sampled(every=4)
def test_once_takes_part_in_a_round(archipel: Command, federation: Federation, enrolled: Device) -> None:
    task = federation.task(min_cohort=3, cohort=3, threshold=3)
    outcomes: list[str] = []

    def work() -> None:
        deadline = time.monotonic() + 20
        while "took_part" not in outcomes:
            assert time.monotonic() < deadline, outcomes
            lines = archipel("device", "run", str(enrolled.config), "--once", "--json")[0].splitlines()
            outcomes.append(json.loads(lines[-1])["detail"]["outcome"])

    run_beside(federation, work)
    assert federation.wait(task).rounds_committed == 1
    assert set(outcomes) <= {"waiting", "took_part"}


@pytest.mark.sampled(every=4)
def test_stopped_in_the_middle_of_a_round(archipel: Command, federation: Federation, enrolled: Device) -> None:
    """It leaves, says so, and ends with code 0: the others would have to wait for it otherwise."""
    federation.task(min_cohort=3, cohort=3, threshold=3, deadlines={"assigning": 30.0, "advertising": 30.0})
    enrolled.start()
    enrolled.until("waiting")
    over = threading.Event()

    def nothing_yet() -> dict[str, Any]:
        over.wait(30)
        return {}

    def work() -> None:
        enrolled.until("advertised")
        assert enrolled.stop(signal.SIGINT) == 0, enrolled.error
        enrolled.until("stopped")
        over.set()

    run_beside(federation, work, examples=nothing_yet)
    [entry] = status(archipel, enrolled)["rounds"]
    assert (entry["result"], entry["sent"] > 0) == ("dropped", True)
    assert "stopped" in entry["reason"]


@pytest.mark.sampled(every=8)
def test_a_store_as_examples(archipel: Command, federation: Federation, enrolled: Device) -> None:
    enrolled.settings("[examples]\nstore = true\n", isolated="false")
    out, _ = archipel("device", "examples", "add", str(enrolled.config), str(enrolled.place / "data.npz"))
    assert out.startswith("5 examples added, 5 in the store, ")
    enrolled.start()
    enrolled.until("waiting")
    task = federation.task(min_cohort=3, cohort=3, threshold=3)
    run_beside(federation, lambda: federation.wait(task))
    assert enrolled.until("trained")["detail"]["examples"] == 5
    # Beside the running agent.
    out, _ = archipel("device", "examples", "add", str(enrolled.config), str(enrolled.place / "data.npz"))
    assert out.startswith("0 examples added (5 were there; --duplicates adds them again), 5 in the store, ")
    add = ("device", "examples", "add", "--duplicates", str(enrolled.config), str(enrolled.place / "data.npz"))
    assert archipel(*add)[0].startswith("5 examples added, 10 in the store, ")
    assert status(archipel, enrolled)["example_bytes"] > 0
    assert enrolled.stop() == 0
    data = local_data(0)
    data["x"][1, 2], data["y"][1], data["y"][3] = np.nan, np.inf, np.nan
    np.savez(enrolled.place / "data.npz", **data)
    out, error = archipel("device", "examples", "add", str(enrolled.config), str(enrolled.place / "data.npz"))
    assert out.startswith("2 examples added (3 were there; --duplicates adds them again), 12 in the store, ")
    assert "data.npz: 2 examples have numbers that are not finite" in error


@pytest.mark.sampled(every=4)
def test_a_key_is_replaced(archipel: Command, enrolled: Device) -> None:
    device_id = status(archipel, enrolled)["device_id"]
    assert archipel("device", "rotate", str(enrolled.config))[0] == f"device {device_id}: has a new key\n"
    assert status(archipel, enrolled)["rotations"] == 1
    enrolled.start()
    enrolled.until("waiting")
    assert enrolled.stop() == 0
