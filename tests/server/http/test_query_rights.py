"""Asking devices questions is a right of its own, and may need a second person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.world import World

METRICS = {"kind": "evaluation", "metrics": {"loss": 8.0}}
ANALYSIS = {"kind": "analytics"}
TRAINING: dict[str, str] = {"kind": "training"}


def token(world: World, role: str, **more: Any) -> dict[str, str]:
    status, made = world.operator("POST", "/v1/tokens", {"name": role, "role": role, **more})
    assert status == 201, made
    return {"Authorization": f"Bearer {made['token']}"}


def create(world: World, headers: dict[str, str], **changes: Any) -> tuple[int, Any]:
    asked = {
        "name": "q", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 5, "bundle": world.publish(),
        **changes,
    }  # fmt: skip
    status, answer = world.operator("POST", "/v1/tasks", asked, headers=headers)
    return status, answer


@pytest.mark.parametrize(
    ("role", "training", "query"),
    [("operator", 201, 403), ("analyst", 403, 201), ("auditor", 403, 403), ("admin", 201, 201)],
)
@pytest.mark.sampled(every=6)
def test_who_may_make_which_tasks(world: World, role: str, training: int, query: int) -> None:
    headers = token(world, role)
    assert create(world, headers, **TRAINING)[0] == training
    assert create(world, headers, **METRICS)[0] == query
    assert create(world, headers, **ANALYSIS)[0] == query


def test_analysts_control_queries_and_nothing_else(world: World) -> None:
    analyst, operator = token(world, "analyst"), token(world, "operator")
    trained = create(world, operator)[1]["task_id"]
    asked = create(world, analyst, **ANALYSIS)[1]["task_id"]

    def may(headers: dict[str, str], task: str, action: str) -> int:
        return int(world.operator("POST", f"/v1/tasks/{task}/{action}", headers=headers)[0])

    for action in ("pause", "resume", "cancel"):
        assert may(analyst, trained, action) == 403
    # An operator may stop a query, and not set it going again.
    assert may(operator, asked, "pause") == 200
    assert may(operator, asked, "resume") == 403
    assert may(analyst, asked, "resume") == 200
    assert may(analyst, asked, "cancel") == 200
    for path in ("/v1/bundles", "/v1/models", "/v1/rollouts", "/v1/tokens"):
        assert world.operator("POST", path, {}, headers=analyst)[0] == 403, path
    assert world.operator("GET", "/v1/tasks", headers=analyst)[0] == 200


def test_an_analyst_is_bound_to_populations(world: World) -> None:
    headers = token(world, "analyst", populations=["teachers"])
    bundle = world.operator("POST", "/v1/bundles?population=teachers", world.bundle_file.read_bytes())[1]["digest"]
    assert create(world, headers, **ANALYSIS)[0] == 403
    assert create(world, headers, **ANALYSIS, population="teachers", bundle=bundle)[0] == 201


class TestApproval:
    @pytest.fixture
    def server_settings(self) -> Mapping[str, object]:
        return {"query_approval": True}

    def test_a_query_waits_for_somebody_else(self, world: World) -> None:
        one, other, operator = token(world, "analyst"), token(world, "analyst"), token(world, "operator")
        made = create(world, one, **ANALYSIS, cohort=3)[1]
        path = f"/v1/tasks/{made['task_id']}"
        assert (made["state"], made["approved_by"]) == ("proposed", None)
        assert made["waiting_for"] == "waits for the approval of somebody else who may run queries"
        devices = world.add_devices(3)
        for device in devices:
            device.check_in()
        world.settle()
        assert world.rounds(made["task_id"]) == []
        assert world.operator("POST", f"{path}/resume", headers=one)[0] == 409
        assert world.operator("POST", f"{path}/approve", headers=operator)[0] == 403
        status, answer = world.operator("POST", f"{path}/approve", headers=one)
        assert (status, "somebody else must" in answer["detail"]) == (403, True)
        status, done = world.operator("POST", f"{path}/approve", headers=other)
        assert (status, done["state"]) == (200, "running")
        assert done["approved_by"] != done["created_by"] == made["created_by"]
        assert world.operator("POST", f"{path}/approve", headers=other)[0] == 409
        world.settle()
        assert len(world.rounds(made["task_id"])) == 1
        entries = world.operator("GET", "/v1/audit")[1]["items"]
        [approved] = [each for each in entries if each["action"] == "task.approve"]
        assert (approved["actor"], approved["subject"]) == (done["approved_by"], made["task_id"])

    def test_training_needs_none(self, world: World) -> None:
        assert create(world, token(world, "operator"))[1]["state"] == "running"

    def test_what_is_proposed_may_be_withdrawn(self, world: World) -> None:
        one, other = token(world, "analyst"), token(world, "analyst")
        path = f"/v1/tasks/{create(world, one, **METRICS)[1]['task_id']}"
        assert world.operator("POST", f"{path}/cancel", headers=one)[1]["state"] == "cancelled"
        assert world.operator("POST", f"{path}/approve", headers=other)[0] == 409

    def test_nor_is_it_approved_for_another_population(self, world: World) -> None:
        one, other = token(world, "analyst"), token(world, "analyst", populations=["teachers"])
        path = f"/v1/tasks/{create(world, one, **METRICS)[1]['task_id']}"
        # For whom it is of another population it does not exist.
        assert world.operator("POST", f"{path}/approve", headers=other)[0] == 404
        assert world.operator("GET", path)[1]["state"] == "proposed"
