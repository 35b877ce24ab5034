"""The API's description: valid, complete, and kept by every answer to whatever schemathesis makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis import checks

from archipel.protocol.operator.tasks import TaskInfo
from archipel.server.http.api import ROUTES
from tests.support.fleet import MODEL, Fleet
from tests.support.world import NO_LIMITS, World

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
"""Not that valid data is accepted: nobody guesses signatures, nor digests of what is stored. Who may call what is in
test_permissions.py."""


@schemathesis.serializer("application/zip", "application/msgpack")
def as_it_is(_: object, value: object) -> bytes:
    data = getattr(value, "data", value)
    return data if isinstance(data, bytes) else str(data).encode()


ROUTE_OF = {route.name: route for routes in ROUTES.values() for route in routes}


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return NO_LIMITS


@pytest.fixture
def description(world: World) -> dict[str, Any]:
    with world.app.test_client() as client:
        return msgspec.json.decode(client.get("/v1/openapi.json").get_data())


@pytest.mark.sampled(every=3)
def test_it_is_valid_and_has_every_route(description: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(description).validate()
    operations = {each["operationId"]: each for path in description["paths"].values() for each in path.values()}
    assert operations.keys() == ROUTE_OF.keys()
    for name, operation in operations.items():
        roles = {role for each in operation["security"] for role in each}
        assert roles == ROUTE_OF[name].roles - {"anyone"} if "anyone" not in ROUTE_OF[name].roles else not roles


def test_examples_in_python_are_not_in_it(description: dict[str, Any]) -> None:
    schemas = description["components"]["schemas"]
    assert "Example:" in (TaskInfo.__doc__ or "")
    assert schemas["TaskInfo"]["description"].startswith("`model` is the digest")
    assert [name for name, schema in schemas.items() if "Example:" in schema.get("description", "")] == []


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("examples", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_are_what_it_says(world: World, examples: int) -> None:
    """In a round under way; half of the requests name it, or a model that is there, the others what schemathesis makes
    up."""
    Fleet(world).create()
    world.create_task(cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    known = {"round_id": devices[0].plan.round_id, "name": MODEL, "number": "1"}
    schema = schemathesis.openapi.from_wsgi("/v1/openapi.json", world.app)
    tried = set()
    limits = settings(
        max_examples=examples, derandomize=True, database=None,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for found in schema.get_all_operations():
        operation = found.ok()
        name = operation.definition.raw["operationId"]
        token = world.operator_token if "admin" in ROUTE_OF[name].roles else devices[0].token
        limits(given(operation.as_strategy(), st.booleans())(asker(token, known)))()
        tried.add(name)
    assert tried == ROUTE_OF.keys() - {"show_description"}  # schemathesis leaves the document itself out


def asker(token: str, known: dict[str, str]) -> Callable[[schemathesis.Case[Any], bool], None]:
    def ask(case: schemathesis.Case[Any], of_known: bool) -> None:
        if of_known:
            case.path_parameters.update({name: known[name] for name in known.keys() & case.path_parameters.keys()})
        response = case.call(headers={"Authorization": f"Bearer {token}"})
        # No coordinator has the lease here, and a server without one is not ready.
        not_ready = case.path == "/readyz" and response.status_code == 503
        assert response.status_code < 500 or not_ready, case.as_curl_command()
        assert response.status_code != 429, case.as_curl_command()
        case.validate_response(response, checks=CHECKS)

    return ask
