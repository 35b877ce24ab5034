"""Every route that people may call is one documented method of the client, and the other way round."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from archipel.errors import ClientError
from archipel.server.http.api import ROUTES
from archipel.server.http.routes import CONVERTERS, Route
from tests.support.operator_calls import arguments, method, methods, nowhere, send

EXCEPTIONS = {
    "POST /v1/devices": "a device enrols itself, with its key: archipel.client",
    "PUT /v1/devices/<device_id>/key": "a device replaces its own key: archipel.client",
    "POST /v1/challenges": "a device asks for what it signs to open a session: archipel.client",
    "GET /healthz": "for container platforms and load balancers",
    "GET /readyz": "for container platforms and load balancers",
    "POST /v1/sessions": "a device opens a session: archipel.client",
}
"""Routes that anyone may call and that are of no use to people."""


def called(route: Route) -> str:
    return route.method + " " + re.sub("<[a-z]+:([a-z_]+)>", r"<\1>", route.path)


FOR_PEOPLE = {
    called(route): re.sub(r"<([a-z]+):[a-z_]+>", lambda found: CONVERTERS[found[1]].regex, route.path)
    for routes in ROUTES.values()
    for route in routes
    if route.roles - {"device"}
}


def documentation(place: str) -> str:
    return inspect.getdoc(method(nowhere(), place)) or ""


def documented_route(place: str) -> str | None:
    found = re.search(r"^Route: (.+)$", documentation(place), re.M)
    return found[1] if found else None


def test_each_route_is_one_method() -> None:
    documented = Counter(route for place in methods() if (route := documented_route(place)) is not None)
    assert set(EXCEPTIONS) <= set(FOR_PEOPLE), "an exception is no route any more"
    assert documented == Counter(route for route in FOR_PEOPLE if route not in EXCEPTIONS)


@pytest.mark.parametrize("place", methods())
def test_a_method_calls_the_route_that_it_names(place: str, sent: list[tuple[str, str]], tmp_path: Path) -> None:
    client = nowhere()
    call = method(client, place)
    given = arguments(call, tmp_path)
    send(call, **given)
    route = documented_route(place)
    if route is None:
        # It is made of another method, and has no request of its own.
        [other] = re.findall(r"^Calls: (\w+)$", documentation(place), re.M)
        send(method(client, f"{place.split('.')[0]}.{other}"), **given)
        first, second = sent
        assert first == second
        return
    [(verb, address)] = sent
    path = address.partition("?")[0]
    matching = [name for name, regex in FOR_PEOPLE.items() if re.fullmatch(regex, path) and name.startswith(f"{verb} ")]
    assert matching == [route]
    values = re.fullmatch(re.sub(r"<(\w+)>", r"(?P<\1>[^/]+)", route.partition(" ")[2]), path)
    assert values is not None
    for name, value in values.groupdict().items():
        assert value == str(given[name])


@pytest.mark.parametrize("place", [place for place in methods() if "<" in (documented_route(place) or "")])
def test_an_id_leads_nowhere_else(place: str, sent: list[tuple[str, str]], tmp_path: Path) -> None:
    call = method(nowhere(), place)
    route = documented_route(place)
    given = arguments(call, tmp_path)
    for name in re.findall(r"<(\w+)>", route or ""):
        for wrong in ("", "..", ".", "a/b", "a?b", "a#b", "a%2fb", "a b", "a\nb", "ä", "a\n"):
            with pytest.raises(ClientError, match="expected an id or a name"):
                list(call(**{**given, name: wrong}))
    assert sent == []


@pytest.mark.parametrize("place", methods())
def test_a_method_says_what_it_takes_gives_and_raises(place: str) -> None:
    call, text = method(nowhere(), place), documentation(place)
    summary, *parts = text.split("\n\n")
    assert re.fullmatch(r"[A-Z][^\n]*\.", summary)
    heads = [part.partition(":")[0] for part in parts]
    parameters = list(inspect.signature(call).parameters)
    assert heads == [heads[0], *(["Args"] if parameters else []), "Returns", "Raises"]
    assert heads[0] in ("Route", "Calls")
    if parameters:
        assert re.findall(r"^    (\w+): ", parts[1], re.M) == parameters
