"""An operator's whole way by forms and pages alone: from an empty server to a model that is rolled back."""

from __future__ import annotations

import re

import pytest

from tests.support.devices import POPULATION
from tests.support.fleet import GATE, Fleet
from tests.support.visitors import Visitor, access_token, fill
from tests.support.world import World


@pytest.fixture
def visitor(world: World) -> Visitor:
    return Visitor(world, access_token(world, "operator")[0])


@pytest.mark.sampled(every=4)
def test_from_an_empty_server_to_a_model_that_is_rolled_back(world: World, visitor: Visitor) -> None:
    devices = world.add_devices(5)
    bundle = world.publish()
    task = fill(
        visitor, "/dashboard/tasks/new", name="spring", kind="training", population=POPULATION, bundle=bundle,
        rounds="1", cohort="5", min_cohort="3", privacy="secure", mode="semi-synchronous", more='{"threshold": 3}',
    )  # fmt: skip
    assert "No round was opened yet." in visitor.words(task)
    world.start_round(devices)
    world.run_to("committed", devices)
    world.settle()
    task_id = task.rsplit("/", 1)[1]
    assert "completed" in visitor.words(task)
    (done,) = world.rounds(task_id)
    words = visitor.words(f"/dashboard/rounds/{done['round_id']}")
    assert "unmasking 5" in words

    assert f'href="/dashboard/new-model?population={POPULATION}"' in visitor.page(task)
    assert f'name="population" value="{POPULATION}"' in visitor.page("/dashboard/new-model")  # the only one
    model = fill(visitor, "/dashboard/new-model", name="digits", population=POPULATION)
    assert model == "/dashboard/models/digits"
    nobody = "No device is enrolled in the population"
    assert nobody not in visitor.words(model)
    assert nobody in visitor.words(fill(visitor, "/dashboard/new-model", name="typo", population="pupil"))
    # The first characters will do, as pages show no more of them.
    first = fill(visitor, f"{model}/register", bundle=bundle[:8])
    assert f'href="{model}/register?task_id={task_id}"' in visitor.page(task)
    form = visitor.page(f"{model}/register?task_id={task_id}")
    assert f'name="task_id" value="{task_id}"' in form
    assert f'<option value="{task_id}">spring, 1 rounds, completed</option>' in form
    second = fill(visitor, f"{model}/register", task_id=task_id[:8])
    assert "can be a version" not in visitor.words(task)  # it is one
    assert (first, second) == (f"{model}/versions/1", f"{model}/versions/2")
    assert "once the model has a promoted version" in visitor.words(second)
    assert "The version was promoted." in visitor.do(f"{first}/promote")
    assert "once the model has a promoted version" not in visitor.words(second)
    # Stages and gate are for five devices, not for thousands.
    form = visitor.page(f"{second}/rollout")
    assert "75 % for 1 h\n100 % for 1 h</textarea>" in form
    assert 'name="min_devices" value="2"' in form
    assert 'name="max_devices" value="2"' in form
    assert "the population has 5" in form
    words = visitor.words(f"{model}/compare?versions=1,2")
    assert "Devices in its round – 5" in words
    assert "Made from – version 1" in words

    rollout = fill(visitor, f"{second}/rollout", stages="50 % for 1 min\n100 % for 30 s", metric="")
    assert "50 % of devices soaks" in visitor.words(rollout)
    assert "Undo the rollout under way? All devices are offered version 1 again." in visitor.words(f"{model}/rollback")
    assert "The rollout is paused." in visitor.do(f"{rollout}/pause")
    assert "The rollout goes on." in visitor.do(f"{rollout}/resume")
    assert "The rollout was aborted." in visitor.do(f"{rollout}/abort")
    assert "The version was promoted." in visitor.do(f"{second}/promote")
    assert "Undo the promotion of version 2?" in visitor.words(f"{model}/rollback")
    assert "The model was rolled back." in visitor.do(f"{model}/rollback")
    assert world.operator("GET", "/v1/models/digits")[1]["promoted"] == 1
    assert "It was rejected: it forgets sevens" in visitor.do(f"{second}/reject", reason="it forgets sevens")
    assert "The version was restored." in visitor.do(f"{second}/restore")
    assert "The device was revoked." in visitor.do(f"/dashboard/devices/{devices[0].id}/revoke")
    assert "revoked" in visitor.words("/dashboard/devices?state=revoked")


@pytest.mark.sampled(every=6)
def test_what_an_operator_did_is_in_the_audit_log(world: World) -> None:
    token, token_id = access_token(world, "operator")
    operator = Visitor(world, token)
    for number in range(60):
        fill(operator, "/dashboard/new-model", name=f"model-{number}", population=f"p{number}")
    auditor = Visitor(world, access_token(world, "auditor")[0])
    html = auditor.page("/dashboard/audit")
    assert "model-59" in html
    assert "model-1<" not in html
    assert token_id in html
    start = html.index("/dashboard/audit?before=")
    assert "model-1<" in auditor.page(html[start : html.index('"', start)])


