"""Who sees which page: every page with every role, against the table in matrix.py, which is written by hand."""

from __future__ import annotations

import pytest

from tests.server.dashboard.matrix import MATRIX
from tests.server.http.test_permissions import concrete
from tests.support.visitors import Visitor, access_token
from tests.support.world import World

ROLES = ("operator", "analyst", "auditor", "admin")


def test_the_dashboard_has_the_pages_of_the_matrix_and_no_others(world: World) -> None:
    rules = [rule for rule in world.app.url_map.iter_rules() if rule.rule.startswith("/dashboard")]
    made = [f"{method} {rule.rule}" for rule in rules for method in rule.methods - {"HEAD"}]
    written = [line.route for line in MATRIX]
    assert sorted(made) == sorted(written), "add the page to tests/server/dashboard/matrix.py, with who may see it"


@pytest.mark.parametrize("role", ROLES)
def test_every_page_with_every_role(world: World, role: str) -> None:
    visitor = Visitor(world, access_token(world, role)[0])
    csrf = visitor.csrf
    for line in MATRIX:
        if line.path in ("/dashboard/login", "/dashboard/logout"):
            continue
        path = concrete(line.path)
        answer = visitor.get(path) if line.method == "GET" else visitor.send(path, {"csrf": csrf})
        where = f"{role}: {line.route} -> {answer.status_code} {answer.get_data(as_text=True)[-300:]}"
        if getattr(line, role) == "yes":
            # Let in; the made-up ids then lead to other errors, but never to these.
            assert answer.status_code not in (401, 403, 405, 500), where
        else:
            assert answer.status_code == 403, where
        assert answer.mimetype != "application/problem+json", where


@pytest.mark.parametrize("cookie", [None, "x" * 43, "of a session that has ended"])
def test_who_is_not_logged_in_gets_the_login_and_nothing_else(world: World, cookie: str | None) -> None:
    visitor = Visitor(world)
    if cookie is not None:
        if cookie.startswith("of"):
            visitor.log_in(world.operator_token)
            world.clock.now += world.settings.person_seconds
        else:
            visitor.client.set_cookie("archipel-local", cookie, domain="localhost")
    for line in MATRIX:
        if line.nobody == "yes":
            continue
        path = concrete(line.path)
        answer = visitor.get(path) if line.method == "GET" else visitor.send(path, {"csrf": "x"})
        if line.nobody == "login":
            assert answer.status_code == 303, line
            assert answer.headers["Location"].startswith("/dashboard/login?next="), line
        else:
            assert answer.status_code == 401, line


def test_who_is_bound_to_populations_is_not_led_to_the_audit_log(world: World) -> None:
    """It is of all populations, and the API does not show it to them either."""
    bound, free = (
        Visitor(world, access_token(world, "auditor", **more)[0]) for more in ({"populations": ["pupils"]}, {})
    )
    assert 'href="/dashboard/audit"' in free.page("/dashboard/")
    assert free.get("/dashboard/audit").status_code == 200
    assert 'href="/dashboard/audit"' not in bound.page("/dashboard/")
    answer = bound.get("/dashboard/audit")
    assert answer.status_code == 403
    assert "not for the role &#39;auditor&#39; of some populations" in answer.get_data(as_text=True)
