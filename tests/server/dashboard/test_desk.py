"""A view asks the API as the person who is logged in, and gets what that person gets there."""

from __future__ import annotations

from typing import get_args

import pytest

from archipel.errors import ApiError, InvalidRequestError, NotFoundError
from archipel.server.callers import Identity, Role
from archipel.server.dashboard.desk import Desk, by_name
from archipel.server.http.api import ROUTES
from tests.support.world import World


def desk(world: World, role: Role, *populations: str) -> Desk:
    rights = frozenset(populations) or None
    return Desk(
        services=world.services, routes=by_name(ROUTES), identity=Identity(role, "0" * 32, rights), csrf="", path="/",
        form={}, query={},
    )  # fmt: skip


@pytest.mark.parametrize("role", [role for role in get_args(Role) if role not in ("anyone", "device")])
@pytest.mark.sampled(every=6)
def test_no_view_asks_a_route_that_the_role_may_not(world: World, role: Role) -> None:
    for name, route in by_name(ROUTES).items():
        at = desk(world, role)
        assert at.may(name) == (role in route.roles)
        if role not in route.roles:
            for ask in (lambda at=at, name=name: at.ask(name), lambda at=at, name=name: at.call(name)):
                with pytest.raises(ApiError) as refused:
                    ask()
                assert refused.value.status == 403


def test_names_in_paths_are_those_that_the_api_takes(world: World) -> None:
    at = desk(world, "admin")
    for wrong in ("x", "0" * 31, "0" * 33, "../x", "A" * 32, "0" * 32 + "\n"):
        with pytest.raises(NotFoundError):
            at.ask("show_task", task_id=wrong)
    with pytest.raises(NotFoundError):
        at.ask("show_version", name="digits", number="0")


def test_queries_and_bodies_are_decoded_as_strictly_as_at_the_api(world: World) -> None:
    at = desk(world, "admin")
    for query in ({"limit": "501"}, {"state": "nonsense"}, {"unknown": "1"}, {"after": "x"}):
        with pytest.raises(InvalidRequestError):
            at.ask("list_tasks", query=query)
    for body in ({}, {"name": "a"}, {"name": "a", "population": "b", "more": 1}, {"name": "<b>", "population": "b"}):
        with pytest.raises(InvalidRequestError):
            at.ask("create_model", body)
        with pytest.raises(InvalidRequestError):
            at.check("create_model", body)
    assert at.ask("list_models").items == []


def test_a_population_of_others_is_not_there(world: World) -> None:
    task = world.create_task()
    with pytest.raises(ApiError) as refused:
        desk(world, "operator", "elsewhere").ask("show_task", task_id=task["task_id"])
    assert refused.value.status == 404
