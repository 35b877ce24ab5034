"""`archipel round`, against a server over TCP with rounds that were really held."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import make_server

from archipel.protocol.messages import Bins, LeaveRequest
from archipel.protocol.uploads import adoption, contribution, metric_arrays
from tests.attacks.faults_world import noise_from, play_round
from tests.server.rounds.test_evaluation_and_analytics import take_part
from tests.support.fixtures.server import *  # noqa: F403
from tests.support.in_thread import in_thread
from tests.support.world import World

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def reached(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The world, whose server the commands reach."""
    with in_thread(make_server("127.0.0.1", 0, world.app, threaded=True)) as web:
        monkeypatch.setenv("ARCHIPEL_SERVER", f"http://127.0.0.1:{web.server_port}")
        monkeypatch.setenv("ARCHIPEL_TOKEN", world.operator_token)
        yield world


@pytest.mark.sampled(every=4)
def test_an_evaluation_and_an_analysis_are_shown(archipel: Command, reached: World) -> None:
    world = reached
    *devices, gone = world.add_devices(4)
    ranges = {"loss": 8.0, "accuracy": 1.0}
    plain: dict[str, Any] = {"privacy": "plain", "threshold": None, "cohort": 3}
    task = world.create_task(kind="evaluation", metrics=ranges, **{**plain, "cohort": 4})
    world.start_round([*devices, gone])
    assert gone.call("POST", f"{gone.round}/leave", LeaveRequest(reason="kind"))[0] == 200
    for device in devices:
        device.updating(**metric_arrays({"loss": 0.5, "accuracy": 0.75}, ranges, 100, 1000))
    world.settle()
    head, row = archipel("round", "list", task["task_id"])[0].splitlines()
    assert head.split()[:4] == ["round", "number", "phase", "devices"]
    assert row.split()[1:5] == ["1", "committed", "4", "3"]
    assert "accuracy 0.75" in row
    shown = archipel("round", "show", row.split()[0])[0]
    assert "of 3 devices, 300 examples" in shown
    assert all(f"{device.id}  updating" in shown for device in devices)
    assert f"{gone.id}  left" in shown
    assert "refused     kind 1\n" in shown
    told = archipel("task", "show", task["task_id"])[0]
    assert "  kind" in told.partition("refused")[2]
    advice = "their owners allow no tasks of this kind"
    assert advice in told.partition("what_to_do")[2]
    assert f"what to do  kind: {advice}" in shown
    found = json.loads(archipel("round", "show", row.split()[0], "--json")[0])
    assert found["result"]["metrics"]["loss"] == pytest.approx(0.5, rel=1e-6)
    assert sorted(found["survivors"]) == sorted(device.id for device in devices)

    world.clock.now += 1
    task = world.create_task(kind="analytics", **plain)
    world.start_round(devices)
    for device in devices:
        device.updating(**{"light/sum": 8.0, "light/count": 4.0, "hours/histogram": [0, 3, 1, 0], **contribution(4)})
    world.settle()
    [listed] = json.loads(archipel("round", "list", task["task_id"], "--json")[0])
    shown = archipel("round", "show", listed["round_id"])[0]
    assert "light                   mean 2" in shown
    assert "50% are below 6.66667" in shown  # 6 of the 9 from 0 to 10 are half of 12
    assert "no round" in archipel("round", "show", "0" * 32, code=1)[1]


@pytest.mark.sampled(every=4)
def test_a_distribution_over_devices_is_shown_written_and_drawn(
    archipel: Command, reached: World, tmp_path: Path
) -> None:
    world = reached
    task = world.create_task(
        kind="evaluation", metrics={"accuracy": 1.0}, cohort=10, min_cohort=10, privacy="plain", threshold=None,
        distributions={"accuracy": {"low": 0, "high": 1, "count": 10}},
    )  # fmt: skip
    bins = {"accuracy": Bins(low=0.0, high=1.0, count=10)}
    arrays = [metric_arrays({"accuracy": each}, {"accuracy": 1.0}, 10, 1000, bins) for each in [0.25] * 2 + [0.85] * 8]
    take_part(world, world.add_devices(10), arrays)
    [listed] = json.loads(archipel("round", "list", task["task_id"], "--json")[0])
    shown = archipel("round", "show", listed["round_id"])[0]
    # Each device is in the middle of its bin, give or take 0.05: 0.25 or 0.85.
    assert (
        "accuracy over the devices: mean 0.73 ±0.05, worst 10% 0.25 ±0.05, deciles 1, 5, 9: 0.25 ±0.05, 0.85 ±0.05, "
        "0.85 ±0.05 (10 devices)"
    ) in shown
    assert re.search(r"^  0\.2 to 0\.3 +2  #{10}$", shown, re.M)
    assert re.search(r"^  0\.8 to 0\.9 +8  #{40}$", shown, re.M)
    table, picture = tmp_path / "rounds.csv", tmp_path / "curves.svg"
    line = archipel("task", "metrics", task["task_id"], "--csv", str(table), "--plot", str(picture))[0]
    assert "accuracy worst 10% 0.25" in line
    assert "evaluation accuracy, round 1: mean 0.73 ±0.05, worst 10%" in archipel("task", "show", task["task_id"])[0]
    [row] = csv.DictReader(table.read_text().splitlines())
    assert float(row["evaluation accuracy worst 10%"]) == pytest.approx(0.25)
    assert float(row["evaluation accuracy mean over devices"]) == pytest.approx(0.73)
    assert "devices' evaluation accuracy, worst 10%" in picture.read_text()


