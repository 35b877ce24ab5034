"""What a view of the dashboard works with: who asks, and the API, which it asks as that person.

Views never touch the database. What a page shows and does is what a handler of the API's route table answers to the
same person, after the same check of the role: so no page can show or do what the API does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from archipel.errors import InvalidRequestError, NotFoundError
from archipel.server.callers import Identity
from archipel.server.http.problems import refuse
from archipel.server.http.routes import CONVERTERS, Call, Route, serve_call
from archipel.server.services import Services

_ARGUMENT = re.compile(r"<(\w+):(\w+)>")
Routes = Mapping[str, Route]
"""The API's routes by the names of their handlers."""


def by_name(resources: Mapping[str, Sequence[Route]]) -> Routes:
    """The routes of all resources by the names of their handlers."""
    return {route.name: route for routes in resources.values() for route in routes}


@dataclass(frozen=True)
class Desk:
    """One request of somebody who is logged in.

    `csrf` goes into each form, `path` is that of the request, `session` the digest of the session's cookie.
    `file` are the bytes of a file that comes with the form.
    """

    services: Services
    routes: Routes
    identity: Identity
    csrf: str
    path: str
    form: Mapping[str, str]
    query: Mapping[str, str]
    session: bytes = b""
    file: Iterator[bytes] | None = None

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self.services.clock()

    def may(self, *names: str) -> bool:
        """Whether the person may ask all these routes, by role and, where a route is for all populations, by token."""
        routes = [self.routes[name] for name in names]
        bound = self.identity.populations is not None
        return all(self.identity.role in route.roles and not (route.everywhere and bound) for route in routes)

    def ask(
        self,
        name: str,
        /,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        key: str | None = None,
        **arguments: str,
    ) -> Any:
        """The answer of the route with the handler `name`: its struct, or a Response.

        Arguments:
            body: Builtins of the request's struct.
            query: Of the query string; texts as they come from a form, those that are empty left out.
            key: The idempotency key, for routes that take one.
            arguments: Of the path.

        Raises RefusalError, as the API refuses it.
        """  # fmt: skip
        route = self._route(name)
        for kind, argument in _ARGUMENT.findall(route.path):
            if not re.fullmatch(CONVERTERS[kind].regex, arguments[argument]):
                raise NotFoundError(f"no {argument.removesuffix('_id')} {arguments[argument][:64]!r}")
        try:
            given = {field: value for field, value in (query or {}).items() if value not in ("", None)}
            asked = None if route.query is None else msgspec.convert(given, route.query, strict=False)
            decoded = None if route.request is None else msgspec.convert(body, route.request)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(str(error)) from None
        raw = b"" if decoded is None else msgspec.json.encode(decoded, order="sorted")
        answer = serve_call(route, Call(self.services, self.identity, decoded, raw, asked, key), arguments)
        return answer[0] if isinstance(answer, tuple) else answer

    def check(self, name: str, body: Any) -> list[str]:
        """What is likely to go wrong if the route is asked with `body`, builtins of its request; nothing is done yet.

        Raises RefusalError as far as the API's refusal can be foreseen.
        """
        route = self._route(name)
        try:
            decoded = msgspec.convert(body, route.request)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(str(error)) from None
        return [] if route.foresee is None else route.foresee(Call(self.services, self.identity, decoded, b""))

    def call(self, name: str) -> Call[None]:
        """For a function beside the handler `name` that has no body: a call by this person, who may ask that route.

        Raises ApiError 403.
        """
        self._route(name)
        return Call(self.services, self.identity, None, b"")

    def _route(self, name: str) -> Route:
        route = self.routes[name]
        if self.identity.role not in route.roles:
            raise refuse(403, f"this is not for the role {self.identity.role!r}")
        return route