@pytest.mark.sampled(every=3)
def test_a_form_says_what_is_wrong_and_keeps_what_was_typed(world: World, visitor: Visitor) -> None:
    bundle = world.publish()
    form = {"name": "spring", "kind": "training", "population": POPULATION, "bundle": bundle, "rounds": "many",
            "cohort": "5", "min_cohort": "3", "privacy": "secure", "mode": "synchronous"}  # fmt: skip
    answer = visitor.post("/dashboard/tasks/new", **form)
    html = answer.get_data(as_text=True)
    assert answer.status_code == 422
    assert "Rounds: expected a whole number, got &#39;many&#39;" in html
    assert 'value="many"' in html
    assert bundle in html
    form |= {"rounds": "2", "bundle": "8915"}
    answer = visitor.post("/dashboard/tasks/new", **form)
    html = answer.get_data(as_text=True)
    assert answer.status_code == 422
    assert (
        "Bundle: expected a bundle of the list, or its whole digest, 64 hexadecimal digits, got &#39;8915&#39;" in html
    )
    assert "regex" not in html
    # What is not possible is told before somebody is asked whether it shall be done, and when it is sent all the same.
    for sent in ({}, {"sure": "yes", "key": "k" * 16}):
        form |= {"bundle": "0" * 64, **sent}
        answer = visitor.post("/dashboard/tasks/new", **form)
        assert answer.status_code == 422
        assert f"No bundle {'0' * 64}; upload it first" in answer.get_data(as_text=True)
    form |= {"more": '{"cohort": "five"}', "cohort": ""}
    assert visitor.post("/dashboard/tasks/new", **form).status_code == 422
    assert world.operator("GET", "/v1/tasks")[1]["items"] == []


def test_a_task_for_more_devices_than_there_are_is_told_so_before_it_begins(world: World, visitor: Visitor) -> None:
    *living, revoked = world.add_devices(5)
    assert len(living) == 4
    visitor.do(f"/dashboard/devices/{revoked.id}/revoke")
    form = {"name": "spring", "kind": "training", "population": POPULATION, "bundle": world.publish(), "rounds": "1",
            "cohort": "5", "min_cohort": "3", "privacy": "plain", "mode": "synchronous"}  # fmt: skip
    few = f"a round begins with 5 devices, and the population {POPULATION} has 4: it waits until more have enrolled"
    assert few in visitor.post("/dashboard/tasks/new", **form).text.lower()
    assert "a round begins with" not in visitor.post("/dashboard/tasks/new", **{**form, "cohort": "4"}).text.lower()
    assert world.operator("GET", "/v1/tasks")[1]["items"] == []


def test_a_form_that_is_sent_twice_makes_one_thing(world: World, visitor: Visitor) -> None:
    form = {"name": "spring", "kind": "training", "population": POPULATION, "bundle": world.publish(), "rounds": "1",
            "cohort": "5", "min_cohort": "3", "privacy": "plain", "mode": "synchronous", "sure": "yes",
            "key": "k" * 32}  # fmt: skip
    first, again = (visitor.post("/dashboard/tasks/new", **form) for _ in range(2))
    assert (first.status_code, again.status_code) == (303, 303)
    assert first.headers["Location"] == again.headers["Location"]
    assert len(world.operator("GET", "/v1/tasks")[1]["items"]) == 1


@pytest.mark.sampled(every=3)
def test_a_rollout_with_a_gate(world: World, visitor: Visitor) -> None:
    Fleet(world).create(2)
    form = {"stages": "50% 60\n100 30 s", "metric": "accuracy", "better": "higher", "range": "1", "max_loss": "0.05",
            "min_devices": "3", "max_devices": "3", "privacy": "plain", "seconds": "600"}  # fmt: skip
    path = "/dashboard/models/digits/versions/2/rollout"
    # Who asks for more than there are is told before it begins.
    world.add_devices(2)
    few = "The first stage would be rolled back: "
    assert re.search(few + "[0-2] devices? (is|are) eligible, its evaluation needs 3;", visitor.post(path, **form).text)
    world.add_devices(30)
    assert few not in visitor.post(path, **form).text
    assert world.operator("GET", "/v1/rollouts")[1]["items"] == []
    rollout = fill(visitor, path, **form)
    shown = world.operator("GET", f"/v1/rollouts/{rollout.rsplit('/', 1)[1]}")[1]
    assert {name: shown["gate"][name] for name in GATE} == GATE
    assert [(each["percent"], each["soak_seconds"]) for each in shown["stages"]] == [(50, 60), (100, 30)]
    words = visitor.words(rollout)
    assert "accuracy, higher is better" in words
    for path in ("/dashboard/rollouts", "/dashboard/rollouts?model=digits"):
        assert "version 2" in visitor.words(path)
    assert "There is no such rollout" in visitor.words("/dashboard/rollouts?model=another")
