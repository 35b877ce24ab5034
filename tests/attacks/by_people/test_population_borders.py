"""An operator, an auditor and a device of one population want what belongs to another one on the same server: bundles,
weights, their parts, results, and the right to begin something with them. A hospital's model is nobody else's.

What stops them: every bundle and every file of weights is read only by those whom it reaches (server.rounds.reach), and
what does not is answered in the very words for what does not exist.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from archipel.protocol.operator.tasks import TaskInfo
from archipel.server.database.tables import Reach, Task
from archipel.server.rounds.reach import AFTER_SECONDS
from tests.attacks.borders_world import Caller, device, person
from tests.support.federation import Federation, open_federation
from tests.support.fixtures.federation import federation, server_host  # noqa: F401  (fixtures)

OURS, THEIRS = "hospital", "pupils"


@dataclass
class Borders:
    """What the hospital has: a task that has made versions, and a model of one of them, promoted."""

    federation: Federation
    bundle: str
    task: TaskInfo
    weights: str
    round_id: str
    running: TaskInfo
    doctor: Caller
    patient: Caller


@pytest.fixture
def borders(federation: Federation) -> Borders:  # noqa: F811
    return make_borders(federation)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Borders]:
    """For tests in which nothing that the hospital has becomes another one's."""
    with open_federation(tmp_path_factory.mktemp("shared"), "127.0.0.1") as made:
        yield make_borders(made)


def make_borders(federation: Federation) -> Borders:  # noqa: F811
    doctor = person(federation, OURS)
    status, made = doctor.ask("POST", f"/v1/bundles?population={OURS}", federation.bundle_file.read_bytes())
    assert status == 201, made
    agents = []
    for number in range(3):
        agent, patient = device(federation, number, OURS)
        agents.append(agent)
    task = federation.task(population=OURS, bundle=made["digest"], cohort=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state == "completed")
    [done] = [each for each in federation.rounds(task) if each.phase == "committed"]
    assert done.weights_out is not None
    for path, body in (
        ("/v1/models", {"name": "lungs", "population": OURS}),
        ("/v1/models/lungs/versions", {"task_id": task.task_id}),
        ("/v1/models/lungs/promote", {"version": 1}),
    ):
        status, answer = doctor.ask("POST", path, body)
        assert status in (200, 201), answer
    # A second one that lives, paused: devices have a reason to read what it names.
    running = federation.task(population=OURS, bundle=made["digest"], weights=done.weights_out, cohort=500,
                              kind="evaluation", metrics={"mse": 10.0}, threshold=301)  # fmt: skip
    return Borders(federation, made["digest"], task, done.weights_out, done.round_id, running, doctor, patient)


def reads(borders: Borders) -> list[str]:
    return [
        f"/v1/bundles/{borders.bundle}", f"/v1/bundles/{borders.bundle}/pieces",
        f"/v1/blobs/{borders.weights}", f"/v1/blobs/{borders.weights}/pieces",
    ]  # fmt: skip


def absent(text: str) -> str:
    """The same question, or answer, about something that is not there."""
    zeros = re.sub("[0-9a-f]{32,64}", lambda found: "0" * len(found[0]), text)
    return zeros.replace("lungs", "absent")


def long_ago(federation: Federation, task_id: str) -> None:  # noqa: F811
    """A minute passes after the task has ended."""
    with federation.server._services.database.write() as session:
        task = session.get_one(Task, task_id)
        assert task.ended is not None
        task.ended -= AFTER_SECONDS


@pytest.mark.sampled(every=4)
def test_strangers_get_nothing_and_learn_nothing(shared: Borders) -> None:
    outsiders = {
        "operator": person(shared.federation, THEIRS),
        "auditor": person(shared.federation, THEIRS, role="auditor"),
    }
    _, outsiders["device"] = device(shared.federation, 9, THEIRS)
    people_only = [
        f"/v1/tasks/{shared.task.task_id}", f"/v1/tasks/{shared.task.task_id}/metrics",
        f"/v1/tasks/{shared.task.task_id}/rounds", f"/v1/rounds/{shared.round_id}/participants",
        f"/v1/rounds/{shared.round_id}", "/v1/models/lungs", "/v1/models/lungs/versions",
        "/v1/models/lungs/versions/1", "/v1/models/lungs/promotions",
        f"/v1/devices/{shared.federation.agents[0].device_id}",
    ]  # fmt: skip
    log = f"/v1/populations/{OURS}/weights-log/{shared.bundle}"
    for who, outsider in outsiders.items():
        paths = reads(shared) + ([] if who == "device" else people_only)
        for path in (log, f"{log}/2/endorsement"):  # it names devices
            status, answer = outsider.ask("GET", path)
            assert status == (404 if who == "device" else 403), (who, path, answer)
        for path in paths:
            theirs, nobodys = outsider.ask("GET", path), outsider.ask("GET", absent(path))
            assert theirs[0] == nobodys[0] == 404, (who, path, theirs)
            assert absent(theirs[1]["detail"]) == absent(nobodys[1]["detail"]), (who, path)
        assert outsider.ask("GET", "/v1/audit")[0] == 403, who