@pytest.mark.sampled(every=3)
def test_the_estimate_of_adoption_is_shown_with_its_error(archipel: Command, reached: World) -> None:
    world = reached
    task = world.create_task(
        kind="evaluation", metrics={"loss": 8.0}, cohort=4, threshold=None, count_adoption=True, min_contributors=3
    )
    evaluated = metric_arrays({"loss": 1.0}, {"loss": 8.0}, 10, 1000)
    take_part(world, world.add_devices(4), [{**evaluated, **adoption(each)} for each in (True, True, True, False)])
    [listed] = json.loads(archipel("round", "list", task["task_id"], "--json")[0])
    shown = archipel("round", "show", listed["round_id"])[0]
    # Three of four yes: 2 x 3 - 4 / 2 = 4 took it, with a standard error of the root of 3.
    assert "adoption                about 4 of 4 took it (standard error 2)" in shown


@pytest.mark.sampled(every=4)
def test_a_buffered_round_shows_whose_updates_came_into_it(archipel: Command, reached: World) -> None:
    world = reached
    plain = {"privacy": "plain", "threshold": None, "mode": "asynchronous", "cohort": 3, "concurrency": 6}
    task = world.create_task(rounds=2, **plain)
    devices = world.add_devices(6)
    world.start_round(devices)
    for device in devices:
        device.updating(**{"w.update": [[0, 0]] * 3, "b.update": [0, 0], "weight": 1.0})
        world.clock.now += 1
        world.settle()
    # By number: the clock of this test stands still.
    first, second = sorted(archipel("round", "list", task["task_id"])[0].splitlines()[1:], key=lambda x: x.split()[1])
    assert first.split()[2:5] == ["committed", "6", "3"]
    assert second.split()[2:5] == ["committed", "0", "3"]
    shown = archipel("round", "show", second.split()[0])[0]
    assert all(f"{device.id}  began earlier         yes" in shown for device in devices[3:])
    assert "an update comes into the round that is open" in " ".join(archipel("round", "list", "--help")[0].split())


@pytest.mark.sampled(every=8)
def test_who_spoils_rounds_is_shown_set_aside_and_released(archipel: Command, reached: World) -> None:
    world = reached
    task = world.create_task(rounds=40, cohort=4, min_cohort=4, threshold=3)
    devices = world.add_devices(9)
    spoiler = devices[0]
    play_round(world, devices[:4], noise_from(spoiler))
    [first] = world.rounds(task["task_id"])
    shown = archipel("round", "show", first["round_id"])[0]
    assert "spoiled     by one of its devices or several, which cannot be seen from one round" in shown
    out, _ = archipel("task", "watch", task["task_id"], "--timeout", "0.2", code=1)
    assert "round 1: spoiled after 0.0 s: aggregation: " in out
    assert "1 rounds spoiled since the last good one: " in out
    assert "4 devices that were in spoiled ones are mixed with others" in out
    assert "1 of the last 1 secure rounds were spoiled" in archipel("population", "show", "pupils")[0]
    one = archipel("population", "show-device", spoiler.id)[0]
    assert "suspicion   1 of its last 1 rounds were spoiled; no more than chance explains" in one

    for _ in range(80):
        play_round(world, devices, noise_from(spoiler))
        if world.operator("GET", "/v1/populations/pupils")[1]["set_aside"]:
            break
    _, row = archipel("population", "devices", "pupils", "--state", "set-aside")[0].splitlines()
    assert row.split()[0] == spoiler.id
    assert "set aside" in row
    one = archipel("population", "show-device", spoiler.id)[0]
    assert "because     spoils rounds:" in one
    assert "rounds that it was in were spoiled; by chance so much comes about once in" in one
    last = next(line.split()[-1] for line in one.splitlines() if line.startswith("since round"))
    shown = archipel("round", "show", last)[0]
    assert f"{spoiler.id} was set aside" in shown
    assert "suspects that waited, to find out who spoils rounds" in shown
    assert archipel("population", "release", spoiler.id)[0] == f"{spoiler.id} active\n"
    assert "set aside" not in archipel("population", "show-device", spoiler.id)[0]