@pytest.mark.sampled(every=4)
def test_those_whose_it_is_read_it(shared: Borders) -> None:
    auditor = person(shared.federation, OURS, role="auditor")
    for who, caller in (("doctor", shared.doctor), ("auditor", auditor), ("patient", shared.patient)):
        for path in [*reads(shared), f"/v1/populations/{OURS}/weights-log/{shared.bundle}"]:
            assert caller.ask("GET", path)[0] == 200, (who, path)
    weights = shared.patient.ask("GET", f"/v1/blobs/{shared.weights}")[1]
    assert hashlib.sha256(weights).hexdigest() == shared.weights


def test_nobody_begins_something_with_what_is_not_theirs(shared: Borders) -> None:
    outsider, analyst = person(shared.federation, THEIRS), person(shared.federation, THEIRS, role="analyst")
    values = {"name": "x", "population": THEIRS, "rounds": 1, "min_cohort": 3, "cohort": 5, "threshold": 3}
    evaluation = {**values, "kind": "evaluation", "metrics": {"mse": 10.0}}
    status, own = outsider.ask("POST", "/v1/models", {"name": "own", "population": THEIRS})
    assert status == 201, own
    attempts = [
        (outsider, "/v1/tasks", {**values, "bundle": shared.bundle}),
        (analyst, "/v1/tasks", {**evaluation, "bundle": shared.bundle, "weights": shared.weights}),
        (outsider, "/v1/models/own/versions", {"bundle": shared.bundle}),
        (outsider, "/v1/models/own/versions", {"task_id": shared.task.task_id}),
    ]
    for who, path, body in attempts:
        status, answer = who.ask("POST", path, body)
        made_up = {name: absent(value) if isinstance(value, str) else value for name, value in body.items()}
        assert (status, absent(answer["detail"])) == (422, absent(who.ask("POST", path, made_up)[1]["detail"]))
    for path in (f"/v1/tasks/{shared.task.task_id}/cancel", "/v1/models/lungs/rollback"):
        assert outsider.ask("POST", path, {})[0] == 404
    # In another's population they are told no whatever they name: they said its name themselves.
    for who, body in ((outsider, values), (analyst, evaluation)):
        status, answer = who.ask("POST", "/v1/tasks", {**body, "population": OURS, "bundle": shared.bundle})
        assert (status, OURS in answer["detail"]) == (403, True), answer
    assert outsider.ask("POST", f"/v1/bundles?population={OURS}", shared.federation.bundle_file.read_bytes())[0] == 403


@pytest.mark.sampled(every=8)
def test_uploading_the_same_bytes_says_nothing_about_others_and_binds_the_bundle_to_both(borders: Borders) -> None:
    outsider = person(borders.federation, THEIRS)
    data = borders.federation.bundle_file.read_bytes()
    status, made = outsider.ask("POST", "/v1/bundles", data)
    assert (status, made["digest"]) == (201, borders.bundle)  # as if it were the first
    assert outsider.ask("POST", "/v1/bundles", data)[0] == 200
    assert outsider.ask("GET", f"/v1/bundles/{borders.bundle}")[0] == 200
    # The bundle alone: what the hospital trained is still the hospital's.
    assert outsider.ask("GET", f"/v1/blobs/{borders.weights}")[0] == 404
    # A device has no reason to read it before a task or a model names it.
    _, pupil = device(borders.federation, 9, THEIRS)
    assert pupil.ask("GET", f"/v1/bundles/{borders.bundle}")[0] == 404
    values = {"name": "x", "population": THEIRS, "rounds": 1, "min_cohort": 3, "cohort": 5, "threshold": 3}
    status, task = outsider.ask("POST", "/v1/tasks", {**values, "bundle": borders.bundle})
    assert status == 201, task
    assert pupil.ask("GET", f"/v1/bundles/{borders.bundle}")[0] == 200
    outsider.ask("POST", f"/v1/tasks/{task['task_id']}/cancel")
    assert pupil.ask("GET", f"/v1/bundles/{borders.bundle}")[0] == 200  # a device may be about to
    long_ago(borders.federation, task["task_id"])
    assert pupil.ask("GET", f"/v1/bundles/{borders.bundle}")[0] == 404


@pytest.mark.sampled(every=4)
def test_a_device_reads_no_longer_what_an_ended_task_left(borders: Borders) -> None:
    first = borders.federation.operator.tasks.get(borders.task.task_id)
    long_ago(borders.federation, first.task_id)
    with borders.federation.server._services.database.read() as session:
        mine = [row.digest for row in session.query(Reach).filter_by(reason=first.task_id)]
    only = [digest for digest in mine if digest not in (borders.bundle, borders.weights)]
    assert only, "version 0's weights"
    for digest in only:
        assert borders.patient.ask("GET", f"/v1/blobs/{digest}")[0] == 404
        assert borders.doctor.ask("GET", f"/v1/blobs/{digest}")[0] == 200
